# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
"""Kernels and operators of the scorer (:mod:`vacsr.scoring.kernel`).

The caller pads all sizes to whole tiles with zeros, so the inner loop masks nothing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources as OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

_COUNTS = ["images", "T", "tiles", "group"]  # they change from block to block: not worth a compilation each


@torch.library.custom_op("vacsr::scale_trunk", mutates_args=())
def scale_trunk(trunk: Tensor, images: Tensor, dtype: torch.dtype, tile: Sequence[int]) -> Tensor:
    """The trunk times each image, rounded once. [H, D], [I, D] float32 -> [I, H, D]"""
    weights: Tensor = _scaled(trunk, images, dtype, tile)
    _, hidden, depth, *_ = tile
    (height, width), rows, cols, run = trunk.shape, min(32, hidden), min(64, depth), 8
    with torch.cuda.device_of(trunk):
        scale_kernel[height // rows, width // cols, -(-len(images) // run)](
            trunk, images, weights, len(images), H=height, D=width, RUN=run, ROWS=rows, COLS=cols
        )
    return weights


@scale_trunk.register_fake
def _scaled(trunk: Tensor, images: Tensor, dtype: torch.dtype, tile: Sequence[int]) -> Tensor:
    return trunk.new_empty((images.shape[0], *trunk.shape), dtype=dtype)


@torch.library.custom_op("vacsr::score_pairs", mutates_args=("out",))
def score_pairs(
    texts: Tensor, weights: Tensor, edge: Tensor, decoder: Tensor, last: Tensor, gain: Tensor, out: Tensor, *,
    constant: float, add: bool, group: int, tile: Sequence[int],
) -> None:  # fmt: skip
    """One pass of the decoder over all pairs, as in :func:`score_kernel`. [T', D], [I, H, D] -> out [I, T] float32

    ``add``: the scores are added to what ``out`` holds; otherwise it is not read. ``tile``: a
    :class:`vacsr.scoring.kernel.Tile`.
    """
    rows, hidden, depth, warps, stages, run, tma, split = tile
    (images, height, dim), tiles = weights.shape, len(texts) // rows
    if split:
        from vacsr.kernels import hopper

        hopper.launch(
            texts, weights, edge, decoder, last, gain, out,
            constant=constant, add=add, group=group, hidden=hidden, depth=depth, stages=stages, run=run,
        )  # fmt: skip
        return
    sources: tuple[object, object] = texts, weights.view(-1, dim)
    if tma:
        sources = tuple(map(TensorDescriptor.from_tensor, sources, ([rows, depth], [hidden, depth])))
    with torch.cuda.device_of(out):
        score_kernel[(tiles * -(-images // run),)](
            *sources, edge, decoder, last, gain, out, *out.shape, tiles, group, constant,
            H=height, D=dim, WIDE=decoder.shape[1] if decoder.ndim == 2 else 0, ADD=add,
            GAIN=texts.dtype == torch.float8_e4m3fn, BT=rows, BH=hidden, BD=depth, RUN=run, TMA=bool(tma),
            WIDEN=out.device.type == "cpu", num_warps=warps, num_stages=stages,
            enable_fp_fusion=True,  # one operation for ·w and +, whatever the default of the installed Triton
        )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def scale_kernel(
    trunk, values, out, images,
    H: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out[i, h, k] = trunk[h, k] · values[i, k], rounded once. [H, D], [I, D] float32 -> [I, H, D]

    A program keeps its piece of the trunk in registers and runs through RUN images: the trunk is read once per run.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    at = row[:, None] * D + col[None, :]
    weight = tl.load(trunk + at)
    first = tl.program_id(2).to(tl.int64) * RUN
    for step in range(0, tl.minimum(images - first, RUN)):
        image = first + step
        scaled = weight * tl.load(values + image * D + col)[None, :]
        tl.store(out + image * H * D + at, scaled.to(out.dtype.element_ty))


@triton.jit
def position(images, tiles, group, RUN: tl.constexpr):
    """Which text tile and which run of images a program has: a group of text tiles meets all images before the next.

    The texts of a group stay in the L2 cache meanwhile, and programs side by side share the images' weights.
    """
    program = tl.program_id(0)
    runs = tl.cdiv(images, RUN)
    start = program // (group * runs) * group
    size = tl.minimum(tiles - start, group)
    inside = program % (group * runs)
    return start + inside % size, inside // size * RUN


@triton.jit
def _multiply(a, b, acc, WIDEN: tl.constexpr):
    """acc + a·b; WIDEN for the interpreter, which takes bfloat16 for integers in a product."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _add_units(
    total, acc, edge, decoder, unit, scale, WIDE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """ReLU of a tile of hidden units, times the decoder's small matrix, added to the sums so far."""
    bound = tl.load(edge + unit)
    if GAIN:
        bound = bound / scale
    if WIDE:
        small = tl.load(decoder + unit[:, None] * WIDE + tl.arange(0, WIDE)[None, :])
        active = tl.maximum(acc + bound[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = _multiply(active.to(small.dtype), small, total, WIDEN)
    else:
        small = tl.load(decoder + unit)
        active = tl.maximum(acc, bound[None, :], propagate_nan=tl.PropagateNan.ALL)
        total += tl.sum(active * small[None, :], axis=1)
    return total


@triton.jit
def _decoded(total, last, WIDE: tl.constexpr):
    """The sums of a linear decoder are the logit already; else bias, ReLU and the second layer."""
    if WIDE:
        wide = tl.arange(0, WIDE)
        inner = tl.maximum(total + tl.load(last + wide)[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        logit = tl.sum(inner * tl.load(last + WIDE + wide)[None, :], axis=1)
    else:
        logit = total
    return logit


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["out"])
def score_kernel(
    texts, weights, edge, decoder, last, gain, out, images, T, tiles, group, constant,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr, GAIN: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, RUN: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of BT texts with up to RUN images, one image after the other.

    texts [tiles·BT, D]; weights [images·H, D]: the scaled trunks, one below the other -> out [images, T] float32.
    Both are tensors, or TMA descriptors with tiles [BT, BD] and [BH, BD].
    All tiles of all images of the run are one loop, so that memory is read ahead across their borders; at the end of a
    tile of hidden units its decoder part is added up, at the end of an image its scores are written.

    Linear decoder (WIDE = 0): Σ_h w·relu(a + b) = Σ_h w·max(a, −b) + Σ_h w·b with edge = −b, decoder = w [H] float32,
    and the last sum in ``constant``: one operation less a unit. Otherwise edge = b, decoder [H, WIDE] in the operands'
    precision, and last [2, WIDE] float32 has the bias and the weights of the decoder's second layer.
    GAIN: the true trunk output is gain[image] times the product of the operands, edge is in true units.
    ADD: out holds a part of the scores, which is added.
    """
    tile, first = position(images, tiles, group, RUN)
    hidden_tiles: tl.constexpr = H // BH
    steps: tl.constexpr = D // BD
    row = tile * BT + tl.arange(0, BT)
    if not TMA:
        text_at = texts + (tile.to(tl.int64) * BT * D) + tl.arange(0, BT)[:, None] * D + tl.arange(0, BD)[None, :]
        weight_at = weights + tl.arange(0, BD)[:, None] + tl.arange(0, BH)[None, :] * D
    acc = tl.zeros((BT, BH), dtype=tl.float32)
    total = tl.zeros((BT, WIDE) if WIDE else (BT,), dtype=tl.float32)
    for step in tl.range(0, tl.minimum(images - first, RUN) * (hidden_tiles * steps)):
        k = step % steps
        block = step // steps
        if TMA:
            x = texts.load([tile * BT, k * BD])
            w = weights.load([first * H + block * BH, k * BD]).T
        else:
            x = tl.load(text_at + k * BD)
            w = tl.load(weight_at + ((first.to(tl.int64) * hidden_tiles + block) * (BH * D) + k * BD))
        acc = _multiply(x, w, acc, WIDEN)
        if k == steps - 1:
            image = first + block // hidden_tiles
            scale = tl.load(gain + image) if GAIN else 1.0
            unit = block % hidden_tiles * BH + tl.arange(0, BH)
            total = _add_units(total, acc, edge, decoder, unit, scale, WIDE, GAIN, WIDEN)
            acc = tl.zeros((BT, BH), dtype=tl.float32)
            if block % hidden_tiles == hidden_tiles - 1:
                at = out + image.to(tl.int64) * T + row
                logit = _decoded(total * scale if GAIN else total, last, WIDE) + constant
                if ADD:
                    logit += tl.load(at, mask=row < T, other=0.0)
                tl.store(at, logit, mask=row < T)
                total = tl.zeros_like(total)
