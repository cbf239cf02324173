"""One pair from each of eight intervals of the grade (paper Fig. 1): what a low, a middling, a high grade look like."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.report.gallery import Material
from vacsr.report.verdicts import Verdict

INTERVALS = 8
SAMPLE = 40_000
"""Pairs without a label among which is chosen, as many as in the paper; all labelled pairs are added."""


class Chosen(NamedTuple):
    """A pair."""

    row: int
    col: int
    verdict: Verdict
    grade: float
    uncertainty: float | None


class Interval(NamedTuple):
    """Grades from ``low`` up to ``high``; the last interval holds 1 too."""

    low: float
    high: float
    pairs: int
    """Pairs of the sample whose grade is here."""
    chosen: Chosen | None
    """None where there is no such pair."""


def pick_intervals(material: Material, row: str, *, generator: torch.Generator) -> list[Interval]:
    """Grade a sample of pairs by one row of the comparison and draw a pair from each interval."""
    scores = material.scores[row]
    rows, cols = sample_pairs(material.pairs, SAMPLE, generator=generator)
    grades = scores.scorer.score_at(scores, rows=rows, cols=cols).grade.cpu()
    place = interval_of(grades)
    found = []
    for number in range(INTERVALS):
        here = (place == number).nonzero().flatten()
        ends = number / INTERVALS, (number + 1) / INTERVALS
        if not len(here):
            found.append(Interval(*ends, 0, None))
            continue
        at = here[torch.randint(len(here), (1,), generator=generator)]
        said = scores.scorer.score_at(scores, rows=rows[at], cols=cols[at])
        i, j = int(rows[at]), int(cols[at])
        sigma = None if said.uncertainty is None else float(said.uncertainty[0])
        chosen = Chosen(i, j, material.verdicts.of(i, j), float(grades[at]), sigma)
        found.append(Interval(*ends, len(here), chosen))
    return found


def interval_of(grades: Tensor) -> Tensor:
    """Which of eight equal intervals of [0, 1] each grade is in. [P] -> [P] int64

    >>> interval_of(torch.tensor([0.0, 0.124, 0.125, 1.0])).tolist()
    [0, 0, 1, 7]
    """
    return (grades * INTERVALS).floor().clamp(0, INTERVALS - 1).long()


def sample_pairs(pairs: LabelledPairs, number: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All labelled pairs and up to ``number`` others, each once. -> rows [P], columns [P]"""
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    labelled = pairs.caption_image.cpu() * captions + torch.arange(captions)
    drawn = torch.randint(images * captions, (number,), generator=generator)
    drawn = torch.unique(drawn)
    others = drawn[~torch.isin(drawn, labelled)]
    both = torch.cat((labelled, others))
    return both // captions, both % captions
