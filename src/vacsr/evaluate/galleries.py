"""A gallery: some images and captions that are ranked against each other, and who is relevant to whom.

A protocol is one gallery or several. A gallery keeps the order of the data, so that equal scores rank as they do there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.evaluate.ranks import BothRanks, Positives, Ties, stream_positive_ranks
from vacsr.evaluate.scored import Scores
from vacsr.scoring.topk import TopK, columns_topk, rows_topk

Direction = Literal["i2t", "t2i"]
DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")
_MATRIX = 1 << 28  # scores that may be kept at once; more are streamed
_STRIP = 128  # rows counted at a time


def fits_in_memory(pairs: LabelledPairs) -> bool:
    """May the whole score matrix be kept?"""
    return len(pairs.image_ids) * len(pairs.caption_ids) <= _MATRIX


@dataclass(frozen=True, eq=False)
class Gallery:
    """N' images and M' captions of the data. Positives count within the gallery; the two directions may differ."""

    i2t: Positives
    t2i: Positives
    images: Tensor | None = None
    """[N'] rows in the data, ascending; None for all of them."""
    captions: Tensor | None = None
    """[M'] rows in the data, ascending; None for all of them."""

    @classmethod
    def of_labels(cls, pairs: LabelledPairs) -> Gallery:
        """Everything, each caption relevant to the image it was written for."""
        i2t = Positives.from_captions(pairs.caption_image.cpu(), len(pairs.image_ids))
        return cls(i2t, i2t.transposed())

    @property
    def whole(self) -> bool:
        """Is nothing left out?"""
        return self.images is None and self.captions is None

    def positives(self, direction: Direction) -> Positives:
        """Of one direction."""
        return self.i2t if direction == "i2t" else self.t2i

    def rows_of(self, direction: Direction) -> Tensor:
        """The queries' rows in the data. -> [N'] or [M']"""
        rows = self.images if direction == "i2t" else self.captions
        return torch.arange(self.positives(direction).num_queries) if rows is None else rows

    def cut(self, block: Tensor, *, first: int = 0) -> Tensor:
        """What the gallery holds of the score rows from ``first`` on. [b, M] -> [b', M']"""
        if self.images is None:
            return block if self.captions is None else block[:, self.captions.to(block.device)]
        low, high = torch.searchsorted(self.images, torch.tensor([first, first + len(block)])).tolist()
        rows = (self.images[low:high] - first).to(block.device)
        return block[rows] if self.captions is None else block[rows[:, None], self.captions.to(block.device)]

    def blocks(self, scores: Scores) -> Iterator[Tensor]:
        """Consecutive row blocks [b', M'] of the gallery's score matrix."""
        first = 0
        for block in scores.blocks():
            found = self.cut(block, first=first)
            first += len(block)
            if len(found):
                yield found

    def ranks(self, scores: Scores, *, ties: Ties = "stable") -> BothRanks:
        """Ranks of every positive, both directions; streamed where the matrix is too large to keep."""
        if self.i2t.num_queries * self.i2t.num_items > _MATRIX:
            return stream_positive_ranks(lambda: self.blocks(scores), self.i2t, self.t2i, ties=ties)
        # Counting is many small steps: a processor does them without waiting for a GPU. Strips of rows serve both
        # directions while they are in its cache, which takes half the time of the matrix and then its transpose.
        matrix = (scores.score if self.whole else torch.cat(list(self.blocks(scores)))).cpu()
        return stream_positive_ranks(lambda: _strips(matrix), self.i2t, self.t2i, ties=ties)

    def topk(self, scores: Scores, k: int, *, direction: Direction) -> TopK:
        """The best k answers to each query, by (−score, index); indices are rows of the data. -> [Q, min(k, items)]"""
        found = (rows_topk if direction == "i2t" else columns_topk)(self.blocks(scores), k)
        items = self.rows_of("t2i" if direction == "i2t" else "i2t").to(found.index.device)
        return TopK(found.score, items[found.index])


def _strips(matrix: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(matrix), _STRIP):
        yield matrix[start : start + _STRIP]
