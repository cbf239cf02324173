"""What a search gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vacsr.scoring.topk import Direction


@dataclass(frozen=True)
class Hit:
    """One item of the index."""

    rank: int
    """From 1."""
    id: str
    cosine: float
    score: float
    """The method's."""
    grade: float
    """In 0–1: with a calibration the chance that it is a labelled match, else the method's own grade."""
    uncertainty: float | None
    """σ; None where the method has none."""
    probably_also: bool
    """Looks like a match beside the first, by the rule of :mod:`vacsr.search.missed`."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The hits of one query, and whether the first is vouched for."""

    direction: Direction
    policy: str
    hits: tuple[Hit, ...]
    answered: bool
    """False only where the policy abstains; the hits are then what was not vouched for."""
    reason: str
    """Why there is no answer; empty where there is one."""
    confidence: float | None
    """Chance that the first by score is right; None without a calibration."""
    promised: bool
    """Is the first hit vouched for? Only an answer of ``abstain`` is, from an exact index of the size of the fit."""
    note: str
    """What of the calibration does not hold for this index, and what to type; empty where all of it does."""
    calibrated: bool
    index_size: int

    @property
    def probably_also(self) -> list[str]:
        """Ids of the hits that are probably matches too."""
        return [hit.id for hit in self.hits if hit.probably_also]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "schema": 1,
            **asdict(self),
            "hits": [asdict(hit) for hit in self.hits],
            "probably_also": self.probably_also,
        }
