"""The one ordering of the library: top-k by (−score, index), also when the score matrix arrives block by block.

A float32 score and its index become one integer whose order is the wanted one. ``torch.topk`` leaves the order of equal
values open, but no two of these integers are equal, so it returns the stable answer without a sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["i2t", "t2i"]
"""Texts of images, or images of texts."""
DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")
BLOCK_PAIRS = 1 << 25
"""Pairs per streamed block: choosing the best of a block takes 36 bytes per pair, 1.2 GB in all."""
_LOW = 0xFFFFFFFF
_COLUMNS = 256  # float64 columns sorted at a time


class TopK(NamedTuple):
    """Best first."""

    score: Tensor  # [Q, k]
    index: Tensor  # type: ignore[assignment]  # [Q, k]; shadows tuple.index

    def to_dict(self) -> dict[str, Any]:
        """As lists."""
        return {"score": self.score.tolist(), "index": self.index.tolist()}


class BothTopK(NamedTuple):
    """Best first, for every image and for every text."""

    texts: TopK  # [I, k]: the best texts of each image
    images: TopK  # [T, k]: the best images of each text

    def to_dict(self) -> dict[str, Any]:
        """As lists."""
        return {"texts": self.texts.to_dict(), "images": self.images.to_dict()}


def order_keys(score: Tensor, index: Tensor) -> Tensor:
    """Integers that are larger for a higher score, and among equal scores for a smaller index. -> [...] int64

    NaN counts as the highest score, as in torch.topk; −0 equals 0. [...] float32, [...] below 2³²
    """
    return _score_keys(score) | (_LOW - index)


def _score_keys(score: Tensor) -> Tensor:
    """The score's half of a key. [...] float32 -> [...] int64"""
    number = torch.where(score.isnan(), torch.nan, score.float() + 0.0)  # one NaN, one zero
    return _flip(number.view(torch.int32)).to(torch.int64).bitwise_left_shift_(32)


def from_keys(keys: Tensor) -> TopK:
    """Scores and indices of :func:`order_keys`."""
    return TopK(_flip((keys >> 32).to(torch.int32)).view(torch.float32), _LOW - (keys & _LOW))


def _flip(bits: Tensor) -> Tensor:
    """Float bits to integers in the order of the floats, and back: reverses the magnitudes of negative numbers."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def best_of(score: Tensor, index: Tensor, *, k: int) -> TopK:
    """The first k of each row's items by (−score, index), whatever their order. [Q, m], [Q, m] -> [Q, min(k, m)]"""
    return from_keys(order_keys(score, index).topk(min(k, score.shape[1]), dim=1).values)


def stable_topk(scores: Tensor, k: int) -> TopK:
    """The first k of each row by (−score, index). [Q, T] -> [Q, min(k, T)]

    >>> stable_topk(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).index
    tensor([[1, 2]])
    """
    if scores.dtype == torch.float64:  # a key has no room for 64 bits of score
        order = scores.sort(dim=1, descending=True, stable=True)
        return TopK(order.values[:, :k], order.indices[:, :k])
    return best_of(scores, torch.arange(scores.shape[1], device=scores.device), k=k)


def blocks_topk(blocks: Iterable[Tensor], k: int, *, directions: Sequence[Direction] = DIRECTIONS) -> list[TopK]:
    """Top-k of every row (i2t) and of every column (t2i) of a matrix that comes in row blocks, in one pass.

    [b, T] each, at least one -> for i2t [I, min(k, T)], for t2i [T, min(k, I)]
    """
    rows: list[Tensor] = []
    best, first, blocks = torch.empty(0), 0, iter(blocks)
    for block in blocks:
        if block.dtype == torch.float64:  # scores that somebody else made: they are in memory as a whole
            every = [block, *blocks]
            columns = zip(*(torch.split(part, _COLUMNS, dim=1) for part in every), strict=True)
            queries = {"i2t": iter(every), "t2i": (torch.cat(parts).T for parts in columns)}
            tops = ([stable_topk(part, k) for part in queries[direction]] for direction in directions)
            return [TopK(*map(torch.cat, zip(*parts, strict=True))) for parts in tops]
        keys = _score_keys(block)
        if "i2t" in directions:
            column = torch.arange(block.shape[1], device=block.device)
            rows.append((keys | (_LOW - column)).topk(min(k, block.shape[1]), dim=1).values)
        if "t2i" in directions:
            row = torch.arange(first, first + len(block), device=block.device)
            keys = (keys | (_LOW - row).unsqueeze(1)).T  # [T, b]
            keys = torch.cat((best, keys), dim=1) if first else keys.contiguous()
            best = keys.topk(min(k, keys.shape[1]), dim=1).values
        first += len(block)
    return [from_keys(torch.cat(rows) if direction == "i2t" else best) for direction in directions]


def block_rows(rows: int, texts: int, *, pairs: int = BLOCK_PAIRS) -> int:
    """Rows per block: ``rows``, or fewer where the texts are so many that a block would exceed ``pairs``.

    >>> block_rows(264, 25_000), block_rows(264, 1_000_000)
    (264, 33)
    """
    return max(1, min(rows, pairs // max(1, texts)))
