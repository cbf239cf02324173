"""Folded scores of all pairs by one Triton kernel: what a matrix product costs, and hardly more.

W(v_i ⊙ t_j) = (W·diag v_i) t_j: the trunk is scaled by each image of a block, into half precision, and multiplied with
all texts; bias, ReLU, folded decoder and cosine residual are applied to a tile while it is in registers, so that each
score is written once and no hidden unit ever is. `available` says where it runs; elsewhere use `folded.BlockScorer`.

Against float64 the error is that of rounding the operands once. Its root mean square over the standard deviation of the
scores is 3e-3 to 6e-3 in bfloat16, an eighth of that in float16, about 5e-2 in float8 (e4m3);
`kernel_error.ranking_error` says what that does to rankings.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from vacsr.adapter import FoldedAdapter
from vacsr.errors import EnvironmentProblem, NotFoldable, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel_pack import FP8, PackedAdapter, PackedTexts, pack_adapter, pack_images, pack_texts, pass_width
from vacsr.scoring.kernel_tiles import Tile, candidates, fastest, images_at_a_time, text_tiles_together
from vacsr.scoring.kernel_topk import BothTopK, rescored, topk_both

DTYPES = (torch.bfloat16, torch.float16, FP8)
_WORTH_TUNING = 3e12  # operations of a call above which tiles are tried out first
_SAFE_NORM = 1e4  # of the trunk's rows: with unit vectors no hidden unit then leaves float16's range
_SCALED = (32, 64, 8)  # rows × columns of the trunk a program scales, and for how many images


def available(device: torch.device | str) -> bool:
    """Can the kernel run on tensors of this device? Interpreted (TRITON_INTERPRET=1) it runs on a CPU, slowly.

    >>> available("meta")
    False
    """
    place = torch.device(device)
    if importlib.util.find_spec("triton") is None or place.type not in ("cpu", "cuda"):
        return False
    if place.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.is_available() and torch.cuda.get_device_capability(place) >= (8, 0)


class PairKernel:
    """One folded adapter, ready to score.

    ``dtype`` is the operands' precision: bfloat16, float16, or float8_e4m3fn from compute capability 8.9 on. Sums are
    float32. ``tile`` fixes what would be chosen by rule and, before the first large call, by trying a few.
    """

    def __init__(self, folded: FoldedAdapter, *, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None) -> None:
        self.device, self.dtype = folded.trunk.device, dtype
        _check(self.device, dtype)
        width = 0 if folded.last is None else pass_width(len(folded.small))
        self.tiles = [tile] if tile else candidates(len(folded.trunk), width, dtype=dtype, device=self.device)
        self.packed: PackedAdapter = pack_adapter(folded, dtype=dtype, tile=self.tiles[0])
        self.rows = images_at_a_time(self.packed.trunk.numel() * dtype.itemsize, self.device)

    @torch.inference_mode()
    def texts(self, t: Tensor) -> PackedTexts:
        """Texts [T, d] in the kernel's layout, to be scored with any number of images."""
        if t.shape[-1] != self.packed.dim:
            raise ShapeMismatch(f"the adapter expects dimension {self.packed.dim}, the embeddings have {t.shape[-1]}")
        return pack_texts(t, dtype=self.dtype, tile=self.tiles[0])

    def blocks(self, v: Tensor, texts: PackedTexts) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the scores; without images one block [0, T]."""
        tile = self._tile(v, texts)
        for start in range(0, max(1, len(v)), self.rows):
            here = v[start : start + self.rows]
            yield self._block(here, texts, torch.empty(len(here), len(texts.exact), device=self.device), tile)

    def scores(self, v: Tensor, texts: PackedTexts, *, out: Tensor | None = None) -> Tensor:
        """[I, d], T texts -> [I, T] float32, into ``out`` where given."""
        out = torch.empty(len(v), len(texts.exact), device=self.device) if out is None else out
        tile = self._tile(v, texts)
        for start in range(0, len(v), self.rows):
            self._block(v[start : start + self.rows], texts, out[start : start + self.rows], tile)
        return out

    def _tile(self, v: Tensor, texts: PackedTexts) -> Tile:
        """By rule for little work or where there is no choice, else the fastest on these texts and some images."""
        work = 2.0 * len(v) * len(texts.exact) * self.packed.trunk.numel()
        if len(self.tiles) == 1 or work < _WORTH_TUNING:
            return self.tiles[0]
        some = v[: max(1, int(_WORTH_TUNING / work * len(v)))]
        out = torch.empty(len(some), len(texts.exact), device=self.device)
        widths = tuple(part.width for part in self.packed.passes)
        key = (str(self.device), self.dtype, tuple(self.packed.trunk.shape), widths)
        return fastest(self.tiles, key, lambda tile: self._block(some, texts, out, tile))

    @torch.inference_mode()
    def _block(self, v: Tensor, texts: PackedTexts, out: Tensor, tile: Tile) -> Tensor:
        """Scores of as many images as are scaled together, written to ``out`` [b, T]."""
        if out.numel() == 0:
            return out
        from vacsr.scoring import kernel_triton

        trunk, count = self.packed.trunk, len(v)
        images = pack_images(v, texts, dtype=self.dtype)
        weights = torch.empty(count, *trunk.shape, dtype=self.dtype, device=self.device)
        rows, cols, run = _scaled_tile(tile)
        with _current(self.device):
            grid = (trunk.shape[0] // rows, trunk.shape[1] // cols, -(-count // run))
            kernel_triton.scale_trunk[grid](
                trunk, images.rows, weights, count, H=trunk.shape[0], D=trunk.shape[1], RUN=run, ROWS=rows, COLS=cols
            )
            if self.packed.passes[0].slope is not None:
                torch.mm(v.float(), texts.exact.T, out=out)
            self._score(texts, weights.view(-1, trunk.shape[1]), images.gain, out=out, tile=tile)
        return out

    def _score(self, texts: PackedTexts, weights: Tensor, gain: Tensor, *, out: Tensor, tile: Tile) -> None:
        """All passes of the decoder over all pairs of a block."""
        from vacsr.scoring import kernel_triton

        height, depth = self.packed.trunk.shape
        tiles = len(texts.rows) // tile.texts
        group = text_tiles_together(tiles, tile.texts * depth * self.dtype.itemsize, self.device)
        grid = (tiles * -(-len(out) // tile.run),)
        sources: list[Any] = [texts.rows, weights]
        if tile.tma:
            shapes = (tile.texts, tile.depth), (tile.hidden, tile.depth)
            described: Any = kernel_triton.described
            sources = [described(x, shape) for x, shape in zip(sources, shapes, strict=True)]
        for part in self.packed.passes:
            kernel_triton.score_pairs[grid](
                *sources, self.packed.edge, part.decoder, part.last, gain, out, *out.shape, tiles, group,
                part.constant, part.slope or 0.0,
                H=height, D=depth, WIDE=part.width, RESIDUAL=part.slope is not None, GAIN=self.dtype == FP8,
                BT=tile.texts, BH=tile.hidden, BD=tile.depth, RUN=tile.run, TMA=tile.tma,
                WIDEN=self.device.type == "cpu", num_warps=tile.warps, num_stages=tile.stages,
                enable_fp_fusion=True,  # one operation for ·w and +, whatever the default of the Triton that is here
            )  # fmt: skip


class KernelScorer(BlockScorer):
    """`BlockScorer` with the kernel under it: same calls, same scores within the error of the operands' rounding."""

    def __init__(self, method: Method, *, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None) -> None:
        if not isinstance(method, Vacsr):
            raise UsageError(f"the kernel scores the vacsr method, not {type(method).__name__} — use BlockScorer")
        exact = method.adapter.fold()
        safe = bool(exact.trunk.norm(dim=1).amax() < _SAFE_NORM)
        super().__init__(method, dtype=(torch.float16 if safe else torch.bfloat16) if dtype == FP8 else dtype)
        self.kernel = PairKernel(exact, dtype=dtype, tile=tile)

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        """[I, d], [T, d] -> [I, T] float32. v⊙t does not care which side is which: the shorter one scales weights."""
        if len(t.mean) < len(v.mean):
            return self.kernel.scores(t.mean, self.kernel.texts(v.mean)).T
        return self.kernel.scores(v.mean, self.kernel.texts(t.mean))

    @torch.inference_mode()
    def topk_both(self, v: Embedding, t: Embedding, *, k: int, candidates: int | None = None) -> BothTopK:
        """The k best texts of each image and images of each text, in one pass without the matrix. [I, k], [T, k]

        ``candidates``: so many of each are found first and scored again in float16 (bfloat16 for a trunk too large for
        it); by default 3·k with float8, whose own order is too rough, and none with the others.
        """
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — ask for k=10")
        if len(t.mean) < len(v.mean):
            images, texts = self.topk_both(t, v, k=k, candidates=candidates)
            return BothTopK(texts, images)
        wanted = candidates or (3 * k if self.kernel.dtype == FP8 else None)
        found = topk_both(self.kernel.blocks(v.mean, self.kernel.texts(t.mean)), max(k, wanted or k))
        if wanted is None:
            return found

        def aligned(image: Tensor, text: Tensor) -> Tensor:
            return self.aligned(Embedding(v.mean[image]), Embedding(t.mean[text]))

        return BothTopK(
            rescored(found.texts, k, score=aligned),
            rescored(found.images, k, score=lambda text, image: aligned(image, text)),
        )


def choose_scorer(method: Method, *, dtype: torch.dtype = torch.float32) -> BlockScorer:
    """The kernel where it runs and fits method and precision, the torch path otherwise (in bfloat16 for float8)."""
    if isinstance(method, Vacsr) and dtype in DTYPES and available(method.adapter.trunk.weight.device):
        with suppress(NotFoldable):
            return KernelScorer(method, dtype=dtype)
    return BlockScorer(method, dtype=torch.bfloat16 if dtype == FP8 else dtype)


def _check(device: torch.device, dtype: torch.dtype) -> None:
    if not available(device):
        raise EnvironmentProblem(
            f"the scoring kernel needs Triton and a CUDA GPU of compute capability 8.0 or more, not {device} — run: "
            "pip install triton, or use vacsr.scoring.folded.BlockScorer, which runs anywhere"
        )
    if dtype not in DTYPES:
        raise UsageError(f"the scoring kernel has no {dtype} — use torch.bfloat16, torch.float16 or {FP8}")
    if dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise EnvironmentProblem("this GPU has no float8 — use dtype=torch.bfloat16")


def _scaled_tile(tile: Tile) -> tuple[int, int, int]:
    """Rows, columns and images of a scaling program; they divide the padded trunk."""
    return min(_SCALED[0], tile.hidden), min(_SCALED[1], tile.depth), _SCALED[2]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton starts kernels on the current GPU, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
