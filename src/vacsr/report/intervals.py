"""One pair from each of eight intervals of the grade (paper Fig. 1): what a low, a middling, a high grade look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.report.gallery import Material
from vacsr.report.verdicts import Verdict

INTERVALS = 8
SAMPLE = 40_000
"""Pairs without a label among which is chosen, as many as in the paper; all labelled pairs are added."""
_FIXED = 6  # with more digits zeros at the end, or at the start, are left out


class Chosen(NamedTuple):
    """A pair."""

    row: int
    col: int
    verdict: Verdict
    grade: float
    uncertainty: float | None


class Interval(NamedTuple):
    """Grades from ``low`` up to ``high``; the last interval holds ``high`` too."""

    low: float
    high: float
    pairs: int
    """Pairs of the sample whose grade is here."""
    chosen: Chosen | None
    """None where there is no such pair."""


def pick_intervals(material: Material, row: str, *, generator: torch.Generator) -> list[Interval]:
    """Grade a sample of pairs by one row of the comparison and draw a pair from each interval of the grades it gives.

    There is one interval where all grades are equal.
    """
    scores = material.scores[row]
    rows, cols = sample_pairs(material.pairs, SAMPLE, generator=generator)
    grades = scores.scorer.score_at(scores, rows=rows, cols=cols).grade.cpu()
    edges = edges_of(grades)
    place = interval_of(grades, edges)
    found = []
    for number, (low, high) in enumerate(pairwise(edges.tolist())):
        here = (place == number).nonzero().flatten()
        if not len(here):
            found.append(Interval(low, high, 0, None))
            continue
        at = here[torch.randint(len(here), (1,), generator=generator)]
        said = scores.scorer.score_at(scores, rows=rows[at], cols=cols[at])
        i, j = int(rows[at]), int(cols[at])
        sigma = None if said.uncertainty is None else float(said.uncertainty[0])
        chosen = Chosen(i, j, material.verdicts.of(i, j), float(grades[at]), sigma)
        found.append(Interval(low, high, len(here), chosen))
    return found


def edges_of(grades: Tensor) -> Tensor:
    """Where eight equal intervals from the lowest grade to the highest begin and end; one where these are the same.

    Models differ in how much of [0, 1] they use, so that fixed intervals could leave most empty. [P] -> [9] or [2]

    >>> edges_of(torch.tensor([0.25, 0.0, 2.0])).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    """
    low, high = float(grades.min()), float(grades.max())
    return torch.linspace(low, high, 2 if low == high else INTERVALS + 1, dtype=torch.float64)


def interval_of(grades: Tensor, edges: Tensor) -> Tensor:
    """Which interval each grade is in; one on an edge is in the upper. [P], [E] -> [P] int64

    >>> interval_of(torch.tensor([0.0, 0.124, 0.125, 1.0]), torch.linspace(0, 1, 9)).tolist()
    [0, 0, 1, 7]
    """
    return torch.bucketize(grades.to(edges.dtype), edges[1:-1], right=True)


class Words(NamedTuple):
    """Writes grades with as many digits as tell the ends of intervals apart."""

    digits: int
    """After the point."""

    @classmethod
    def of(cls, found: Sequence[Interval]) -> Words:
        """Two digits of an interval's width, and never fewer than two after the point."""
        width = (found[-1].high - found[0].low) / len(found)
        return cls(max(2, 1 - math.floor(math.log10(width))) if width else 3)

    def grade(self, value: float) -> str:
        """A grade.

        >>> Words(3).grade(0.02), Words(3).grade(-1e-9), Words(12).grade(3.21e-9)
        ('0.020', '0.000', '3.21e-09')
        """
        near = round(value, self.digits) + 0.0  # not -0.0
        return f"{near:.{self.digits}f}" if self.digits <= _FIXED else f"{near:.15g}"

    def ends(self, interval: Interval) -> str:
        """From where to where, or the only grade there is."""
        low, high = self.grade(interval.low), self.grade(interval.high)
        return low if interval.low == interval.high else f"{low} to {high}"


def sample_pairs(pairs: LabelledPairs, number: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All labelled pairs and up to ``number`` others, each once. -> rows [P], columns [P]"""
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    labelled = pairs.caption_image.cpu() * captions + torch.arange(captions)
    drawn = torch.randint(images * captions, (number,), generator=generator)
    drawn = torch.unique(drawn)
    others = drawn[~torch.isin(drawn, labelled)]
    both = torch.cat((labelled, others))
    return both // captions, both % captions
