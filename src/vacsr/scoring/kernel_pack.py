"""A folded adapter and embeddings as the scoring kernel wants them: padded to whole tiles, rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import FoldedAdapter
from vacsr.scoring.kernel_tiles import WIDEST, Tile

FP8 = torch.float8_e4m3fn
_TOP = 448.0  # the largest e4m3 number
_LEAST = 1e-6  # what a vector of zeros is divided by
_FAINT = 2.0**-40  # a decoder unit with smaller weights is not scaled up further: its bias must stay finite


class DecoderPass(NamedTuple):
    """Some of the decoder's units; the passes of a wide decoder add up in the output."""

    decoder: Tensor  # [H'] float32 if linear, else [H', width], every unit divided by a power of two near its largest
    last: Tensor  # [2, width] float32: bias and weight of the units' own layer; empty if linear
    width: int  # 0 if linear
    constant: float
    slope: float | None  # how much of what the output holds already is added; None: it is not read


class PackedAdapter(NamedTuple):
    """What the kernel reads. H' and D' are whole tiles; what pads them is 0 and adds 0."""

    trunk: Tensor  # [H', D'] float32; for fp8 every row is divided by its largest entry
    edge: Tensor  # [H'] float32: −bias for a linear decoder, else bias; for fp8 divided likewise
    passes: tuple[DecoderPass, ...]
    dim: int  # d before padding


class PackedTexts(NamedTuple):
    """All texts, ready to be multiplied."""

    rows: Tensor  # [T', D'] in the kernel's precision
    exact: Tensor  # [T, d] float32, for the cosine
    gain: float | Tensor  # by how much the rows were divided


class PackedImages(NamedTuple):
    """Some images, ready to scale the trunk."""

    rows: Tensor  # [I, D'] float32
    gain: Tensor  # [I] float32: of the true product over the kernel's; used for fp8 only


def pack_adapter(folded: FoldedAdapter, *, dtype: torch.dtype, tile: Tile) -> PackedAdapter:
    """Sums that do not depend on the pair are taken here, in float64."""
    trunk, bias, small = (x.double() for x in (folded.trunk, folded.trunk_bias, folded.small))
    peak = _peaks(trunk) if dtype == FP8 else torch.ones_like(bias)
    down, across = -len(bias) % tile.hidden, -trunk.shape[1] % tile.depth
    linear = folded.last is None
    edge = (-bias if linear else bias) / peak
    scaled = functional.pad(small * peak, (0, down))  # [M, H']
    start = 0.0 if folded.residual is None else float(folded.residual[1])
    slope = None if folded.residual is None else float(folded.residual[0])
    if linear:
        constant = float(folded.small_bias[0]) + float(small[0] @ bias) + start
        passes = [DecoderPass(scaled[0].float(), small.new_empty(0).float(), 0, constant, slope)]
    else:
        passes = _wide_passes(folded, scaled, torch.bfloat16 if dtype == FP8 else dtype)
        passes[0] = passes[0]._replace(constant=folded.last_bias + start, slope=slope)
    padded = functional.pad(trunk / peak.unsqueeze(1), (0, across, 0, down)).float().contiguous()
    return PackedAdapter(padded, functional.pad(edge, (0, down)).float(), tuple(passes), trunk.shape[1])


def pass_width(units: int) -> int:
    """Decoder units of a pass: a power of two from 16 up, as the matrix units want. 16 -> 16, 20 -> 32"""
    return min(WIDEST, max(16, 1 << (units - 1).bit_length()))


def _wide_passes(folded: FoldedAdapter, scaled: Tensor, dtype: torch.dtype) -> list[DecoderPass]:
    """Units in passes of at most WIDEST; all but the first add to what is there.

    p·relu(x/p) = relu(x): a unit's weights are brought to at most 1, which every precision holds, and its own layer
    takes the rest. A power of two changes no digit.
    """
    assert folded.last is not None
    width, passes = pass_width(len(scaled)), []
    scale = torch.exp2(_peaks(scaled).clamp_min(_FAINT).log2().ceil())
    scaled, bias, weight = scaled / scale.unsqueeze(1), folded.small_bias / scale, folded.last * scale
    for start in range(0, len(scaled), width):
        here = slice(start, start + width)
        missing = width - len(scaled[here])
        last = functional.pad(torch.stack([bias[here], weight[here]]).float(), (0, missing))
        decoder = functional.pad(scaled[here], (0, 0, 0, missing)).T.to(dtype).contiguous()
        passes.append(DecoderPass(decoder, last, width, 0.0, 1.0))
    return passes


def pack_texts(texts: Tensor, *, dtype: torch.dtype, tile: Tile) -> PackedTexts:
    """[T, d] -> [T', D']. For fp8 all are divided by one number; a text that is not finite does not count for it."""
    exact = texts.float()
    gain: float | Tensor = 1.0
    rows = functional.pad(exact, (0, -exact.shape[1] % tile.depth, 0, -len(exact) % tile.texts))
    if dtype == FP8 and len(exact):
        gain = exact.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(_LEAST) / _TOP
        rows = rows / gain
    return PackedTexts(rows.to(dtype).contiguous(), exact, gain)


def pack_images(images: Tensor, texts: PackedTexts, *, dtype: torch.dtype) -> PackedImages:
    """[I, d] -> [I, D']. For fp8 each is divided by its own largest entry."""
    rows = functional.pad(images.float(), (0, texts.rows.shape[1] - images.shape[1]))
    if dtype != FP8:
        return PackedImages(rows.contiguous(), rows.new_empty(0))
    gain = rows.abs().amax(dim=1).clamp_min(_LEAST) / _TOP
    return PackedImages((rows / gain.unsqueeze(1)).contiguous(), gain * texts.gain)


def _peaks(rows: Tensor) -> Tensor:
    """The largest entry of each row; 1 for a row of zeros. [H, d] -> [H]"""
    peak = rows.abs().amax(dim=1)
    return torch.where(peak > 0, peak, 1.0)
