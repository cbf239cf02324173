"""When to answer: a confidence in the first answer, and the threshold from which on it is vouched for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.config import Config
from vacsr.errors import DataError
from vacsr.evaluate.uncertainty import Array, aurc
from vacsr.search.candidates import Candidates
from vacsr.search.certify import FEW, Outcomes, Trial, certify, countable_level, images_needed, trial_order
from vacsr.search.logistic import Logistic, fit_logistic
from vacsr.search.signals import signal_names, signals

_FOLDS = 5
MEASURES = {
    "score": ("score",),
    "margin": ("margin",),
    "odds": ("odds_soft",),
    "sigma": ("sigma",),
    "combined": (),
}
"""The signals of each confidence measure; ``combined`` has all."""


class AnswerRule(Config):
    """When the first answer is vouched for."""

    measure: str
    signals: tuple[str, ...]
    logistic: Logistic
    """The signals as a chance that the first answer is right."""
    spread: float
    """Of the scores of candidates."""
    cosine_spread: float
    threshold: float | None
    """Answer from this confidence on; None where no threshold could be certified, so nothing is answered."""
    risk: float
    """α: counted over as many images as certified it, the share of wrong answers among those given stays below it …"""
    confidence: float
    """… with this probability."""
    level: float
    """δ of the test behind it: the chance that the true risk at the threshold is not below α."""
    certified: int
    """Queries that certified, with their repeats in other galleries."""
    images: int
    """Of so many images."""
    answered: int
    """Of these queries, how many were answered at the threshold."""
    wrong: int
    """Of these, how many wrongly."""

    def confidence_of(self, score: Array, cosine: Array, sigma: Array | None) -> Array:
        """The chance that the first answer is right. [Q, m], [Q, m], [Q, d] -> [Q]"""
        return self.logistic.apply(_columns(self.signals, score, cosine, sigma, self.spread, self.cosine_spread))

    def of(self, found: Candidates) -> Array:
        """The same for lists with known answers. -> [Q]"""
        return self.confidence_of(found.score, found.cosine, found.sigma)


class _Choice(NamedTuple):
    measure: str
    names: tuple[str, ...]
    logistic: Logistic
    trials: list[Trial]


def fit_answer_rule(
    found: Candidates,
    choose: NDArray[np.bool_],
    *,
    risk: float,
    confidence: float,
    generator: np.random.Generator,
    measures: tuple[str, ...] = tuple(MEASURES),
) -> AnswerRule:
    """Choose on the queries [Q] where ``choose``, certify on the others; no image may have queries in both."""
    check_enough(found, choose, risk=risk, confidence=confidence)
    spread, near = float(found.score[choose].std()) or 1.0, float(found.cosine[choose].std()) or 1.0
    plan = _chosen(found.take(choose), spread, near, risk=risk, measures=measures, generator=generator)
    rest = found.take(~choose)
    value = plan.logistic.apply(_columns(plan.names, rest.score, rest.cosine, rest.sigma, spread, near))
    level = countable_level(confidence)
    tested = certify(_outcomes(rest, value), plan.trials, risk=risk, level=level, generator=generator)
    return AnswerRule(
        measure=plan.measure, signals=plan.names, logistic=plan.logistic, spread=spread, cosine_spread=near,
        risk=risk, confidence=confidence, level=level, certified=len(value), **tested._asdict(),
    )  # fmt: skip


def check_enough(found: Candidates, choose: NDArray[np.bool_], *, risk: float, confidence: float) -> None:
    """Refuse what has too few queries, in one part or the other [Q], to say anything."""
    if min(choose.sum(), (~choose).sum()) >= FEW:
        return
    message = f"{len(choose):,} queries of {len(np.unique(found.image)):,} images are too few to fit and to certify"
    needed = images_needed(risk=risk, level=countable_level(confidence))
    raise DataError(f"{message} a risk of {100 * risk:.4g}% — give about {needed:,} images or more")


def _chosen(
    found: Candidates,
    spread: float,
    near: float,
    *,
    risk: float,
    measures: tuple[str, ...],
    generator: np.random.Generator,
) -> _Choice:
    """The measure with the smallest AURC, on folds that its fit has not seen.

    Coverage at the wanted risk would be closer to the purpose, and rests on too few queries to choose by.
    """
    wrong, every = ~found.right[:, 0], signal_names(sigma=found.sigma is not None)
    fold = generator.integers(_FOLDS, size=int(found.image.max()) + 1)[found.image]
    values: dict[str, Array] = {}
    for measure in measures:
        if set(MEASURES[measure]) <= set(every):
            columns = _columns(MEASURES[measure] or every, found.score, found.cosine, found.sigma, spread, near)
            values[measure] = _cross_fitted(columns, wrong, fold)
    best = min(values, key=lambda measure: aurc(-values[measure], wrong))
    names, value = MEASURES[best] or every, values[best]
    columns = _columns(names, found.score, found.cosine, found.sigma, spread, near)
    logistic = fit_logistic(columns, (~wrong).astype(np.float64))
    return _Choice(best, names, logistic, trial_order(_outcomes(found, value), risk=risk))


def _outcomes(found: Candidates, value: Array) -> Outcomes:
    return Outcomes(value, ~found.right[:, 0], found.image, found.query)


def _cross_fitted(columns: Array, wrong: NDArray[np.bool_], fold: NDArray[np.int64]) -> Array:
    """Each query's confidence from a fit without the images of its fold. [Q, F], [Q], [Q] -> [Q]"""
    value = np.full(len(columns), float((~wrong).mean()))
    for held in np.unique(fold):
        rest = fold != held
        if rest.any():
            value[~rest] = fit_logistic(columns[rest], (~wrong[rest]).astype(np.float64)).apply(columns[~rest])
    return value


def _columns(
    names: tuple[str, ...], score: Array, cosine: Array, sigma: Array | None, spread: float, near: float
) -> Array:
    """The named signals. -> [Q, F]"""
    every = signal_names(sigma=sigma is not None)
    table = signals(score, cosine, sigma, spread=spread, cosine_spread=near)
    return table[:, [every.index(name) for name in names]]
