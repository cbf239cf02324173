"""Scores as the chance that a pair is a labelled match, and how far such chances are off."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.config import Config
from vacsr.evaluate.uncertainty import Array, Values, as_vector, check_length
from vacsr.search.isotonic import Isotonic, fit_isotonic
from vacsr.search.logistic import Logistic, fit_logistic

_TINY = 1e-6


class GradeCalibration(Config):
    """What turns a score into a chance. Both ways are kept; ``kind`` is the one that did better on held-out pairs."""

    kind: Literal["temperature", "isotonic"]
    temperature: Logistic
    """sigmoid(score / T + b). The offset is there because few of the pairs that are looked at match."""
    isotonic: Isotonic

    def apply(self, score: Values) -> Array:
        """[N] -> [N], in (0, 1), order kept."""
        values = as_vector("score", score)
        found = self.temperature.apply(values[:, None]) if self.kind == "temperature" else self.isotonic.apply(values)
        return np.clip(found, _TINY, 1 - _TINY)


class CalibrationErrors(NamedTuple):
    """Expected calibration error on pairs that no fit has seen."""

    own: float
    """Of the method's own grade."""
    temperature: float
    isotonic: float


class FittedGrades(NamedTuple):
    """A calibration and what it was chosen by."""

    calibration: GradeCalibration
    ece: CalibrationErrors


def fit_grades(score: Array, match: Array, *, grade: Array, fit: NDArray[np.bool_]) -> FittedGrades:
    """Fit both ways on the pairs where ``fit``, compare on the others, then fit both on all. [N] each

    The better one has the smaller log loss there; ``grade`` is the method's own.
    """
    rest = ~fit
    ways = {kind: _fitted(score[fit], match[fit], kind=kind) for kind in ("temperature", "isotonic")}
    chance = {kind: way.apply(score[rest]) for kind, way in ways.items()}
    better = min(ways, key=lambda kind: log_loss(chance[kind], match[rest]))
    errors = {kind: expected_calibration_error(found, match[rest]) for kind, found in chance.items()}
    kind: Literal["temperature", "isotonic"] = "temperature" if better == "temperature" else "isotonic"
    own = expected_calibration_error(grade[rest], match[rest])
    return FittedGrades(_fitted(score, match, kind=kind), CalibrationErrors(own, **errors))


def _fitted(score: Array, match: Array, *, kind: str) -> GradeCalibration:
    temperature = fit_logistic(score[:, None], match, ridge=1e-3)
    way: Literal["temperature", "isotonic"] = "temperature" if kind == "temperature" else "isotonic"
    return GradeCalibration(kind=way, temperature=temperature, isotonic=fit_isotonic(score, match))


def expected_calibration_error(chance: Values, match: Values, *, bins: int = 15) -> float:
    """Mean distance of the chance from the share of matches, over bins of equal count. [N], [N]

    >>> expected_calibration_error([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 0], bins=1)
    0.0
    """
    p, y = as_vector("chance", chance), as_vector("match", match)
    check_length(p, y)
    order = p.argsort(kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return float(sum(abs(p[part].sum() - y[part].sum()) for part in parts) / len(p))


def log_loss(chance: Array, match: Array) -> float:
    """Mean −log of the chance given to what happened. [N], [N]"""
    given = np.where(match > 0, chance, 1 - chance)
    return float(-np.log(np.clip(given, _TINY, 1)).mean())
