"""Top-k by (−score, index), stable, also when scores arrive block by block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["i2t", "t2i"]
"""Texts of images, or images of texts."""
_PAIRS = 1 << 25  # of a streamed block at most: while the best are chosen a pair takes 36 bytes, these 1.2 GB


class TopK(NamedTuple):
    """Best first."""

    score: Tensor  # [Q, k]
    index: Tensor  # type: ignore[assignment]  # [Q, k]; shadows tuple.index


def stable_topk(scores: Tensor, k: int) -> TopK:
    """The first k of each row by (−score, index). [Q, T] -> [Q, min(k, T)]

    NaN counts as the highest score, as in torch.topk.

    >>> stable_topk(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).index
    tensor([[1, 2]])
    """
    k = min(k, scores.shape[1])
    if k == 0:
        return TopK(scores[:, :0], torch.empty_like(scores[:, :0], dtype=torch.int64))
    top = scores.topk(k, dim=1)
    lowest = top.values[:, -1:]
    index = top.indices
    if bool(((scores < lowest).sum(dim=1) < scores.shape[1] - k).any()):  # a tie across the border, or only NaN
        index = _first_of_ties(scores, lowest, k)
    index = index.sort(dim=1).values
    order = scores.gather(1, index).sort(dim=1, descending=True, stable=True)
    return TopK(order.values, index.gather(1, order.indices))


def _first_of_ties(scores: Tensor, lowest: Tensor, k: int) -> Tensor:
    """The k of each row where its k-th score, ``lowest``, has equals: of these the smallest indices.

    [Q, T], [Q, 1] -> [Q, k]
    """
    nan, low = scores.isnan(), lowest.isnan()
    above = ((scores > lowest) | nan) & ~low
    tied = torch.where(low, nan, scores == lowest)
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(len(scores), k)


def streamed_rows(rows: int, texts: int) -> int:
    """So many rows a block, or fewer where a row is so long that the memory to choose its best would not be small.

    >>> streamed_rows(264, 25_000), streamed_rows(264, 1_000_000)
    (264, 33)
    """
    return max(1, min(rows, _PAIRS // max(1, texts)))


def rows_topk(blocks: Iterable[Tensor], k: int) -> TopK:
    """Top-k of every row of a matrix that comes in row blocks, one at least."""
    parts = [stable_topk(block, k) for block in blocks]
    return TopK(torch.cat([p.score for p in parts]), torch.cat([p.index for p in parts]))


def columns_topk(blocks: Iterable[Tensor], k: int) -> TopK:
    """Top-k of every column of a matrix that comes in row blocks, one at least; only k rows a column are kept."""
    best: TopK | None = None
    seen = 0
    for block in blocks:
        index = torch.arange(seen, seen + len(block), device=block.device).expand(block.shape[1], -1)
        score = block.T
        if best is not None:  # earlier rows first, so that position order is index order among equals
            score, index = torch.cat((best.score, score), dim=1), torch.cat((best.index, index), dim=1)
        top = stable_topk(score, k)
        best = TopK(top.score, index.gather(1, top.index))
        seen += len(block)
    assert best is not None, "no blocks"
    return best
