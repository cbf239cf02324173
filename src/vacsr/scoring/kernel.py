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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vacsr import operators
from vacsr.adapter import FoldedAdapter
from vacsr.errors import EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.scoring.kernel_pack import FP8, PackedAdapter, PackedTexts, pack_adapter, pack_images, pack_texts, pass_width
from vacsr.scoring.kernel_tiles import Tile, candidates, fastest, images_at_a_time, text_tiles_together
from vacsr.scoring.topk import streamed_rows

DTYPES = (torch.bfloat16, torch.float16, FP8)
_WORTH_TUNING = 3e12  # operations of a call above which tiles are tried out first
_SCALED = (32, 64, 8)  # rows × columns of the trunk a program scales, and for how many images


class NoRoom(EnvironmentProblem):
    """The GPU has too little shared memory for any tile."""


def available(device: torch.device | str) -> bool:
    """Can the kernel run on tensors of this device? Interpreted (TRITON_INTERPRET=1) it runs on a CPU, slowly.

    >>> available("meta")
    False
    """
    place = torch.device(device)
    if importlib.util.find_spec("triton") is None or place.type not in ("cpu", "cuda"):
        return False
    if place.type == "cpu":
        return operators.interpreted()
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
        height, dim = folded.trunk.shape
        self.tiles = [tile] if tile else candidates(height, width, dim=dim, dtype=dtype, device=self.device)
        self.shape = self.tiles[0]  # all have one shape: what is packed fits each
        self.packed: PackedAdapter = pack_adapter(folded, dtype=dtype, tile=self.shape)
        self.rows = images_at_a_time(self.packed.trunk.numel() * dtype.itemsize, self.device)

    @torch.inference_mode()
    def texts(self, t: Tensor) -> PackedTexts:
        """Texts [T, d] in the kernel's layout, to be scored with any number of images."""
        self._check_rows(t, "text")
        return pack_texts(t, dtype=self.dtype, tile=self.shape)

    def blocks(self, v: Tensor, texts: PackedTexts) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the scores; without images one block [0, T]."""
        self._check_pairs(v, texts)
        rows = streamed_rows(self.rows, len(texts.exact))
        for start in range(0, max(1, len(v)), rows):
            here = v[start : start + rows]
            yield self._fitted(here, texts, torch.empty(len(here), len(texts.exact), device=self.device), of=len(v))

    def scores(self, v: Tensor, texts: PackedTexts, *, out: Tensor | None = None) -> Tensor:
        """[I, d], T texts -> [I, T] float32, into ``out`` where given."""
        self._check_pairs(v, texts)
        if out is None:
            out = torch.empty(len(v), len(texts.exact), device=self.device)
        else:
            _check_out(out, (len(v), len(texts.exact)), self.device)
        for start in range(0, len(v), self.rows):
            here = slice(start, start + self.rows)
            self._fitted(v[here], texts, out[here], of=len(v))
        return out

    def _check_rows(self, x: Tensor, kind: str) -> None:
        if x.ndim != 2 or x.shape[1] != self.packed.dim:
            message = f"{kind} embeddings have shape {list(x.shape)}, the adapter expects dimension {self.packed.dim}"
            raise ShapeMismatch(f"{message} — pass one row per {kind}: [N, {self.packed.dim}]")

    def _check_pairs(self, v: Tensor, texts: PackedTexts) -> None:
        """Images of the right dimension, and texts in this kernel's own layout."""
        self._check_rows(v, "image")
        depth, (count, width) = self.packed.trunk.shape[1], texts.rows.shape
        if texts.rows.dtype != self.dtype or width != depth or count % self.shape.texts:
            message = f"these texts are packed as {texts.rows.dtype} [{count}, {width}] for another kernel"
            raise ShapeMismatch(
                f"{message}, this one reads {self.dtype} with {depth} columns — pack them: kernel.texts(t)"
            )

    def _fitted(self, v: Tensor, texts: PackedTexts, out: Tensor, *, of: int) -> Tensor:
        """A block of ``of`` images; a tile that the GPU has no room for after all is not tried again."""
        while self.tiles:
            tile = self._tile(v, texts, of=of)
            try:
                return self._block(v, texts, out, tile)
            except _out_of_resources():
                self.tiles.remove(tile)
        raise NoRoom(f"no tile of the scoring kernel fits this GPU at d={self.packed.dim} — use BlockScorer")

    def _tile(self, v: Tensor, texts: PackedTexts, *, of: int) -> Tile:
        """By rule for little work or where there is no choice, else the fastest on these texts and some images."""
        work = 2.0 * of * len(texts.exact) * self.packed.trunk.numel()
        if len(self.tiles) == 1 or work < _WORTH_TUNING:
            return self.tiles[0]
        some = v[: max(1, int(_WORTH_TUNING / work * of))]
        out = torch.empty(len(some), len(texts.exact), device=self.device)
        widths = tuple(part.width for part in self.packed.passes)
        key = (str(self.device), self.dtype, tuple(self.packed.trunk.shape), widths, *self.tiles)
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
        with operators.current(self.device):
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


def _out_of_resources() -> type[Exception]:
    """What Triton raises where a tile asks for more than the GPU has."""
    from vacsr.scoring.kernel_triton import OutOfResources

    found: type[Exception] = OutOfResources
    return found


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


def _check_out(out: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """The kernel writes row after row of float32, and asks nobody."""
    if out.shape != shape or out.dtype != torch.float32 or out.device != device or not out.is_contiguous():
        given = f"{out.dtype} {list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        expected = f"contiguous torch.float32 {list(shape)} on {device}"
        raise ShapeMismatch(f"out is {given}, expected {expected} — pass such a tensor, or leave out away")


def _scaled_tile(tile: Tile) -> tuple[int, int, int]:
    """Rows, columns and images of a scaling program; they divide the padded trunk."""
    return min(_SCALED[0], tile.hidden), min(_SCALED[1], tile.depth), _SCALED[2]
