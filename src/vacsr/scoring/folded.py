"""Blocks of the score matrix in torch: folded where the method allows it, dense otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vacsr.adapter import FoldedScore
from vacsr.methods.base import Embedding, Method, take
from vacsr.scoring.topk import BLOCK_PAIRS, DIRECTIONS, Direction, TopK, block_rows, blocks_topk

FP8 = torch.float8_e4m3fn
SAFE = 1e4  # largest hidden unit or weight allowed in float16, whose range ends at 65,504
_CPU_OUTPUTS = 1 << 20  # of the trunk at a time: they stay in a CPU's cache


def half_dtype(folded: FoldedScore) -> torch.dtype:
    """float16, or bfloat16 for an adapter whose hidden units or small matrix may leave float16's range."""
    for part in folded.parts:
        hidden = part.trunk.norm(dim=1) + part.trunk_bias.abs()  # an upper bound: embeddings have length 1 at most
        if not bool(torch.maximum(hidden.amax(), part.small.abs().amax()) < SAFE):
            return torch.bfloat16
    return torch.float16


class Engine(ABC):
    """Computes scores of all pairs in row blocks, and ranks by them. Scores are float32 whatever the arithmetic."""

    dtype: torch.dtype
    """Of the large products."""
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

    def lists(self, v: Embedding, t: Embedding) -> Tensor:
        """Scores of queries, each with its own items. [Q, d], [Q, m, d] -> [Q, m]"""
        shape = t.mean.shape[:2]
        return self.aligned(v.map(lambda x: x.repeat_interleave(shape[1], 0)), t.map(lambda x: x.flatten(0, 1))).view(
            shape
        )

    def topk(self, v: Embedding, t: Embedding, *, k: int, directions: Sequence[Direction] = DIRECTIONS) -> list[TopK]:
        """Best texts of each image, and images of each text, by (−score, index), in one pass over the pairs.

        For i2t [I, min(k, T)], for t2i [T, min(k, I)].
        """
        return blocks_topk(self.stream(v, t), k, directions=directions)


class BlockScorer(Engine):
    """Scores tile by tile in torch, on any device.

    ``folded``: the method's folded form, where it is known already. Bounds, in numbers, not bytes: ``outputs`` of
    the trunk in a tile (by default as many as a CPU's cache holds, or 0.5 GB on a GPU), scaled trunk ``weights`` of a
    tile, which outgrow the outputs of small batches, and ``pairs`` of a streamed block. On a CPU a tile is 64
    images with all texts, in strips of ``outputs``: texts are rounded once per tile, weights scaled once per image.
    """

    def __init__(
        self, method: Method, *, dtype: torch.dtype = torch.float32, folded: FoldedScore | None = None,
        outputs: int | None = None, weights: int = 1 << 26, pairs: int = BLOCK_PAIRS,
    ) -> None:  # fmt: skip
        self.method, self.dtype, self.outputs, self.weights, self.pairs = method, dtype, outputs, weights, pairs
        folded = folded or method.fold()
        self.folded = None if folded is None else folded.to(folded.parts[0].trunk.device, dtype)
        self.width = 2 * method.pair_width if folded is None else len(folded.parts[0].trunk)

    def tile_pairs(self, device: torch.device) -> int:
        """Pairs whose trunk outputs are held at a time."""
        return max(1, (self.outputs or (1 << 27 if device.type == "cuda" else _CPU_OUTPUTS)) // self.width)

    def tile(self, images: int, texts: int, device: torch.device) -> tuple[int, int]:
        """Images and texts per tile within the bounds. Each item of the smaller side scales a copy of the trunk."""
        room = self.tile_pairs(device)
        columns = max(1, min(texts, room))
        rows = max(1, min(images, room // columns))
        most = room if self.folded is None else max(1, self.weights // self.folded.parts[0].trunk.numel())
        if most < min(rows, columns):
            return (most, columns) if rows < columns else (min(images, room // most), most)
        return rows, columns

    @torch.inference_mode()
    def block(self, v: Embedding, t: Embedding) -> Tensor:
        strips = v.mean.device.type == "cpu" and self.folded is not None
        rows, columns = (64, len(t.mean) or 1) if strips else self.tile(len(v.mean), len(t.mean), t.mean.device)
        room = (self.outputs or _CPU_OUTPUTS) if strips else None
        out = torch.empty(len(v.mean), len(t.mean), device=v.mean.device)
        for i in range(0, len(v.mean), rows):
            for j in range(0, len(t.mean), columns):
                images, texts = slice(i, i + rows), slice(j, j + columns)
                x, y = take(v, images), take(t, texts)
                score, folded = self.method.score, self.folded
                logits = folded.logits(x.mean, y.mean, room=room) if folded else self._dense(score, x, y)
                out[images, texts] = logits
        return out

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        rows = block_rows(64, len(t.mean), pairs=self.pairs)
        for start in range(0, max(1, len(v.mean)), rows):
            yield self.block(take(v, slice(start, start + rows)), t)

    def _dense(self, score: Callable[[Embedding, Embedding], Tensor], v: Embedding, t: Embedding) -> Tensor:
        """Of a method without a folded form."""
        with torch.autocast(v.mean.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return score(v, t).float()

    @torch.inference_mode()
    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        out = torch.empty(len(v.mean), device=v.mean.device)
        size = self.tile_pairs(out.device)
        for start in range(0, len(out), size):
            part = slice(start, start + size)
            x, y = take(v, part), take(t, part)
            dense, folded = self.method.aligned_score, self.folded
            out[part] = folded.aligned_logits(x.mean, y.mean) if folded else self._dense(dense, x, y)
        return out

    @torch.inference_mode()
    def lists(self, v: Embedding, t: Embedding) -> Tensor:
        return super().lists(v, t) if self.folded is None else self.folded.list_logits(v.mean, t.mean)
