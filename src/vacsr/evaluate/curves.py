"""How scores are distributed: labelled pairs against all others, as histograms that a page can draw.

Scores are looked at block by block. Counts are exact; a median comes from a histogram a thousand times finer than the
one shown, so it is off by at most 1/51,200 of the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.evaluate.scored import Scores

BINS = 50
_FINE = 1024  # fine bins in each bin that is shown
_CHUNK = 1 << 22  # values counted at a time: histc counts in float32, which is exact up to 2^24


class Spot(NamedTuple):
    """Where values may lie."""

    low: float
    high: float


def score_curves(scores: Scores, pairs: LabelledPairs) -> dict[str, Any]:
    """``{"grade": …, "score": …}``: counts of labelled and of other pairs in 50 bins, mean, median and spread.

    ``grade`` is on 0 to 1, and None where scores have no grade; ``score`` is on the range that occurs.
    """
    caption = torch.arange(len(pairs.caption_ids))
    labelled = scores.score_of(pairs.caption_image.cpu(), caption)
    span = _range(scores.blocks())
    result: dict[str, Any] = {"grade": None, "score": _curve(scores.blocks(), labelled, span)}
    grades = scores.grade(labelled)
    if grades is not None:
        result["grade"] = _curve((_graded(scores.grade, block) for block in scores.blocks()), grades, Spot(0.0, 1.0))
    return result


def _graded(grade: Callable[[Tensor], Tensor | None], block: Tensor) -> Tensor:
    found = grade(block)
    assert found is not None, "the labelled pairs had grades"
    return found


def _range(blocks: Iterable[Tensor]) -> Spot:
    ends = [torch.aminmax(block) for block in blocks if block.numel()]
    return Spot(min(float(end.min) for end in ends), max(float(end.max) for end in ends))


def _curve(blocks: Iterable[Tensor], labelled: Tensor, span: Spot) -> dict[str, Any]:
    every, positive = Tally(span), Tally(span)
    for block in blocks:
        every.add(block)
    positive.add(labelled)
    negative = every.less(positive)
    return {
        "edges": torch.linspace(span.low, span.high, BINS + 1, dtype=torch.float64).tolist(),
        "positive": positive.shown(),
        "negative": negative.shown(),
        "positive_stats": positive.stats(),
        "negative_stats": negative.stats(),
        "all_stats": every.stats(),
    }


class Tally:
    """Counts and moments of values in a known range; sums are taken about its middle, where they lose little."""

    def __init__(self, span: Spot) -> None:
        self.span, self.middle = span, (span.low + span.high) / 2
        self.counts = torch.zeros(BINS * _FINE, dtype=torch.int64)
        self.total = self.squares = 0.0

    def add(self, values: Tensor) -> None:
        """Count some more. [...]"""
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            self.counts += self._histogram(part)
            away = part.double() - self.middle
            self.total += float(away.sum())
            self.squares += float(away.square().sum())

    def _histogram(self, part: Tensor) -> Tensor:
        if self.span.low == self.span.high:  # histc would choose a range of its own
            counts = torch.zeros_like(self.counts)
            counts[0] = part.numel()
            return counts
        inside = part.float().clamp(self.span.low, self.span.high)  # rounding may have left the range by a hair
        return torch.histc(inside, BINS * _FINE, self.span.low, self.span.high).cpu().long()

    def less(self, other: Tally) -> Tally:
        """These without those of the other, which are among them."""
        rest = Tally(self.span)
        rest.counts = self.counts - other.counts
        rest.total, rest.squares = self.total - other.total, self.squares - other.squares
        return rest

    def shown(self) -> list[int]:
        """In 50 bins."""
        return [int(count) for count in self.counts.view(BINS, _FINE).sum(1)]

    def stats(self) -> dict[str, float]:
        """Mean, median and standard deviation (of all values, not of a sample); NaN of none."""
        number = int(self.counts.sum())
        if not number:
            return dict.fromkeys(("mean", "median", "std"), float("nan"))
        mean = self.total / number
        std = max(0.0, self.squares / number - mean * mean) ** 0.5
        return {"mean": self.middle + mean, "median": self._median(number), "std": std}

    def _median(self, number: int) -> float:
        """The middle of the fine bin that holds the middle value."""
        place = int(torch.searchsorted(self.counts.cumsum(0), (number + 1) // 2))
        width = (self.span.high - self.span.low) / len(self.counts)
        return self.span.low + (place + 0.5) * width
