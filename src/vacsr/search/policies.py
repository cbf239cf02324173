"""Policies: which hits are shown, in which order, and whether there is an answer at all.

To add one, write a class and add a line to :data:`POLICIES`; the command line, the service and its page read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from vacsr.errors import UsageError

if TYPE_CHECKING:  # the command line reads the names, and should not wait for torch
    from vacsr.evaluate.uncertainty import Array

RETIRED = {
    "abstain": "confident replaces it, for hits of any rank",
    "lcb": "score − λσ gained 0.4 points of R@1 at most",
    "missed": "weighting σ gained 0.1 points at most",
}
"""Policies of earlier versions, and why they were removed. For one release they are named in the error."""


class Scored(NamedTuple):
    """One query's candidates, best score first."""

    ids: Sequence[str]  # [m]
    metadata: Sequence[dict[str, Any]]  # [m]
    cosine: Array  # [m]
    score: Array  # [m]
    grade: Array | None  # [m], calibrated where there is a calibration; None where the method only ranks
    sigma: Array | None  # [d], of the first ones
    disagreement: Array | None = None  # [d], of an ensemble's members about the first ones
    confident: int | None = None  # so many of the first have a grade above the cutoff; None without a calibration
    answer_set: int | None = None  # so many of the first hold the right one; None where no set can


class Ranked(NamedTuple):
    order: Sequence[int]  # positions of the candidates to show, best first
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

    def apply(self, scored: Scored) -> Ranked:
        """An order of the candidates to show, and whether that is an answer."""
        raise NotImplementedError


class ByScore(Policy):
    name, label, meaning = "score", "All hits", "Show the best k hits, and mark those that are confident."

    def apply(self, scored: Scored) -> Ranked:
        return Ranked(range(len(scored.ids)))


class Confident(Policy):
    """Only hits above the calibrated cutoff."""

    name, label = "confident", "Only confident"
    meaning = "Show only confident hits: those above the cutoff of the calibration."
    needs_calibration = True

    def apply(self, scored: Scored) -> Ranked:
        confident = scored.confident or 0
        if confident:
            return Ranked(range(confident))
        return Ranked((), False, "no confident match")


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (ByScore(), Confident())}
"""By name: what the command line, the service and its page offer. Add yours here."""
PolicyName = StrEnum("PolicyName", [(name.upper(), name) for name in POLICIES])  # type: ignore[misc]
"""The same as a type, for the service."""
SCORE = PolicyName("score")


def offered(*, calibrated: bool) -> list[str]:
    """Names of the policies that can be used."""
    return [name for name, policy in POLICIES.items() if calibrated or not policy.needs_calibration]


def choose_policy(name: str, *, calibrated: bool) -> Policy:
    if name not in POLICIES:
        problem = f"policy '{name}' was removed: {RETIRED[name]}" if name in RETIRED else f"unknown policy {name!r}"
        raise UsageError(f"{problem} — use one of {', '.join(POLICIES)}")
    if POLICIES[name].needs_calibration and not calibrated:
        message = f"policy '{name}' needs a calibration, and neither the index nor the model has one"
        raise UsageError(f"{message} — fit it: vacsr calibrate RUN --pairs SPEC --split dev --index INDEX")
    return POLICIES[name]
