"""Folded scores of all pairs by a Triton kernel, at hardly more than the cost of a matrix product.

W(v_i ⊙ t_j) = (W·diag v_i) t_j: the trunk is scaled by each image of a block, in half precision, and multiplied by all
texts. Bias, ReLU, folded decoder and cosine residual are applied to a tile while it is in registers, so each score is
written once and no hidden unit is. This module prepares the operands and chooses tiles; :mod:`vacsr.kernels.scores` has
the kernels.

The error against float64 is that of rounding the operands once. Its root mean square, relative to the standard
deviation of the scores, is 3e-3 to 6e-3 in bfloat16, an eighth of that in float16, about 5e-2 in float8 (e4m3).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr import kernels
from vacsr.adapter import WIDE_SUMS, FoldedAdapter, FoldedScore
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.methods.base import Embedding, Method, take
from vacsr.scoring.folded import FP8, SAFE, BlockScorer, Engine, half_dtype
from vacsr.scoring.topk import BLOCK_PAIRS, DIRECTIONS, Direction, TopK, block_rows

_FEW = 64  # fewer texts than this scale the weights, also where scores are streamed
_WIDEST = 128  # units of a decoder that the kernel has room for; a wider one is scored in torch
_NARROW = 32  # up to this width a large tile and the decoder's sums fit into registers together
_SCRATCH = 1 << 30  # bytes of scaled weights at a time
_SHARED = 99 << 10  # bytes of shared memory that every GPU from compute capability 8.0 on grants a program
_REDUCED = 4 << 10  # bytes of shared memory for sums across warps, and barriers
_BARRIERS = 1 << 10  # bytes of shared memory of a split tile's barriers and alignment
_FP8_MAX = 448.0  # the largest e4m3 number
_LEAST = 1e-6  # divisor of a vector of zeros
_FAINT = 2.0**-40  # a decoder unit with smaller weights is not scaled up further: its bias must stay finite


def available(device: torch.device) -> bool:
    """Can the kernel run on tensors of this device? It needs compute capability 8.0, or Triton's interpreter on a CPU.

    >>> available(torch.device("meta"))
    False
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return False
    return kernels.available(device) and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))


class Tile(NamedTuple):
    """One program's work, and how the compiler lays it out."""

    texts: int = 128
    hidden: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 4
    run: int = 4  # images one after the other
    tma: bool = True  # copies by Hopper's tensor memory accelerator; needs compute capability 9.0
    split: bool = False  # a warp copies, two groups of ``warps`` multiply: vacsr.kernels.hopper, for a 2-layer decoder


SMALL = Tile(texts=32, hidden=32, depth=32, run=2, tma=False)
"""For the interpreter, where a tile costs as much as its numbers."""


def choose_tile(hidden: int, width: int, *, dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The fastest tile that fits the GPU's shared memory. ``width``: units of the decoder, 0 if it is linear."""
    if device.type != "cuda":
        return SMALL
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    depth = 128 // dtype.itemsize  # 128 bytes per row: the widest swizzle of shared memory
    padded = [-(-hidden // edge) * edge for edge in (256, 128)]
    large = hopper and width <= _NARROW and padded[0] <= 1.1 * padded[1]
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED)
    shapes = ((128, 256), (128, 128), (64, 64), (32, 32))[0 if large else 1 :]
    tiles = [Tile(*shape, depth, stages=stages, tma=hopper) for shape in shapes for stages in (3, 2)]
    if large and width and kernels.has_gluon():
        tiles = [Tile(128, 256, depth, warps=4, stages=stages, run=8, split=True) for stages in (4, 3)] + tiles
    sizes = {"dim": dim, "hidden": hidden, "itemsize": dtype.itemsize}
    return next(tile for tile in tiles if shared_bytes(tile, width, **sizes) <= room)


def shared_bytes(tile: Tile, width: int, *, dim: int, hidden: int, itemsize: int) -> int:
    """Estimated shared memory of a program: what the compiler keeps there of its loads.

    Texts and weights are loaded ahead by as many steps as there are stages. The decoder's small matrix, always in two
    bytes, is there once; or once per stage where one step covers all of d, so that the loop has no branch. A split tile
    keeps the whole of it, for all hidden units.
    """
    operands = tile.stages * (tile.texts + tile.hidden) * tile.depth * itemsize
    if tile.split:
        return operands + 2 * -(-hidden // tile.hidden) * tile.hidden * width + _BARRIERS
    copies = tile.stages if dim <= tile.depth else 1
    return operands + 2 * copies * tile.hidden * width + _REDUCED


def images_at_a_time(image_bytes: int, device: torch.device) -> int:
    """Images whose scaled weights are held together, at least 1; on a GPU a whole multiple of its processors."""
    if device.type != "cuda":
        return max(1, min(8, _SCRATCH // image_bytes))
    properties = torch.cuda.get_device_properties(device)
    room = max(1, min(_SCRATCH, properties.total_memory // 16) // image_bytes)
    processors = properties.multi_processor_count
    return room if room < processors else min(2, room // processors) * processors


def text_tiles_together(tiles: int, tile_bytes: int, device: torch.device) -> int:
    """Text tiles that meet all images before the next ones do: a third of the L2 cache, in even groups."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20
    groups = -(-tiles // max(1, cache // 3 // tile_bytes))
    return -(-tiles // groups)


class PackedTexts(NamedTuple):
    """All texts as one adapter sees them, ready to be multiplied."""

    rows: Tensor  # [T', D'] in the kernel's precision
    gain: float | Tensor  # what the rows were divided by


class PackedAdapter(NamedTuple):
    """What the kernel reads of one adapter."""

    trunk: Tensor  # [H', D'] float32
    edge: Tensor  # [H'] float32
    decoder: Tensor  # [H'] float32 of a linear decoder, else [H', width] in half precision
    last: Tensor  # [2, width] float32, empty for a linear decoder
    constant: float


def decoder_width(folded: FoldedAdapter) -> int:
    """Units of the decoder in the kernel: a power of two from 16 up, as the matrix units need; 0 if it is linear."""
    return 0 if folded.last is None else max(16, 1 << (len(folded.small) - 1).bit_length())


def fits(folded: FoldedScore) -> bool:
    """Has the kernel room for this decoder?"""
    return decoder_width(folded.parts[0]) <= _WIDEST


def _peaks(rows: Tensor) -> Tensor:
    """The largest magnitude of each row; 1 for a row of zeros. [H, d] -> [H]"""
    peak = rows.abs().amax(dim=1)
    return torch.where(peak > 0, peak, 1.0)


class KernelScorer(Engine):
    """The scores of :class:`BlockScorer` up to the rounding of the operands, by the kernel.

    ``dtype``: bfloat16, float16, or float8_e4m3fn from compute capability 8.9 on; sums are float32. ``rows``: images of
    a block, ``pairs``: pairs of a streamed block. If the tile does not fit the GPU after all, it warns and uses torch.
    """

    def __init__(
        self, method: Method, *, dtype: torch.dtype = torch.bfloat16, folded: FoldedScore | None = None,
        tile: Tile | None = None, rows: int | None = None, pairs: int = BLOCK_PAIRS,
    ) -> None:  # fmt: skip
        assert dtype.itemsize < 4, f"the kernel multiplies in half precision and float8, not {dtype}"
        folded = folded or method.fold()
        if folded is None or not fits(folded):
            message = f"{type(method).__name__} does not fold, or has a decoder of more than {_WIDEST} units"
            raise UsageError(f"{message} — use vacsr.scoring.BlockScorer")
        first = folded.parts[0]
        self.device, self.dtype, self.pairs = first.trunk.device, dtype, pairs
        if not available(self.device):
            raise EnvironmentProblem(
                f"the scoring kernel needs Triton and a CUDA GPU of compute capability 8.0 or more, not {self.device} "
                "— run: pip install triton, or use vacsr.scoring.BlockScorer, which runs anywhere"
            )
        if dtype == FP8 and self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise EnvironmentProblem("this GPU has no float8 — use dtype=torch.bfloat16")
        self.plain = BlockScorer(method, dtype=half_dtype(folded) if dtype == FP8 else dtype, folded=folded)
        (height, dim), width = first.trunk.shape, decoder_width(first)
        self.tile = tile or choose_tile(height, width, dim=dim, dtype=dtype, device=self.device)
        self._fits = True  # until a launch has failed
        self.dim = dim * len(folded.parts)
        self.parts = [self._pack_adapter(part) for part in folded.parts]
        residuals = [part.residual for part in folded.parts if part.residual is not None]
        self.slopes = torch.cat([x[:1].float().expand(dim) for x in residuals]) if residuals else None
        """Of the cosine, by dimension. [dim]"""
        small = self.slopes is not None and bool(self.slopes.abs().amax() < SAFE)
        self.cosine_dtype = torch.float16 if small and WIDE_SUMS else torch.float32
        """Of the cosine's operands: float16 has eight times the precision of bfloat16; its sums are float32."""
        self.rows = rows or images_at_a_time(self.parts[0].trunk.numel() * dtype.itemsize, self.device)

    def _pack_adapter(self, folded: FoldedAdapter) -> PackedAdapter:
        """H' and D' are whole tiles; the padding is 0 and adds 0. For float8 each row of the trunk is divided by its
        largest entry. Sums that do not depend on the pair are taken here, in float64."""
        trunk, bias, small = (x.double() for x in (folded.trunk, folded.trunk_bias, folded.small))
        peak = _peaks(trunk) if self.dtype == FP8 else torch.ones_like(bias)
        down, across = -len(bias) % self.tile.hidden, -trunk.shape[1] % self.tile.depth
        offset = 0.0 if folded.residual is None else float(folded.residual[1])
        units = functional.pad(small * peak, (0, down))  # [M, H']
        if folded.last is None:
            edge, decoder, last = -bias, units[0].float(), small.new_empty(0).float()  # [H'] float32
            constant = float(folded.small_bias[0]) + float(small[0] @ bias)
        else:
            # p·relu(x/p) = relu(x): a unit's weights are brought to at most 1, which every precision holds, and the
            # last layer takes the factor. A power of two changes no digit.
            scale = torch.exp2(_peaks(units).clamp_min(_FAINT).log2().ceil())
            missing = decoder_width(folded) - len(units)
            last = torch.stack([folded.small_bias / scale, folded.last * scale]).float()
            half = torch.bfloat16 if self.dtype == FP8 else self.dtype
            last = functional.pad(last, (0, missing))
            decoder = functional.pad(units / scale.unsqueeze(1), (0, 0, 0, missing)).T.to(half).contiguous()
            edge, constant = bias, folded.last_bias
        edge = functional.pad(edge / peak, (0, down)).float()
        trunk = functional.pad(trunk / peak.unsqueeze(1), (0, across, 0, down)).float().contiguous()
        return PackedAdapter(trunk, edge, decoder, last, constant + offset)

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        """[I, d], [T, d] -> [I, T] float32. v⊙t is symmetric: the shorter side scales the weights."""
        return super().block(t, v).T if len(t.mean) < len(v.mean) else super().block(v, t)

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        """Row blocks [b, T] of the scores, the texts packed once. [I, d], [T, d]

        Fewer texts than a tile holds would leave most of it empty: they scale the weights, for many images at a time.
        """
        assert v.mean.shape[1] == t.mean.shape[1] == self.dim, "embeddings of another width"
        if len(t.mean) < min(len(v.mean), _FEW):
            rows = block_rows(len(v.mean), len(t.mean), pairs=self.pairs)
            for start in range(0, len(v.mean), rows):
                yield self.block(take(v, slice(start, start + rows)), t)
            return
        texts, rounded = [self._pack_texts(part) for part in self._split(t.mean)], t.mean.to(self.cosine_dtype)
        rows = block_rows(self.rows, len(t.mean), pairs=self.pairs)
        for start in range(0, max(1, len(v.mean)), rows):
            part = take(v, slice(start, start + rows))
            out = torch.empty(len(part.mean), len(t.mean), device=self.device)
            yield out if self._write(part.mean, rounded, texts, out) else self.plain.block(part, t)

    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        return self.plain.aligned(v, t)  # in torch; float8 scores these pairs in half precision

    def lists(self, queries: Embedding, items: Embedding, *, direction: Direction) -> Tensor:
        return self.plain.lists(queries, items, direction=direction)

    def topk(self, v: Embedding, t: Embedding, *, k: int, directions: Sequence[Direction] = DIRECTIONS) -> list[TopK]:
        if len(directions) == 2 and len(t.mean) < len(v.mean):
            return super().topk(t, v, k=k, directions=directions)[::-1]
        return super().topk(v, t, k=k, directions=directions)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each adapter sees of embeddings. [N, dim] -> [N, d] each"""
        return x.float().chunk(len(self.parts), dim=-1)

    @torch.inference_mode()
    def _pack_texts(self, texts: Tensor) -> PackedTexts:
        """[T, d] -> [T', D']. For float8 all are divided by one number, which ignores texts that are not finite."""
        gain: float | Tensor = 1.0
        rows = functional.pad(texts, (0, -texts.shape[1] % self.tile.depth, 0, -len(texts) % self.tile.texts))
        if self.dtype == FP8 and len(texts):
            gain = texts.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(_LEAST) / _FP8_MAX
            rows = rows / gain
        return PackedTexts(rows.to(self.dtype).contiguous(), gain)

    def _cosines(self, v: Tensor, t: Tensor, out: Tensor) -> Tensor:
        """Residuals into ``out``. [b, d], [T, d] -> [b, T]"""
        assert self.slopes is not None
        left, right = (v.float() * self.slopes).to(self.cosine_dtype), t.to(self.cosine_dtype).T
        if left.device.type == "cuda" and left.dtype == torch.float16:
            return torch.mm(left, right, out_dtype=torch.float32, out=out)
        return torch.mm(left.float(), right.float(), out=out)

    @torch.inference_mode()
    def _write(self, v: Tensor, t: Tensor, texts: list[PackedTexts], out: Tensor) -> bool:
        """Scores of images [b, d] into ``out`` [b, T]; False where the tile does not fit the GPU.

        ``out`` starts with the residuals, and every adapter adds its part to it.
        """
        from vacsr.kernels import scores

        if not self._fits or not out.numel():
            return self._fits
        if self.slopes is not None:
            self._cosines(v, t, out)
        try:
            for number, (part, images, packed) in enumerate(zip(self.parts, self._split(v), texts, strict=True)):
                rows = functional.pad(images, (0, packed.rows.shape[1] - images.shape[1])).contiguous()  # [I, D']
                gain = rows.new_empty(0)
                if self.dtype == FP8:  # the true product over the kernel's, for each image
                    largest = rows.abs().amax(dim=1).clamp_min(_LEAST) / _FP8_MAX
                    rows, gain = rows / largest.unsqueeze(1), largest * packed.gain
                weights = scores.scale_trunk(part.trunk, rows, self.dtype, self.tile)
                tile_bytes = self.tile.texts * weights.shape[2] * self.dtype.itemsize
                group = text_tiles_together(len(packed.rows) // self.tile.texts, tile_bytes, self.device)
                scores.score_pairs(
                    packed.rows, weights, part.edge, part.decoder, part.last, gain, out,
                    constant=part.constant, add=number > 0 or self.slopes is not None, group=group, tile=self.tile,
                )  # fmt: skip
        except scores.OutOfResources:
            self._fits = False
            message = f"the scoring kernel's tile does not fit this GPU at d={self.dim // len(self.parts)}"
            warnings.warn(f"{message}; scoring continues in torch, slower", stacklevel=3)
        return self._fits
