"""How likely each hit of a search is right, seen beside the other candidates.

A score alone says little: in a larger gallery more wrong items reach it. So a hit is compared with its rivals, the
other candidates of the same query, by the odds of a softmax. More items bring more and stronger rivals, which lowers
its grade, so one fit serves galleries of every size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit

from vacsr.config import Config
from vacsr.evaluate.uncertainty import Array, Values, as_vector, check_length

Mask = NDArray[np.bool_]
_HEATS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)  # temperatures that are tried, in spreads of the scores
_MOST = 20.0  # odds in nats: more says nothing more
_RIDGE = 1e-2


class HitModel(Config):
    """P(a hit is right) = sigmoid(odds_weight · odds + score_weight · score + bias).

    No weight is negative, so grades fall from one hit of a query to the next.
    """

    temperature: float = Field(gt=0)  # of the softmax
    siblings: int = Field(ge=0)  # other right items of a query, which are no rivals
    odds_weight: float = Field(ge=0)
    score_weight: float = Field(ge=0)
    bias: float

    def apply(self, score: Array) -> Array:
        """Scores of the candidates, best first, as probabilities. [Q, m] -> [Q, m]"""
        logit = self.odds_weight * rival_odds(score / self.temperature, siblings=self.siblings)
        return np.asarray(expit(logit + self.score_weight * score + self.bias))


def rival_odds(value: Array, *, siblings: int = 0) -> Array:
    """Log odds of each candidate in a softmax against its rivals: all others but the best ``siblings``. [Q, m]

    Of candidates that are given best first.

    >>> rival_odds(np.log([[6.0, 3.0, 1.0]])).round(3)
    array([[ 0.405, -0.847, -2.197]])
    >>> rival_odds(np.log([[6.0, 3.0, 1.0]]), siblings=1).round(3)
    array([[ 1.792,  1.099, -1.099]])
    """
    odds, first = np.zeros(value.shape), siblings + 1  # without rivals they say nothing
    if value.shape[1] > first:
        odds[:, :first] = value[:, :first] - _log_total(value[:, first:])
        rest = value[:, siblings:]  # the best siblings are those before; of the rest each rivals all others
        others = _log_total(rest) - rest[:, 1:]
        odds[:, first:] = -np.log(np.maximum(np.expm1(np.minimum(others, 2 * _MOST)), 1e-12))
    return np.asarray(np.clip(odds, -_MOST, _MOST))


def _log_total(value: Array) -> Array:
    """log Σ exp of rows that fall. [Q, m] -> [Q, 1]"""
    top = value[:, :1]
    return np.asarray(top + np.log(np.exp(value - top).sum(axis=1, keepdims=True)))


def fit_hits(lists: Sequence[tuple[Array, Mask]], *, siblings: int, depth: int) -> HitModel:
    """Fit by likelihood to the first ``depth`` hits of queries with known answers: scores and right ones [Q, m] each.

    Each list is of galleries of one size; sizes weigh alike.
    """
    few = [(score[n :: len(lists)], right[n :: len(lists), :depth]) for n, (score, right) in enumerate(lists)]
    spread = float(np.concatenate([score.ravel() for score, _ in few]).std()) or 1.0
    label = np.concatenate([right.ravel() for _, right in few]).astype(np.float64)
    height = np.concatenate([score[:, :depth].ravel() for score, _ in few]) / spread
    fits = []
    for heat in _HEATS:
        parts = [rival_odds(score / (heat * spread), siblings=siblings)[:, :depth].ravel() for score, _ in few]
        design = np.stack((np.concatenate(parts), height - height.mean(), np.ones_like(height)), axis=1)

        def loss(weight: Array, design: Array = design) -> tuple[float, Array]:
            logit = design @ weight
            value = np.logaddexp(0, logit).sum() - label @ logit + _RIDGE * weight @ weight / 2
            return float(value), np.asarray(design.T @ (expit(logit) - label) + _RIDGE * weight)

        bounds = [(0, None), (0, None), (None, None)]
        best = minimize(loss, np.array([1.0, 0.0, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds)
        fits.append((float(best.fun), heat, best.x.tolist()))
    _, heat, (odds_weight, score_weight, bias) = min(fits)
    return HitModel(
        temperature=heat * spread, siblings=siblings, odds_weight=odds_weight, score_weight=score_weight / spread,
        bias=bias - score_weight * float(height.mean()),
    )  # fmt: skip


class Isotonic(Config):
    """Corners of a rising line; linear between two of them, flat beyond the ends."""

    x: tuple[float, ...]  # [B], rising
    y: tuple[float, ...]  # [B], never falling

    def apply(self, values: Values) -> Array:
        """The line at each value. [N] -> [N]

        >>> Isotonic(x=(0.0, 1.0), y=(0.2, 0.6)).apply([-1.0, 0.5, 2.0])
        array([0.2, 0.4, 0.6])
        """
        return np.asarray(np.interp(as_vector("values", values), self.x, self.y))


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


def expected_calibration_error(chance: Values, match: Values, *, bins: int = 15) -> float:
    """Mean distance of the chance from the share of matches, over bins of equal count. [N], [N]

    >>> expected_calibration_error([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 0], bins=1)
    0.0
    """
    p, y = as_vector("chance", chance), as_vector("match", match)
    check_length(p, y)
    parts = [part for part in np.array_split(p.argsort(kind="stable"), bins) if len(part)]
    return float(sum(abs(p[part].sum() - y[part].sum()) for part in parts) / len(p))
