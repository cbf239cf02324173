"""The one ordering of the library: top-k by (−score, index), also when the score matrix arrives block by block.

A float32 score and its index become one integer whose order is the wanted one. ``torch.topk`` leaves the order of equal
values open, but no two of these integers are equal, so it returns the stable answer without a sort.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["i2t", "t2i"]
"""Texts of images, or images of texts."""
BLOCK_PAIRS = 1 << 25
"""Pairs per streamed block: choosing the best of a block takes 36 bytes per pair, 1.2 GB in all."""
_LOW = 0xFFFFFFFF


class TopK(NamedTuple):
    """Best first."""

    score: Tensor  # [Q, k]
    index: Tensor  # type: ignore[assignment]  # [Q, k]; shadows tuple.index


class BothTopK(NamedTuple):
    """Best first, for every image and for every text."""

    texts: TopK  # [I, k]: the best texts of each image
    images: TopK  # [T, k]: the best images of each text


def order_keys(score: Tensor, index: Tensor) -> Tensor:
    """Integers that are larger for a higher score, and among equal scores for a smaller index. -> [...] int64

    NaN counts as the highest score, as in torch.topk; −0 equals 0. [...] float32, [...] below 2³²
    """
    number = torch.where(score.isnan(), torch.nan, score.float() + 0.0)  # one NaN, one zero
    return (_flip(number.view(torch.int32)).to(torch.int64) << 32) | (_LOW - index)


def from_keys(keys: Tensor) -> TopK:
    """Scores and indices of :func:`order_keys`."""
    return TopK(_flip((keys >> 32).to(torch.int32)).view(torch.float32), _LOW - (keys & _LOW))


def _flip(bits: Tensor) -> Tensor:
    """Float bits to integers in the order of the floats, and back: reverses the magnitudes of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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


def rows_topk(blocks: Iterable[Tensor], k: int) -> TopK:
    """Top-k of every row of a matrix that comes in row blocks, at least one. [b, T] each -> [I, min(k, T)]"""
    return _joined([stable_topk(block, k) for block in blocks])


def columns_topk(blocks: Iterable[Tensor], k: int) -> TopK:
    """Top-k of every column of a matrix that comes in row blocks, at least one. [b, T] each -> [T, min(k, I)]"""
    best, first = None, 0
    for block in blocks:
        best, first = _merged(best, block, k=k, first=first), first + len(block)
    assert best is not None, "no blocks"
    return best


def topk_both(blocks: Iterable[Tensor], k: int) -> BothTopK:
    """Top-k of every row and of every column in one pass. [b, T] each -> [I, min(k, T)], [T, min(k, I)]"""
    rows: list[TopK] = []
    best, first = None, 0
    for block in blocks:
        rows.append(stable_topk(block, k))
        best, first = _merged(best, block, k=k, first=first), first + len(block)
    assert best is not None, "no blocks"
    return BothTopK(_joined(rows), best)


def _joined(parts: list[TopK]) -> TopK:
    return TopK(torch.cat([part.score for part in parts]), torch.cat([part.index for part in parts]))


def _merged(best: TopK | None, block: Tensor, *, k: int, first: int) -> TopK:
    """The best of each column so far and of a block that starts at row ``first`` of the matrix. [b, T] -> [T, k]"""
    score = block.T.contiguous()
    index = torch.arange(first, first + len(block), device=block.device).expand_as(score)
    if best is not None:  # earlier rows first, so that positions are in the order of indices among equal scores
        score, index = torch.cat((best.score, score), dim=1), torch.cat((best.index, index), dim=1)
    top = stable_topk(score, k)
    return TopK(top.score, index.gather(1, top.index))


def block_rows(rows: int, texts: int, *, pairs: int = BLOCK_PAIRS) -> int:
    """Rows per block: ``rows``, or fewer where the texts are so many that a block would exceed ``pairs``.

    >>> block_rows(264, 25_000), block_rows(264, 1_000_000)
    (264, 33)
    """
    return max(1, min(rows, pairs // max(1, texts)))
