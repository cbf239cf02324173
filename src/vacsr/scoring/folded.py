"""Blocks of the score matrix in torch: folded where the method allows it, dense otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.adapter import FoldedAdapter
from vacsr.methods.base import Embedding, Method, take
from vacsr.scoring.topk import BLOCK_PAIRS, BothTopK, Direction, TopK, block_rows, blocks_topk, topk_both

FP8 = torch.float8_e4m3fn
_SAFE = 1e4  # largest hidden unit or weight allowed in float16, whose range ends at 65,504
_SQUARE = 64  # a method without a folded form scores aligned pairs as the diagonals of squares of this size


def half_dtype(folded: FoldedAdapter) -> torch.dtype:
    """float16, or bfloat16 for an adapter whose hidden units or small matrix may leave float16's range."""
    hidden = folded.trunk.norm(dim=1) + folded.trunk_bias.abs()  # an upper bound: embeddings have length 1
    largest = torch.maximum(hidden.amax(), folded.small.abs().amax())
    return torch.float16 if bool(largest < _SAFE) else torch.bfloat16


class Engine(ABC):
    """Computes scores of all pairs in row blocks, and ranks by them. Scores are float32 whatever the arithmetic."""

    dtype: torch.dtype
    """Of the large products."""
    folded: FoldedAdapter | None
    """In which form it scores single pairs; None for a method that has no folded form."""
    exact: bool = True
    """The top-k is in the order of the scores."""

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        """Scores of all pairs. [I, d], [T, d] -> [I, T]"""
        out = torch.empty(len(v.mean), len(t.mean), device=v.mean.device)
        start = 0
        for rows in self.stream(v, t):  # copied one by one: to concatenate them would hold the matrix twice
            out[start : start + len(rows)] = rows
            start += len(rows)
        return out

    @abstractmethod
    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the scores; without images one block [0, T]. [I, d], [T, d]"""

    @abstractmethod
    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        """Scores of pairs (n, n). [N, d], [N, d] -> [N]"""

    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction) -> TopK:
        """Best texts of each image, or images of each text, by (−score, index). [I, min(k, T)] or [T, min(k, I)]"""
        return blocks_topk(self.stream(v, t), k, direction=direction)

    def topk_both(self, v: Embedding, t: Embedding, *, k: int) -> BothTopK:
        """Both directions in one pass. [I, min(k, T)], [T, min(k, I)]"""
        return topk_both(self.stream(v, t), k)


class Limits(NamedTuple):
    """Memory bounds of a :class:`BlockScorer`, in numbers rather than bytes."""

    outputs: int
    """Trunk outputs of a tile: cache-sized on a CPU, 0.5 GB on a GPU."""
    weights: int | None = None
    """Scaled trunk weights of a tile, which outgrow the outputs of small batches; None: no bound."""
    pairs: int = BLOCK_PAIRS
    """Pairs of a streamed block."""


LIMITS = {"cpu": Limits(1 << 20), "cuda": Limits(1 << 27, weights=1 << 26)}


class BlockScorer(Engine):
    """Scores tile by tile in torch, on any device.

    ``folded``: the method's folded form, where it is known already. ``limits``: by default those of the device.
    """

    def __init__(
        self, method: Method, *, dtype: torch.dtype = torch.float32, folded: FoldedAdapter | None = None,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.method, self.dtype, self.limits = method, dtype, limits
        folded = folded or method.fold()
        self.folded = None if folded is None else folded.to(folded.trunk.device, dtype)
        self.width = 2 * method.pair_width if folded is None else len(folded.trunk)

    def _limits(self, device: torch.device) -> Limits:
        return self.limits or LIMITS.get(device.type, LIMITS["cpu"])

    def tile(self, images: int, texts: int, device: torch.device) -> tuple[int, int]:
        """Images and texts per tile so that the trunk's output, and its weights times the smaller side, stay in bounds.

        Each item of the smaller side scales a copy of the trunk.
        """
        limits = self._limits(device)
        room = max(1, limits.outputs // self.width)
        columns = max(1, min(texts, room))
        rows = max(1, min(images, room // columns))
        if self.folded is None or limits.weights is None:
            return rows, columns
        most = max(1, limits.weights // self.folded.trunk.numel())
        if min(rows, columns) <= most:
            return rows, columns
        return (most, columns) if rows < columns else (max(1, min(images, room // most)), most)

    @torch.inference_mode()
    def block(self, v: Embedding, t: Embedding) -> Tensor:
        rows, columns = self.tile(len(v.mean), len(t.mean), t.mean.device)
        out = torch.empty(len(v.mean), len(t.mean), device=v.mean.device)
        for i in range(0, len(v.mean), rows):
            for j in range(0, len(t.mean), columns):
                part = slice(i, i + rows), slice(j, j + columns)
                out[part] = self._tile(take(v, part[0]), take(t, part[1]))
        return out

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        rows = block_rows(64, len(t.mean), pairs=self._limits(t.mean.device).pairs)
        for start in range(0, max(1, len(v.mean)), rows):
            yield self.block(take(v, slice(start, start + rows)), t)

    def _tile(self, v: Embedding, t: Embedding) -> Tensor:
        if self.folded is not None:
            return self.folded.logits(v.mean, t.mean)
        with torch.autocast(v.mean.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.method.score(v, t).float()

    @torch.inference_mode()
    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        out = torch.empty(len(v.mean), device=v.mean.device)
        size = _SQUARE if self.folded is None else max(1, self._limits(out.device).outputs // self.width)
        for start in range(0, len(out), size):
            part = slice(start, start + size)
            images, texts = take(v, part), take(t, part)
            if self.folded is None:
                out[part] = self._tile(images, texts).diagonal()
            else:
                out[part] = self.folded.aligned_logits(images.mean, texts.mean)
        return out
