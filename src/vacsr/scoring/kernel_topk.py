"""Top-k of both directions in one pass over row blocks of the score matrix, by (−score, index).

Score and index become one integer whose order is the wanted one, so that torch's own selection, which leaves the order
of ties open, finds exactly the stable answer, and nothing waits for the GPU in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.scoring.topk import TopK

_LOW = 0xFFFFFFFF


class BothTopK(NamedTuple):
    """Best first, of every image and of every text."""

    texts: TopK  # [I, k]: the best texts of each image
    images: TopK  # [T, k]: the best images of each text


def order_keys(score: Tensor, index: Tensor) -> Tensor:
    """Integers that are larger for a higher score, among equals for a smaller index. [...], [...] -> [...] int64

    NaN counts as the highest score, as in torch.topk; −0 equals 0.
    """
    return _high(score) | (_LOW - index)


def from_keys(keys: Tensor) -> TopK:
    """What the keys were made of."""
    bits = (keys >> 32).to(torch.int32)
    return TopK(_flip(bits).view(torch.float32), _LOW - (keys & _LOW))


def topk_both(blocks: Iterable[Tensor], k: int) -> BothTopK:
    """Row blocks [b, T] of the matrix, one at least -> the k best of every row and of every column."""
    rows: list[Tensor] = []
    best: Tensor | None = None
    seen = 0
    for block in blocks:
        high = _high(block)
        column = torch.arange(block.shape[1], device=block.device)
        row = torch.arange(seen, seen + len(block), device=block.device)
        rows.append((high | (_LOW - column)).topk(min(k, block.shape[1]), dim=1).values)
        here = (high | (_LOW - row).unsqueeze(1)).T
        if best is not None:
            here = torch.cat((best, here), dim=1)
        best = here.contiguous().topk(min(k, here.shape[1]), dim=1).values
        seen += len(block)
    assert best is not None, "no blocks"
    return BothTopK(from_keys(torch.cat(rows)), from_keys(best))


def _high(score: Tensor) -> Tensor:
    """The score's part of a key: its bits in the order of the numbers, in the upper half."""
    number = torch.where(score.isnan(), torch.nan, score.float() + 0.0)  # one NaN, one zero
    return _flip(number.view(torch.int32)).to(torch.int64) << 32


def _flip(bits: Tensor) -> Tensor:
    """Float bits to integers in the same order, and back: the magnitude of negative numbers is turned round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
