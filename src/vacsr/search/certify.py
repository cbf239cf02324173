"""Cutoffs that hold: a share of wrong hits below a bound, and a set of hits that holds the right one.

Queries about one image fail together, so an image is one observation. The bound of a share is Clopper and Pearson's,
for as many hits as the images are worth (Korn and Graubard 1998). The set is split conformal prediction with every
image at the same weight (Dunn, Wasserman and Ramdas 2022).
"""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from vacsr.evaluate.uncertainty import Array
from vacsr.search.probabilities import Mask

FEW = 30  # hits behind a share that is to mean something
_STEP = 0.9  # the next try at a cutoff shows so many of the hits
_NORMAL = NormalDist()


class Graded(NamedTuple):
    grade: Array  # [Q, k] of their first hits, never rising
    right: Mask  # [Q, k]
    image: NDArray[np.int64]  # [Q] whose queries they are


class Shown(NamedTuple):
    """What a cutoff shows of some queries."""

    queries: int
    answered: int  # queries with a hit above the cutoff
    hits: int  # above the cutoff
    wrong: int  # of these hits
    images: int
    interval: tuple[float, float] = (0.0, 1.0)  # of the share of wrong hits, 95%

    @property
    def precision(self) -> float:
        """Share of the hits that is right; NaN without hits."""
        return 1 - self.wrong / self.hits if self.hits else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the queries with a hit above the cutoff."""
        return self.answered / max(self.queries, 1)


def share_bound(wrong: Array, hits: Array, *, level: float) -> float:
    """An upper bound of Σ wrong / Σ hits over the population, missed with a chance of ``level``. [I], [I] per image

    With one hit per image it is Clopper and Pearson's bound.

    >>> round(share_bound(np.zeros(45), np.ones(45), level=0.1), 3)
    0.05
    """
    wrong, hits = wrong[hits > 0], hits[hits > 0]
    total = float(hits.sum())
    if not total:
        return 1.0
    share, images = float(wrong.sum()) / total, len(hits)
    spread = float(((wrong - share * hits) ** 2).sum()) / total**2 * images / max(images - 1, 1)
    worth = min(total, share * (1 - share) / spread) if spread else images
    failures = share * worth
    return float(betaincinv(failures + 1, worth - failures, 1 - level)) if failures < worth else 1.0


def find_cutoff(graded: Graded, *, precision: float, confidence: float) -> float | None:
    """The lowest grade from which on at least ``precision`` of the hits are right; None if none can be shown to do so.

    Candidates are few and fixed by the number of hits that they show, each 90% of the one before.

    >>> grades, right = np.linspace(1, 0, 400)[:, None], np.arange(400)[:, None] < 200
    >>> 0.4 < find_cutoff(Graded(grades, right, np.arange(400)), precision=0.9, confidence=0.9) < 0.5
    True
    """
    values = np.sort(graded.grade.ravel())[::-1]
    count = float(len(values))
    while count >= FEW:
        cutoff = float(values[int(count) - 1])
        wrong, hits = _per_image(graded, cutoff)
        if share_bound(wrong, hits, level=countable_level(confidence)) <= 1 - precision:
            return cutoff
        count *= _STEP
    return None


def cutoffs_up_to(needed: Sequence[float | None]) -> list[float | None]:
    """Of galleries of rising sizes, each with the cutoff that it needs: the strictest of all up to each size.

    Where none could be found, up to the next size that has one.

    >>> cutoffs_up_to([0.5, None, 0.7, 0.6, None]), cutoffs_up_to([None])
    ([0.5, 0.7, 0.7, 0.7, 0.7], [None])
    """
    known = [number for number, cutoff in enumerate(needed) if cutoff is not None]
    ends = [next((one for one in known if one >= number), number) for number in range(len(needed))]
    return [max((cutoff for cutoff in needed[: end + 1] if cutoff is not None), default=None) for end in ends]


def find_set_cutoff(best: Array, image: NDArray[np.int64], *, coverage: float) -> float | None:
    """The grade from which on hits belong to the answer set. ``best`` [Q]: the highest grade of a right hit, or −inf.

    None where more than 1 − ``coverage`` of the queries have no right item among their candidates.

    >>> find_set_cutoff(np.array([0.1, 0.2, 0.3, 0.4]), np.arange(4), coverage=0.6)
    0.2
    """
    _, row, count = np.unique(image, return_inverse=True, return_counts=True)
    order = best.argsort(kind="stable")
    missed = (1 / count[row])[order].cumsum() / (len(count) + 1)
    allowed = np.flatnonzero(missed <= 1 - coverage + 1e-9)
    cutoff = float(best[order][allowed[-1]]) if len(allowed) else -np.inf
    return cutoff if np.isfinite(cutoff) else None


def countable_level(confidence: float) -> float:
    """δ for the true share, such that a share *counted* elsewhere stays below the bound with this confidence.

    A count over as many images as were used has as much noise again, so the margin grows by √2.

    >>> round(countable_level(0.9), 3)
    0.035
    """
    return _NORMAL.cdf(-sqrt(2) * _NORMAL.inv_cdf(confidence))


def count_shown(graded: Graded, cutoff: float | None) -> Shown:
    """What is shown from this grade on; nothing where it is None."""
    images = len(np.unique(graded.image))
    if cutoff is None:
        return Shown(len(graded.grade), 0, 0, 0, images)
    above = graded.grade >= cutoff
    wrong, hits = _per_image(graded, cutoff)
    interval = (1 - share_bound(hits - wrong, hits, level=0.025), share_bound(wrong, hits, level=0.025))
    counts = int(above.any(axis=1).sum()), int(above.sum()), int((above & ~graded.right).sum())
    return Shown(len(above), *counts, images, interval)


def _per_image(graded: Graded, cutoff: float) -> tuple[Array, Array]:
    """Wrong hits and hits of each image from this grade on. -> [I], [I]"""
    _, image = np.unique(graded.image, return_inverse=True)
    above = graded.grade >= cutoff
    wrong = np.bincount(image, (above & ~graded.right).sum(axis=1))
    return wrong.astype(np.float64), np.bincount(image, above.sum(axis=1)).astype(np.float64)
