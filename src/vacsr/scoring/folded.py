"""Blocks of the score matrix in plain torch: folded where the method allows it, dense otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vacsr.adapter import FoldedAdapter
from vacsr.errors import NotFoldable
from vacsr.methods.base import Embedding, Method, take
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.cpu import arithmetic
from vacsr.scoring.int8 import Int8Adapter
from vacsr.scoring.kernel_topk import BothTopK, topk_both
from vacsr.scoring.topk import Direction, TopK, columns_topk, rows_topk, streamed_rows

_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # trunk outputs alive at a time: cache-sized on a CPU, 0.5 GB on a GPU
_WEIGHTS = {"cuda": 1 << 26}  # scaled trunk weights alive at a time: 0.25 GB; they outgrow the outputs of small batches

_ROWS = 64  # images of a streamed block; `tile` cuts it further where memory asks for it
_DIAGONAL = 64  # a method without an aligned form scores small square tiles, of which the diagonal is kept


class BlockScorer:
    """Scores rows of images against all texts, tile by tile; float32 out whatever the arithmetic.

    ``dtype``: float32, bfloat16, or int8 on a CPU, which only a folded method has: others then take float32.
    """

    own_order = True
    """What it calls best is by the scores that it gives, so that a matrix of them will do."""

    def __init__(self, method: Method, *, dtype: torch.dtype = torch.float32) -> None:
        self.method, self.dtype = method, dtype
        self.folded: FoldedAdapter | Int8Adapter | None = None
        self.width = 1
        if isinstance(method, Vacsr):
            self.width = method.adapter.trunk.out_features
            try:
                self.folded = arithmetic(method.adapter.fold(), dtype)
            except NotFoldable:
                self.width *= 2 * method.adapter.components
        if self.folded is None and dtype == torch.int8:
            self.dtype = torch.float32

    def tile(self, images: int, texts: int, device: torch.device) -> tuple[int, int]:
        """Images and texts to take at a time so that the trunk's output, and its weights times the items of the
        smaller side, stay within bounds."""
        room = self._room(device)
        columns = max(1, min(texts, room))
        rows = max(1, min(images, room // columns))
        most = self._scaled(device)
        if min(rows, columns) > most and rows < columns:
            rows = most
        elif min(rows, columns) > most:
            columns = most
            rows = max(1, min(images, room // columns))
        return rows, columns

    def _room(self, device: torch.device) -> int:
        """Pairs at a time."""
        return max(1, _ELEMENTS.get(device.type, 1 << 20) // self.width)

    def _scaled(self, device: torch.device) -> int:
        """Items whose scaled weights fit; as many as there may be where nothing bounds them."""
        if not isinstance(self.folded, FoldedAdapter) or device.type not in _WEIGHTS:
            return self._room(device)
        return max(1, _WEIGHTS[device.type] // self.folded.trunk.numel())

    @torch.inference_mode()
    def block(self, v: Embedding, t: Embedding) -> Tensor:
        """[I, d], [T, d] -> [I, T] float32"""
        if isinstance(self.folded, Int8Adapter):  # it cuts tiles of its own
            return self.folded.logits(v.mean, t.mean)
        rows, columns = self.tile(len(v.mean), len(t.mean), t.mean.device)
        out = torch.empty(len(v.mean), len(t.mean), device=v.mean.device)
        for i in range(0, len(v.mean), rows):
            for j in range(0, len(t.mean), columns):
                here = slice(i, i + rows), slice(j, j + columns)
                out[here] = self._tile(take(v, here[0]), take(t, here[1]))
        return out

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the scores; without images one block [0, T]. [I, d], [T, d]"""
        rows = streamed_rows(_ROWS, len(t.mean))
        for start in range(0, max(1, len(v.mean)), rows):
            yield self.block(take(v, slice(start, start + rows)), t)

    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction) -> TopK:
        """Best texts of each image, or images of each text, by (−score, index). [I, min(k, T)] or [T, min(k, I)]"""
        return (rows_topk if direction == "i2t" else columns_topk)(self.stream(v, t), k)

    def topk_both(self, v: Embedding, t: Embedding, *, k: int) -> BothTopK:
        """The best texts of each image and the best images of each text, in one pass. [I, min(k, T)], [T, min(k, I)]"""
        return topk_both(self.stream(v, t), k)

    def _tile(self, v: Embedding, t: Embedding) -> Tensor:
        if self.folded is not None:
            return self.folded.logits(v.mean, t.mean)
        with torch.autocast(v.mean.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.method.score(v, t).float()

    @torch.inference_mode()
    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        """Scores of pairs (n, n). [N, d], [N, d] -> [N] float32"""
        out = torch.empty(len(v.mean), device=v.mean.device)
        size = _DIAGONAL if self.folded is None else self._room(v.mean.device)
        for start in range(0, len(out), size):
            here = slice(start, start + size)
            images, texts = take(v, here), take(t, here)
            if self.folded is None:
                out[here] = self._tile(images, texts).diagonal()
            else:
                out[here] = self.folded.aligned_logits(images.mean, texts.mean)
        return out
