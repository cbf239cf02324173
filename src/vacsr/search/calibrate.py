"""Fit grades, a cutoff and an answer set to labelled pairs, for galleries of every size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vacsr.config import Config
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.uncertainty import Array
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import DIRECTIONS, Direction
from vacsr.search.certify import Graded, count_shown, cutoffs_up_to, find_cutoff, find_set_cutoff
from vacsr.search.galleries import Labelled, Lists, searched_lists, simulated_lists
from vacsr.search.index import VectorIndex, direction_of, embedding_provenance, model_digest
from vacsr.search.probabilities import HitModel, fit_hits

CANDIDATES = 200  # nearest by cosine that the method scores again
DEPTH = 20  # best by score to which grades are fitted
FEWEST = 40  # labelled images that a fit takes
_CHECKED = 1.02  # an index counts as no larger than what was checked up to this


class SizeCheck(Config):
    """What a calibration does in galleries of one size."""

    size: int  # items that are searched
    answered: float  # share of queries with a confident hit
    hits: int  # that are confident
    cutoff: float | None  # a hit is confident from this grade on; None where none could be shown to hold
    precision: float | None  # share of them that is right; None without any
    low: float  # of the precision, 95% interval over images
    high: float
    silent: float  # share of queries without a match in the gallery that have no confident hit
    set_cutoff: float | None  # hits belong to the answer set from this grade on; None where no set can hold
    held: float | None  # share of the answer sets that hold a right item
    set_size: float | None  # mean
    r1: float


class DirectionCalibration(Config):
    """Of text → image (``t2i``) or image → text (``i2t``)."""

    queries: int
    images: int
    candidates: int = Field(ge=2)
    model: HitModel
    certified: int  # the largest gallery in which a cutoff was shown to hold; 0 without one
    sizes: tuple[SizeCheck, ...] = Field(min_length=1)  # on the pairs of the fit, rising

    def covers(self, size: int) -> bool:
        """Were galleries as large as an index of this size searched?"""
        return size <= _CHECKED * self.sizes[-1].size

    def certifies(self, size: int) -> bool:
        """Was a cutoff shown to hold in galleries as large as an index of this size?"""
        return size <= _CHECKED * self.certified

    def at(self, size: int) -> SizeCheck | None:
        """What was fitted to the smallest galleries that are as large as an index of this size."""
        return next((one for one in self.sizes if size <= _CHECKED * one.size), None)

    def cutoff(self, size: int) -> float | None:
        """Hits of an index of this size are confident from this grade on; None where none are."""
        return (self.at(size) or self.sizes[-1]).cutoff

    def confident(self, grade: Array, size: int) -> NDArray[np.int64]:
        """How many of the first hits of an index of this size are confident. [Q, m] -> [Q]"""
        cutoff = self.cutoff(size)
        return np.asarray((grade >= (np.inf if cutoff is None else cutoff)).sum(1))

    def answer_set(self, grade: Array, size: int) -> NDArray[np.int64] | None:
        """How many of the first hits of an index of this size hold a right one; None where that is unknown. -> [Q]

        0 where no hit is likely enough, as for a query without a match.
        """
        row = self.at(size)
        if row is None or row.set_cutoff is None:
            return None
        return np.asarray((grade >= row.set_cutoff).sum(1))


class Calibration(Config):
    """What is fitted, and to which data."""

    schema_version: int = 5
    model: str  # the model's digest
    data: str  # a digest of the ids and labels of the pairs
    pairs: str
    split: str
    index: str = ""  # that was the gallery; "" for the labelled images themselves
    own_captions: bool = False  # were the labels the captions of the indexed photos themselves?
    selected_on: str = ""  # the split of these data by which training chose the epoch
    precision: float  # of the confident hits, at least
    confidence: float  # with which that holds
    coverage: float  # share of the answer sets that hold the right one
    seed: int
    t2i: DirectionCalibration | None = None
    i2t: DirectionCalibration | None = None

    def of(self, direction: Direction) -> DirectionCalibration | None:
        return self.t2i if direction == "t2i" else self.i2t


@dataclass(frozen=True)
class CalibrateSettings:
    """What is asked of confident hits and of answer sets."""

    precision: float = 0.9
    confidence: float = 0.9
    coverage: float = 0.9
    candidates: int = CANDIDATES
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("precision", 0.0), ("confidence", 0.5), ("coverage", 0.0)):
            if not low < getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: expected {low:g} to 1 — e.g. --{name} 0.9")
        if self.candidates < 2:
            raise UsageError(f"{self.candidates} candidates — give 2 or more: --candidates {CANDIDATES}")


def calibrate(
    scorer: PairScorer,
    pairs: PairSet | PhotoSet | Labelled,
    settings: CalibrateSettings | None = None,
    *,
    index: VectorIndex | None = None,
    spec: str = "",
    selected_on: str = "",
) -> Calibration:
    """Fit to labelled pairs, which the model must not have been trained on.

    ``index``: search this one too, as if it held the labelled items. It fits the direction that the index answers.
    ``selected_on``: the split of these data by which training chose the epoch, if any; it is only noted.
    """
    settings = settings or CalibrateSettings()
    embedding_provenance(scorer.model)  # refuses models that an index cannot hold
    if len(pairs.image_ids) < FEWEST:
        message = f"{len(pairs.image_ids):,} labelled images are too few to calibrate with"
        raise DataError(f"{message} — give {FEWEST} or more; some hundreds let cutoffs hold in larger galleries")
    labelled = pairs if isinstance(pairs, Labelled) else Labelled.of(scorer, pairs)
    directions: tuple[Direction, ...] = DIRECTIONS
    if index is not None:
        directions = (direction_of(index.provenance),)
    fitted, own = {}, False
    for one in directions:
        limits: dict[str, Any] = {"candidates": settings.candidates, "seed": settings.seed, "direction": one}
        lists = [*simulated_lists(scorer, labelled, **limits)]
        if index is not None:
            searched, own = searched_lists(scorer, labelled, index, **limits)
            lists = [*(part for part in lists if part.size < searched.size), searched]
        fitted[one] = fit_direction(lists, settings)
    return Calibration(
        model=model_digest(scorer.model), data=labelled.digest(), pairs=spec, split=labelled.split, seed=settings.seed,
        index="" if index is None else f"{index.kind}:{index.where}", own_captions=own, selected_on=selected_on,
        precision=settings.precision, confidence=settings.confidence, coverage=settings.coverage, **fitted,
    )  # fmt: skip


def fit_direction(lists: Sequence[Lists], settings: CalibrateSettings) -> DirectionCalibration:
    """Grades, and for galleries of each of these sizes a cutoff and the level of answer sets, and what they do there.

    A cutoff also suits all smaller galleries: it is the strictest that any up to its size needs.
    """
    largest = lists[-1]
    siblings = max(int(np.median(largest.right.sum(1))) - 1, 0)
    model = fit_hits([(part.score, part.right) for part in lists], siblings=siblings, depth=DEPTH)
    goal = {"precision": settings.precision, "confidence": settings.confidence}
    every, sizes = [part.graded(model) for part in lists], list[SizeCheck]()
    needed = [find_cutoff(_first(graded), **goal) for graded in every]
    for part, graded, cutoff in zip(lists, every, cutoffs_up_to(needed), strict=True):
        best = np.where(graded.right, graded.grade, -np.inf).max(1)
        set_cutoff = find_set_cutoff(best, part.image, coverage=settings.coverage)
        sizes.append(_count(part, graded, model, cutoff=cutoff, set_cutoff=set_cutoff))
    return DirectionCalibration(
        queries=len(largest.score), images=len(np.unique(largest.image)), candidates=settings.candidates, model=model,
        certified=max((part.size for part, cutoff in zip(lists, needed, strict=True) if cutoff is not None), default=0),
        sizes=tuple(sizes),
    )  # fmt: skip


def _first(graded: Graded) -> Graded:
    """What may be confident at all."""
    return Graded(graded.grade[:, :DEPTH], graded.right[:, :DEPTH], graded.image)


def check_size(lists: Lists, fitted: DirectionCalibration) -> SizeCheck:
    """Count, in galleries like these, of queries that nothing was fitted to."""
    row, cutoff = fitted.at(lists.size), fitted.cutoff(lists.size)
    set_cutoff = None if row is None else row.set_cutoff
    return _count(lists, lists.graded(fitted.model), fitted.model, cutoff=cutoff, set_cutoff=set_cutoff)


def _count(
    lists: Lists, graded: Graded, model: HitModel, *, cutoff: float | None, set_cutoff: float | None
) -> SizeCheck:
    shown = count_shown(_first(graded), cutoff)
    absent = count_shown(_first(lists.without_matches().graded(model)), cutoff)
    inside = graded.grade >= (np.inf if set_cutoff is None else set_cutoff)
    return SizeCheck(
        size=lists.size, answered=shown.coverage, hits=shown.hits, cutoff=cutoff, low=1 - shown.interval[1],
        high=1 - shown.interval[0], precision=shown.precision if shown.hits else None, silent=1 - absent.coverage,
        set_cutoff=set_cutoff, held=None if set_cutoff is None else float((inside & graded.right).any(1).mean()),
        set_size=None if set_cutoff is None else float(inside.sum(1).mean()), r1=float(lists.right[:, 0].mean()),
    )  # fmt: skip


def check_calibration(
    scorer: PairScorer, pairs: PairSet | PhotoSet, calibration: Calibration
) -> dict[Direction, list[SizeCheck]]:
    """What the fit is worth on other pairs, in galleries of up to as many items as these have."""
    result: dict[Direction, list[SizeCheck]] = {}
    labelled = Labelled.of(scorer, pairs)
    for one in DIRECTIONS:
        fitted = calibration.of(one)
        if fitted is not None:
            drawn = {"candidates": fitted.candidates, "seed": calibration.seed}
            lists = simulated_lists(scorer, labelled, direction=one, **drawn)
            result[one] = [check_size(part, fitted) for part in lists]
    return result
