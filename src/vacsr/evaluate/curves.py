"""How scores are distributed: labelled pairs against all others, as histograms that a page can draw.

Scores are looked at block by block, in two passes, or four where they are float64. Medians are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.moments import Moments, Spot, joined
from vacsr.evaluate.scored import Scores
from vacsr.evaluate.selection import Selection, middle_ranks

BINS = 50
_CHUNK = 1 << 19  # values looked at together: what is made of them on the way stays in the processor's cache


class _Part(NamedTuple):
    """Some rows of the matrix."""

    values: Tensor
    """[r, M] float32 or float64"""
    own: tuple[Tensor, Tensor]
    """Row here and column of each labelled pair. [p] each"""


class _Middle(NamedTuple):
    """The one or two values in the middle, none of none. [0, 1 or 2] each"""

    positive: Tensor
    negative: Tensor
    every: Tensor


class _Ends(NamedTuple):
    """What the first pass finds."""

    positive: Tensor
    """Scores of the labelled pairs. [M]"""
    negative: Spot
    """Where the others lie; upside down of none."""


def score_curves(scores: Scores, pairs: LabelledPairs) -> dict[str, Any]:
    """``{"grade": …, "score": …}``: counts of labelled and of other pairs in 50 bins, mean, median and spread.

    ``grade`` is on 0 to 1, and None where scores have no grade; ``score`` is on the range that occurs.
    """
    owner = pairs.caption_image.cpu()
    captions, number = len(owner), len(pairs.image_ids) * len(owner)
    medians = Selection(every=middle_ranks(number), rest=middle_ranks(number - captions))
    ends = _ends(_fed(medians, _parts(scores.blocks(), owner)))
    medians.settle(ends.positive)
    tally = Tally(_span(ends.positive).joined(ends.negative), rest=ends.negative)
    tally.count(_fed(medians, _parts(scores.blocks(), owner)))
    medians.settle(ends.positive)
    while not medians.found:
        for _ in _fed(medians, _parts(scores.blocks(), owner)):
            pass
        medians.settle(ends.positive)
    place = ends.positive.device
    middle = _Middle(_middle(ends.positive), medians.of_rest().to(place), medians.of_all().to(place))
    return {"grade": _grades(scores, owner, middle), "score": tally.curve(middle)}


def _grades(scores: Scores, owner: Tensor, middle: _Middle) -> dict[str, Any] | None:
    """The curve of grades. They keep the order of scores, so that the grade of a middle score is a middle grade."""
    if scores.grade(middle.positive) is None:
        return None
    tally = Tally(Spot(0.0, 1.0), rest=Spot(0.0, 1.0))
    tally.count(_parts((_graded(scores, block) for block in scores.blocks()), owner))
    return tally.curve(_Middle(*(_graded(scores, values) for values in middle)))


def _graded(scores: Scores, block: Tensor) -> Tensor:
    found = scores.grade(block)
    assert found is not None, "others had grades"
    return found


def _floats(values: Tensor) -> Tensor:
    """Half precision as float32. [...] -> [...]"""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _parts(blocks: Iterable[Tensor], owner: Tensor) -> Iterator[_Part]:
    """Consecutive rows, a few at a time. ``owner``: the row of each column's labelled pair [M]"""
    order = owner.argsort(stable=True)
    rows, first = owner[order], 0
    for block in blocks:
        for values in torch.split(_floats(block), max(1, _CHUNK // max(1, block.shape[1]))):
            start, stop = torch.searchsorted(rows, torch.tensor([first, first + len(values)])).tolist()
            row, column = rows[start:stop] - first, order[start:stop]
            yield _Part(values, (row.to(values.device), column.to(values.device)))
            first += len(values)


def _fed(medians: Selection, parts: Iterable[_Part]) -> Iterator[_Part]:
    """The same, counted for the medians on the way."""
    for part in parts:
        medians.add(part.values)
        yield part


def _ends(parts: Iterable[_Part]) -> _Ends:
    labelled: list[Tensor] = []
    negative = Spot(math.inf, -math.inf)
    for values, own in parts:
        if values.numel():
            _refuse_infinite(_span(values))
            labelled.append(values[own])
            others = values.clone()
            low = float(others.index_put_(own, others.new_tensor(math.inf)).amin())
            negative = negative.joined(Spot(low, float(others.index_put_(own, others.new_tensor(-math.inf)).amax())))
    return _Ends(torch.cat(labelled), negative)


def _refuse_infinite(span: Spot) -> None:
    if not (math.isfinite(span.low) and math.isfinite(span.high)):
        raise DataError(
            "scores hold NaN or infinity, expected numbers — look for such embeddings; to keep a pair "
            "from being found, give it a very low score"
        )


def _span(values: Tensor) -> Spot:
    found = torch.aminmax(values)
    return Spot(float(found.min), float(found.max))


def _middle(values: Tensor) -> Tensor:
    """[n] -> [0, 1 or 2]"""
    return values.sort().values[list(middle_ranks(len(values)))]


class Tally:
    """Counts in 50 bins and moments, of labelled pairs and of the others."""

    def __init__(self, span: Spot, *, rest: Spot) -> None:
        """``span``: where all lie; ``rest``: where the others than the labelled ones do."""
        self.scale, (self.low, self.high) = span.scale, span.scaled()
        self.labelled, self.others = torch.zeros(2, BINS, dtype=torch.int64)
        self.positive, self.negative = Moments(span), Moments(rest)

    def count(self, parts: Iterable[_Part]) -> None:
        """All pairs, once."""
        labelled: list[Tensor] = []
        for values, own in parts:
            wide = values.double()
            self.others += self._histogram(wide)
            self.negative.add(wide, left_out=own)
            labelled.append(wide[own])
        positive = torch.cat(labelled)
        self.labelled += self._histogram(positive)
        self.others -= self.labelled
        self.positive = Moments(_span(positive))  # about their own middle: a masked pair may lie far from all of them
        self.positive.add(positive)

    def _histogram(self, values: Tensor) -> Tensor:
        """float64 [...] -> [50]"""
        if self.low == self.high:  # histc would choose a range of its own
            counts = torch.zeros(BINS, dtype=torch.int64)
            counts[0] = values.numel()
            return counts
        inside = (values * self.scale).clamp_(self.low, self.high)  # a grade may leave the range by a hair
        return torch.histc(inside, BINS, self.low, self.high).cpu().long()

    def curve(self, middle: _Middle) -> dict[str, Any]:
        """Edges, counts, and what is said of each kind."""
        edges = torch.linspace(self.low, self.high, BINS + 1, dtype=torch.float64) / self.scale
        return {
            "edges": edges.tolist(),
            "positive": self.labelled.tolist(),
            "negative": self.others.tolist(),
            "positive_stats": _stats(self.positive, middle.positive),
            "negative_stats": _stats(self.negative, middle.negative),
            "all_stats": _stats(joined(self.positive, self.negative), middle.every),
        }


def _stats(moments: Moments, middle: Tensor) -> dict[str, float]:
    """Mean, median and standard deviation; NaN of none."""
    return {"mean": moments.mean, "median": _mean(middle.double().tolist()), "std": moments.std}


def _mean(values: list[float]) -> float:
    """Of at most two, whose sum may overflow."""
    if not values:
        return math.nan
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)
