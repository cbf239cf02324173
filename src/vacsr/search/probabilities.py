"""Scores as probabilities: that a pair is a labelled match, and that the first answer to a query is right.

Both are fitted to queries with known answers. :mod:`.certify` decides from which probability on to answer.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit, logsumexp

from vacsr.config import Config
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.uncertainty import Array, Values, as_vector, aurc, check_length
from vacsr.search.certify import FEW, Outcomes, certify, check_threshold, countable_level, trial_order

Kind = Literal["temperature", "isotonic"]
Mask = NDArray[np.bool_]
MEASURES: dict[str, tuple[str, ...]] = {
    "score": ("score",), "margin": ("margin",), "odds": ("odds_soft",), "sigma": ("sigma",), "combined": (),
}  # fmt: skip
"""The signals of each confidence measure; ``combined`` has all."""
_TINY = 1e-6
_FOLDS = 5
_TEMPERATURES = {"odds_sharp": 0.1, "odds": 0.25, "odds_soft": 0.5}  # in spreads of the scores
_SIXTH = 5  # an image has up to five captions that are all right, so the sixth is the first that must be wrong
_MAX_ODDS = 20.0  # in nats: more says nothing more


class Logistic(Config):
    """P(yes) = sigmoid(weight · (x − mean) / scale + bias)."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weight: tuple[float, ...]
    bias: float

    def apply(self, signals: Array) -> Array:
        """[N, F] -> [N]"""
        if not signals.shape[1] == len(self.mean) == len(self.scale) == len(self.weight):
            raise _unusable("a logistic regression", f"{signals.shape[1]} signals")
        scaled = (signals - np.array(self.mean)) / np.array(self.scale)
        return np.asarray(expit(scaled @ np.array(self.weight) + self.bias))


def _unusable(part: str, expected: str) -> DataError:
    """For a file that was changed by hand, or belongs to another model."""
    return DataError(f"search.json: {part} does not fit {expected} — fit it again: vacsr calibrate RUN --pairs SPEC")


def fit_logistic(signals: Array, labels: Array, *, ridge: float = 1.0) -> Logistic:
    """The weights of highest likelihood under a normal prior of precision ``ridge``. [N, F], [N]

    Signals are standardised first, so the prior means the same for each; the bias has next to none.
    """
    mean, scale = signals.mean(0), signals.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.concatenate(((signals - mean) / scale, np.ones((len(signals), 1))), axis=1)
    prior = np.diag([ridge] * signals.shape[1] + [1e-3])

    def loss(weight: Array) -> float:
        logit = design @ weight
        return float(np.logaddexp(0, logit).sum() - labels @ logit + weight @ prior @ weight / 2)

    def gradient(weight: Array) -> Array:
        return np.asarray(design.T @ (expit(design @ weight) - labels) + prior @ weight)

    def hessian(weight: Array) -> Array:
        chance = expit(design @ weight)
        return np.asarray(design.T @ (design * (chance * (1 - chance))[:, None]) + prior)

    start = np.zeros(design.shape[1])
    weight = minimize(loss, start, jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-9}).x
    return Logistic(
        mean=tuple(mean.tolist()), scale=tuple(scale.tolist()), weight=tuple(weight[:-1].tolist()), bias=weight[-1]
    )


class Isotonic(Config):
    """Corners of a rising line; linear between two of them, flat beyond the ends."""

    x: tuple[float, ...]  # [B], rising
    y: tuple[float, ...]  # [B], never falling

    def apply(self, values: Values) -> Array:
        """The line at each value. [N] -> [N]

        >>> Isotonic(x=(0.0, 1.0), y=(0.2, 0.6)).apply([-1.0, 0.5, 2.0])
        array([0.2, 0.4, 0.6])
        """
        if not self.x or len(self.x) != len(self.y):
            raise _unusable("an isotonic regression", "corners")
        return np.interp(as_vector("values", values), self.x, self.y)


def fit_isotonic(values: Values, labels: Values) -> Isotonic:
    """The rising function of the values nearest to the labels in squares; equal values share one level. [N], [N]

    >>> fit_isotonic([1, 2, 3, 4], [0, 1, 0, 1]).y
    (0.0, 0.5, 0.5, 1.0)
    """
    x, y = as_vector("values", values), as_vector("labels", labels)
    check_length(x, y)
    unique, group, size = np.unique(x, return_inverse=True, return_counts=True)
    level = isotonic_regression(np.bincount(group, y) / size, weights=size).x
    corner = np.ones(len(unique), dtype=bool)  # what lies between the ends of a level is on the line anyway
    corner[1:-1] = (level[1:-1] != level[:-2]) | (level[1:-1] != level[2:])
    return Isotonic(x=tuple(unique[corner].tolist()), y=tuple(level[corner].tolist()))


class GradeCalibration(Config):
    """What turns a score into a probability. Both ways are stored; ``kind`` did better on held-out pairs."""

    kind: Kind
    temperature: Logistic  # sigmoid(score / T + b); b, because few of the candidates match
    isotonic: Isotonic

    def apply(self, score: Values, kind: Kind | None = None) -> Array:
        """[N] -> [N], in (0, 1), order kept; by another ``kind`` if one is named."""
        values = as_vector("score", score)
        by_temperature = (kind or self.kind) == "temperature"
        chance = self.temperature.apply(values[:, None]) if by_temperature else self.isotonic.apply(values)
        return np.clip(chance, _TINY, 1 - _TINY)


def fit_grades(
    score: Array, match: Array, *, grade: Array | None, fit: Mask
) -> tuple[GradeCalibration, dict[str, float | None]]:
    """Fit both ways on the pairs where ``fit``, choose by log loss on the others, then fit both on all. [N] each

    Also the expected calibration errors on the others: of both ways, and of ``grade``, the method's own if it has one.
    """

    def both(rows: Mask, kind: Kind) -> GradeCalibration:
        temperature = fit_logistic(score[rows, None], match[rows], ridge=1e-3)
        return GradeCalibration(kind=kind, temperature=temperature, isotonic=fit_isotonic(score[rows], match[rows]))

    kinds: tuple[Kind, ...] = get_args(Kind)
    partly, held_out = both(fit, "temperature"), match[~fit]
    chances = {kind: partly.apply(score[~fit], kind) for kind in kinds}
    loss = {kind: -np.log(np.where(held_out > 0, chance, 1 - chance)).mean() for kind, chance in chances.items()}
    errors: dict[str, float | None] = {"ece_own": None}
    for name, chance in (*chances.items(), *(() if grade is None else (("own", grade[~fit]),))):
        errors[f"ece_{name}"] = expected_calibration_error(chance, held_out)
    return both(np.ones(len(score), dtype=bool), min(kinds, key=loss.__getitem__)), errors


def expected_calibration_error(chance: Values, match: Values, *, bins: int = 15) -> float:
    """Mean distance of the chance from the share of matches, over bins of equal count. [N], [N]

    >>> expected_calibration_error([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 0], bins=1)
    0.0
    """
    p, y = as_vector("chance", chance), as_vector("match", match)
    check_length(p, y)
    parts = [part for part in np.array_split(p.argsort(kind="stable"), bins) if len(part)]
    return float(sum(abs(p[part].sum() - y[part].sum()) for part in parts) / len(p))


class Candidates(NamedTuple):
    """Q queries with known answers, with m candidates each, best score first."""

    score: Array  # [Q, m]
    cosine: Array  # [Q, m]
    sigma: Array | None  # [Q, depth]
    right: Mask  # [Q, m]
    image: NDArray[np.int64]  # [Q] row of the image that a query is, or belongs to
    query: NDArray[np.int64]  # [Q] row of the image or caption that asks; it repeats where galleries do
    gallery: int  # items that were searched

    def take(self, rows: Mask) -> Candidates:
        parts: dict[str, Any] = {n: part[rows] for n, part in self._asdict().items() if isinstance(part, np.ndarray)}
        return self._replace(**parts)

    def outcomes(self, confidence: Array) -> Outcomes:
        """Whether the first answers are wrong, with their confidence [Q]."""
        return Outcomes(confidence, ~self.right[:, 0], self.image, self.query)


class AnswerRule(Config):
    """When the first answer is given."""

    measure: str
    signals: tuple[str, ...]
    logistic: Logistic  # the signals as the probability that the first answer is right
    spread: float  # of the scores of candidates
    cosine_spread: float
    threshold: float | None  # answer from this confidence on; never if None: no threshold could be certified
    risk: float  # α, the bound on the share of wrong answers, counted over as many images as certified it
    confidence: float  # probability that the bound holds
    level: float  # δ of the test behind it: the chance that the true risk at the threshold is not below α
    certified: int  # queries that certified, with their repeats in other galleries
    images: int  # of these queries
    answered: int  # queries that are answered at the threshold
    wrong: int  # wrong answers among them

    def confidence_of(self, score: Array, cosine: Array, sigma: Array | None) -> Array:
        """The probability that the first answer is right. [Q, m], [Q, m], [Q, d] -> [Q]"""
        columns = signals(score, cosine, sigma, spread=self.spread, cosine_spread=self.cosine_spread)
        if not set(self.signals) <= set(columns):
            raise _unusable("an answer rule", f"the signals {', '.join(columns)}")
        return self.logistic.apply(_stack(columns, self.signals))

    def outcomes(self, candidates: Candidates) -> Outcomes:
        return candidates.outcomes(self.confidence_of(candidates.score, candidates.cosine, candidates.sigma))


def fit_answer_rule(
    candidates: Candidates,
    choose: Mask,
    *,
    risk: float,
    confidence: float,
    generator: np.random.Generator,
    measures: tuple[str, ...] = tuple(MEASURES),
) -> AnswerRule:
    """Choose on the queries [Q] where ``choose``, certify on the others; no image may have queries in both.

    The measure is the one with the smallest AURC on folds that its fit has not seen. Coverage at the wanted risk would
    be closer to the purpose, but rests on too few queries to choose by.
    """
    level = countable_level(confidence)
    if min(choose.sum(), (~choose).sum()) < FEW:
        message = f"{len(choose):,} queries of {len(np.unique(candidates.image)):,} images are too few to fit to"
        raise DataError(f"{message} — give {3 * FEW} images or more; the lower the risk, the more it takes")
    part, rest = candidates.take(choose), candidates.take(~choose)
    spread, cosine_spread = float(part.score.std()) or 1.0, float(part.cosine.std()) or 1.0
    columns = signals(part.score, part.cosine, part.sigma, spread=spread, cosine_spread=cosine_spread)
    names = {measure: MEASURES[measure] or tuple(columns) for measure in measures}
    right, fold = part.right[:, 0], generator.integers(_FOLDS, size=int(part.image.max()) + 1)[part.image]
    values = {
        measure: _cross_fit(_stack(columns, some), right, fold)
        for measure, some in names.items()
        if set(some) <= set(columns)
    }
    best = min(values, key=lambda measure: aurc(-values[measure], ~right))
    trials = trial_order(part.outcomes(values[best]), risk=risk)
    rule = AnswerRule(
        measure=best, signals=names[best], spread=spread, cosine_spread=cosine_spread, threshold=None,
        logistic=fit_logistic(_stack(columns, names[best]), right.astype(np.float64)), risk=risk,
        confidence=confidence, level=level, certified=len(rest.score), images=0, answered=0, wrong=0,
    )  # fmt: skip
    outcomes = rule.outcomes(rest)
    threshold = certify(outcomes, trials, risk=risk, level=level, generator=generator)
    check = check_threshold(outcomes, threshold)
    counts = {"images": check.images, "answered": check.answered, "wrong": check.wrong}
    return rule.model_copy(update={"threshold": threshold, **counts})


def _cross_fit(columns: Array, right: Mask, fold: NDArray[np.int64]) -> Array:
    """Each query's confidence from a fit without the images of its fold. [Q, F], [Q], [Q] -> [Q]"""
    value = np.full(len(columns), float(right.mean()))
    for held_out in np.unique(fold):
        rest = fold != held_out
        if rest.any():
            value[~rest] = fit_logistic(columns[rest], right[rest].astype(np.float64)).apply(columns[~rest])
    return value


def signals(
    score: Array, cosine: Array, sigma: Array | None, *, spread: float, cosine_spread: float
) -> dict[str, Array]:
    """Per query: how high the best candidate scores, how far ahead it is, and its uncertainty. -> [Q] each

    ``score`` and ``cosine`` [Q, m] in order of falling score, ``sigma`` [Q, d] of the first ones.
    """
    if score.shape[1] < 2:
        raise UsageError("a confidence needs two candidates or more — search a larger index")
    value, near = score / spread, cosine / cosine_spread
    columns = {
        "score": value[:, 0],
        "margin": value[:, 0] - value[:, 1],
        "margin6": value[:, 0] - value[:, min(_SIXTH, value.shape[1] - 1)],
        **{name: _odds(value / heat) for name, heat in _TEMPERATURES.items()},
        "cosine": near[:, 0],
        "cosine_odds": _odds(near / _TEMPERATURES["odds"]),
    }
    return columns if sigma is None else {**columns, "sigma": sigma[:, 0], "sigma5": sigma[:, :5].mean(1)}


def _stack(columns: dict[str, Array], names: tuple[str, ...]) -> Array:
    """-> [Q, F]"""
    return np.stack([columns[name] for name in names], axis=1)


def _odds(value: Array) -> Array:
    """Log odds of the first against all others, as a softmax sees them. [Q, m] -> [Q]"""
    return np.asarray(np.clip(value[:, 0] - logsumexp(value[:, 1:], axis=1), -_MAX_ODDS, _MAX_ODDS))
