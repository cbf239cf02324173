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
_ROWS = 64  # images that share one rounding of the texts


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
        copies = v.map(lambda x: x.repeat_interleave(t.mean.shape[1], 0))
        return self.aligned(copies, t.map(lambda x: x.flatten(0, 1))).view(t.mean.shape[:2])

    def topk(self, v: Embedding, t: Embedding, *, k: int, directions: Sequence[Direction] = DIRECTIONS) -> list[TopK]:
        """Best texts of each image, and images of each text, by (−score, index), in one pass over the pairs.

        For i2t [I, min(k, T)], for t2i [T, min(k, I)].
        """
        return blocks_topk(self.stream(v, t), k, directions=directions)


class BlockScorer(Engine):
    """Scores tile by tile in torch, on any device.

    ``folded``: the method's folded form, where it is known already. Bounds, in numbers, not bytes: ``outputs`` of
    the trunk at a time (by default as many as a CPU's cache holds, or 0.5 GB on a GPU), and ``pairs`` of a streamed
    block.
    """

    def __init__(
        self, method: Method, *, dtype: torch.dtype = torch.float32, folded: FoldedScore | None = None,
        outputs: int | None = None, pairs: int = BLOCK_PAIRS,
    ) -> None:  # fmt: skip
        self.method, self.dtype, self.outputs, self.pairs = method, dtype, outputs, pairs
        folded = folded or method.fold()
        self.folded = None if folded is None else folded.to(folded.parts[0].trunk.device, dtype)
        self.width = 2 * method.pair_width if folded is None else len(folded.parts[0].trunk)

    def tile_pairs(self, device: torch.device) -> int:
        """Pairs whose trunk outputs are held at a time."""
        return max(1, (self.outputs or (1 << 27 if device.type == "cuda" else 1 << 20)) // self.width)

    @torch.inference_mode()
    def block(self, v: Embedding, t: Embedding) -> Tensor:
        out, method = torch.empty(len(v.mean), len(t.mean), device=v.mean.device), self.method
        room = self.tile_pairs(out.device)
        columns = max(1, len(t.mean) if self.folded else min(len(t.mean), room))
        rows = _ROWS if self.folded else max(1, room // columns)
        for i in range(0, len(v.mean), rows):
            for j in range(0, len(t.mean), columns):
                x, y = take(v, slice(i, i + rows)), take(t, slice(j, j + columns))
                logits = self.folded.logits(x.mean, y.mean, pairs=room) if self.folded else None
                out[i : i + rows, j : j + columns] = self._dense(method.score, x, y) if logits is None else logits
        return out

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        rows = block_rows(_ROWS, len(t.mean), pairs=self.pairs)
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
