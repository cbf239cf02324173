"""Policies: in which order candidates are shown, and whether there is an answer at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from vacsr.errors import UsageError
from vacsr.evaluate.uncertainty import Array
from vacsr.search.calibration import DirectionCalibration
from vacsr.search.lcb import LcbRule
from vacsr.search.missed import MissedRule
from vacsr.search.risk import AnswerRule

PolicyName = Literal["score", "lcb", "abstain", "missed"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
NO_ANSWER = "no answer I would vouch for"


class Scored(NamedTuple):
    """One query's candidates, best score first."""

    ids: Sequence[str]  # [m]
    metadata: Sequence[dict[str, Any]]  # [m]
    cosine: Array  # [m]
    score: Array  # [m]
    grade: Array  # [m], calibrated where there is a calibration
    sigma: Array | None  # [d], of the first ones
    confidence: float | None  # that the first is right; None without a calibration


class Ranked(NamedTuple):
    """What a policy makes of it."""

    order: NDArray[np.int64]  # [m] positions, best first
    answered: bool = True
    reason: str = ""


class Policy(Protocol):
    """Anything that orders candidates; pass your own to :class:`vacsr.search.engine.Searcher`."""

    name: str

    def apply(self, scored: Scored) -> Ranked:
        """An order of all candidates, and whether the first is an answer."""


class ByScore:
    """The method's own order."""

    name = "score"

    def apply(self, scored: Scored) -> Ranked:
        """As they are."""
        return Ranked(np.arange(len(scored.ids)))


class LowerBound:
    """By score − λσ among the first ones, the rest by score."""

    name = "lcb"

    def __init__(self, rule: LcbRule) -> None:
        self.rule = rule

    def apply(self, scored: Scored) -> Ranked:
        """The first ``depth`` in a new order."""
        if scored.sigma is None:
            return ByScore().apply(scored)
        depth = min(self.rule.depth, len(scored.sigma))
        return Ranked(_reordered(scored.score[:depth] - self.rule.weight * scored.sigma[:depth], len(scored.ids)))


class Abstain:
    """By score, and an answer only where the confidence reaches the certified threshold."""

    name = "abstain"

    def __init__(self, rule: AnswerRule) -> None:
        self.rule = rule

    def apply(self, scored: Scored) -> Ranked:
        """An answer, or the reason why there is none."""
        order = np.arange(len(scored.ids))
        if self.rule.threshold is None:
            wanted = f"a risk of {100 * self.rule.risk:.4g}%"
            return Ranked(order, False, f"{NO_ANSWER}: on the dev split no threshold kept {wanted}")
        if scored.confidence is None:
            return Ranked(order, False, f"{NO_ANSWER}: there is nothing to compare it with")
        if not scored.confidence >= self.rule.threshold:  # NaN is no confidence either
            chance, wanted = _told_apart(scored.confidence, self.rule.threshold)
            return Ranked(order, False, f"{NO_ANSWER}: chance of being right {chance}, {wanted} is asked for")
        return Ranked(order)


class Missed:
    """Likely unlabelled matches first: a high score, and among equals a high uncertainty."""

    name = "missed"

    def __init__(self, rule: MissedRule, *, depth: int) -> None:
        self.rule, self.depth = rule, depth

    def apply(self, scored: Scored) -> Ranked:
        """The first ``depth`` by how much they look like matches that were missed."""
        depth = min(self.depth, len(scored.ids) if scored.sigma is None else len(scored.sigma))
        sigma = None if scored.sigma is None else scored.sigma[:depth]
        return Ranked(_reordered(self.rule.of(scored.score[:depth], sigma), len(scored.ids)))


def choose_policy(name: str, calibration: DirectionCalibration | None) -> Policy:
    """A policy by its name; all but ``score`` need what was fitted."""
    if name not in POLICIES:
        raise UsageError(f"no policy {name!r} — use one of {', '.join(POLICIES)}")
    if name == "score":
        return ByScore()
    if calibration is None:
        message = f"policy '{name}' needs what a dev split says, and the model has no search.json"
        raise UsageError(f"{message} — fit it: vacsr calibrate RUN --pairs SPEC --split dev")
    if name == "lcb":
        return LowerBound(calibration.lcb)
    return Abstain(calibration.answer) if name == "abstain" else Missed(calibration.missed, depth=calibration.depth)


def _told_apart(low: float, high: float) -> tuple[str, str]:
    """Two chances in as few digits as tell them from each other, and from never and always.

    >>> _told_apart(0.5, 0.6), _told_apart(0.9481, 0.952), _told_apart(0.994, 0.9961)
    (('50%', '60%'), ('94.8%', '95.2%'), ('99.4%', '99.6%'))
    """
    for digits in range(16):
        first, second = f"{low:.{digits}%}", f"{high:.{digits}%}"
        ends = {f"{end:.{digits}%}" for end in (0, 1) if end not in (low, high)}
        if first != second and not {first, second} & ends:
            break
    return first, second


def _reordered(value: Array, count: int) -> NDArray[np.int64]:
    """Positions by falling value, the earlier first among equals; those without a value stay behind. [d] -> [count]"""
    return np.concatenate(((-value).argsort(kind="stable"), np.arange(len(value), count)))
