"""Policies: in which order candidates are shown, and whether there is an answer at all.

To add one, write a class and add a line to :data:`POLICIES`; the command line, the service and its page read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vacsr.errors import UsageError

if TYPE_CHECKING:  # the command line reads the names, and should not wait for torch
    from vacsr.evaluate.uncertainty import Array
    from vacsr.search.calibrate import DirectionCalibration
    from vacsr.search.probabilities import AnswerRule

NO_ANSWER = "no answer"
RETIRED = {"lcb": "score − λσ gained 0.4 points of R@1 at most", "missed": "weighting σ gained 0.1 points at most"}
"""Policies of earlier versions, and why they were removed. For one release they are named in the error."""


class Scored(NamedTuple):
    """One query's candidates, best score first."""

    ids: Sequence[str]  # [m]
    metadata: Sequence[dict[str, Any]]  # [m]
    cosine: Array  # [m]
    score: Array  # [m]
    grade: Array | None  # [m], calibrated where there is a calibration; None where the method only ranks
    sigma: Array | None  # [d], of the first ones
    confidence: float | None  # that the first is right; None without a calibration
    disagreement: Array | None = None  # [d], of an ensemble's members about the first ones


class Ranked(NamedTuple):
    """A policy's result."""

    order: Sequence[int]  # [m] positions, best first
    answered: bool = True
    reason: str = ""
    """Why there is no answer."""


class Policy:
    """Orders candidates; the base of all policies. Pass your own to :meth:`vacsr.search.Searcher.search_texts`."""

    name: str
    label: str
    """For the page, in two or three words."""
    meaning: str
    """In a sentence or two."""
    needs_calibration = False
    rule: AnswerRule | None = None
    """What guarantees its answers; None if nothing does."""

    @classmethod
    def fitted(cls, calibration: DirectionCalibration | None) -> Self:
        """With what was calibrated; never None where it ``needs_calibration``."""
        return cls()

    def apply(self, scored: Scored) -> Ranked:
        """An order of all candidates, and whether the first is an answer."""
        raise NotImplementedError


class ByScore(Policy):
    name, label, meaning = "score", "By score", "Rank by score, and always answer."

    def apply(self, scored: Scored) -> Ranked:
        return Ranked(range(len(scored.ids)))


class Abstain(Policy):
    """By score, with an answer only where the confidence reaches the certified threshold."""

    name, label, meaning = "abstain", "Only if sure", "Give no answer if the first hit is too likely to be wrong."
    needs_calibration = True

    def __init__(self, rule: AnswerRule) -> None:
        self.rule: AnswerRule = rule

    @classmethod
    def fitted(cls, calibration: DirectionCalibration | None) -> Self:
        assert calibration is not None
        return cls(calibration.answer)

    def apply(self, scored: Scored) -> Ranked:
        order = range(len(scored.ids))
        if self.rule.threshold is None:
            bound = f"a risk of {100 * self.rule.risk:.4g}%"
            return Ranked(order, False, f"{NO_ANSWER}: no threshold met {bound} on the dev split")
        if scored.confidence is None:
            return Ranked(order, False, f"{NO_ANSWER}: there is no second candidate to compare with")
        if not scored.confidence >= self.rule.threshold:  # also for NaN
            chance, needed = (f"{100 * value:.4g}%" for value in (scored.confidence, self.rule.threshold))
            return Ranked(order, False, f"{NO_ANSWER}: confidence {chance}, the risk bound needs {needed}")
        return Ranked(order)


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (ByScore, Abstain)}
"""By name: what the command line, the service and its page offer. Add your class here."""
PolicyName = StrEnum("PolicyName", [(name.upper(), name) for name in POLICIES])  # type: ignore[misc]
"""The same as a type, for the service."""
SCORE = PolicyName("score")


def offered(calibration: DirectionCalibration | None) -> list[str]:
    """Names of the policies that can be used with this calibration."""
    return [name for name, policy in POLICIES.items() if calibration is not None or not policy.needs_calibration]


def choose_policy(name: str, calibration: DirectionCalibration | None) -> Policy:
    if name in RETIRED:
        raise UsageError(f"policy '{name}' was removed: {RETIRED[name]} — use one of {', '.join(POLICIES)}")
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r} — use one of {', '.join(POLICIES)}")
    if calibration is None and POLICIES[name].needs_calibration:
        message = f"policy '{name}' needs a calibration, and the model has no search.json"
        raise UsageError(f"{message} — fit it: vacsr calibrate RUN --pairs SPEC --split dev")
    return POLICIES[name].fitted(calibration)
