# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator,attr-defined"
"""The scores of :func:`vacsr.kernels.scores.score_kernel` on Hopper GPUs, with a warp for every task.

One warp copies tiles into shared memory. Two groups of four warps each multiply 64 texts with a tile of hidden units.
They run on their own, so one decodes its units while the other has the matrix units. Written in Gluon, Triton's lower
level: in Triton itself the products of a loop that also resets its sums wait for one another.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vacsr.kernels.scores import position

GROUP = 64
"""Texts of a group of four warps."""
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def launch(
    texts: Tensor, weights: Tensor, edge: Tensor, decoder: Tensor, last: Tensor, gain: Tensor, out: Tensor, *,
    constant: float, add: bool, group: int, hidden: int, depth: int, stages: int, run: int,
) -> None:  # fmt: skip
    """One pass of a decoder with two layers, as :func:`vacsr.kernels.scores.score_pairs`, by tiles of 128 × hidden."""
    (images, height, dim), wide, tiles = weights.shape, decoder.shape[1], len(texts) // (2 * GROUP)
    with torch.cuda.device_of(out):
        split_kernel[(tiles * -(-images // run),)](
            described(texts, GROUP, depth), described(weights.view(-1, dim), hidden, depth),
            described(decoder, hidden, wide), edge, last, gain, out, *out.shape, tiles, group, constant,
            H=height, D=dim, ADD=add, GAIN=texts.dtype == torch.float8_e4m3fn, RUN=run, STAGES=stages, num_warps=4,
        )  # fmt: skip


def described(matrix: Tensor, *block: int) -> TensorDescriptor:
    """A matrix for copies of such blocks."""
    return TensorDescriptor.from_tensor(matrix, [*block], shared_layout(matrix.dtype, *block))


def shared_layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([*block], TYPES[dtype])


@gluon.jit
def copy_tiles(texts, weights, empty, full, uppers, lowers, units, row, unit, count, D: gl.constexpr):
    """The texts of both groups and the hidden units, tile after tile, wherever both groups have freed a stage."""
    stages: gl.constexpr = full.shape[0]
    depth: gl.constexpr = texts.block_type.shape[1]
    steps: gl.constexpr = D // depth
    height: gl.constexpr = weights.block_type.shape[0]
    for step in range(count * steps):
        stage = step % stages
        mbarrier.wait(empty.index(stage), (step // stages & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, 2 * texts.block_type.nbytes + weights.block_type.nbytes)
        column = step % steps * depth
        tma.async_copy_global_to_shared(weights, [unit + step // steps * height, column], ready, units.index(stage))
        tma.async_copy_global_to_shared(texts, [row, column], ready, uppers.index(stage))
        tma.async_copy_global_to_shared(texts, [row + uppers.shape[1], column], ready, lowers.index(stage))


@gluon.jit
def score_texts(
    empty, full, rows, units, decoder, edge, last, gain, out, row, first, count, T, constant,
    D: gl.constexpr, ADD: gl.constexpr, GAIN: gl.constexpr,
):  # fmt: skip
    """Scores of 64 texts with the images from ``first`` on; ``count`` is the number of tiles of hidden units."""
    stages: gl.constexpr = full.shape[0]
    texts: gl.constexpr = rows.shape[1]
    height: gl.constexpr = units.shape[1]
    steps: gl.constexpr = D // rows.shape[2]
    tiles: gl.constexpr = decoder.shape[0]
    wide: gl.constexpr = decoder.shape[2]
    hidden: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 256 // rows.dtype.primitive_bitwidth])
    small: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    acc = gl.zeros((texts, height), gl.float32, hidden)
    total = gl.zeros((texts, wide), gl.float32, small)
    unit = gl.arange(0, height, gl.SliceLayout(0, hidden))
    inner = gl.arange(0, wide, gl.SliceLayout(0, small))
    row += gl.arange(0, texts, gl.SliceLayout(1, small))
    bias, outer = gl.load(last + inner), gl.load(last + wide + inner)
    step = 0
    for block in range(count):
        tile = block % tiles
        image = first + block // tiles
        bound = gl.load(edge + tile * height + unit)  # arrives while the products run
        scale = gl.load(gain + image) if GAIN else 1.0
        for k in range(steps):
            stage = step % stages
            mbarrier.wait(full.index(stage), step // stages & 1)
            acc = warpgroup_mma(
                rows.index(stage), units.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the product before has read its stage
            mbarrier.arrive(empty.index((step + stages - 1) % stages), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + stages - 1) % stages), count=1)
        if GAIN:
            bound = bound / scale
        active = gl.maximum(acc + bound[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL).to(decoder.dtype)
        total = warpgroup_mma(gl.convert_layout(active, operand), decoder.index(tile), total, use_acc=tile > 0)
        if tile == tiles - 1:
            if GAIN:
                total = total * scale
            decoded = gl.maximum(total + bias[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
            logit = gl.sum(decoded * outer[None, :], axis=1) + constant
            at = out + image.to(gl.int64) * T + row
            if ADD:
                logit += gl.load(at, mask=row < T, other=0.0)
            gl.store(at, logit, mask=row < T)


@gluon.jit(do_not_specialize=["images", "T", "tiles", "group"], do_not_specialize_on_alignment=["out"])
def split_kernel(
    texts, weights, decoder, edge, last, gain, out, images, T, tiles, group, constant,
    H: gl.constexpr, D: gl.constexpr, ADD: gl.constexpr, GAIN: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """texts [T', D], weights [images·H, D], decoder [H, WIDE] -> out [images, T]; the rest as in ``score_kernel``."""
    tile, first = position(images, tiles, group, RUN)
    group_rows: gl.constexpr = texts.block_type.shape[0]
    depth: gl.constexpr = texts.block_type.shape[1]
    row = tile * (2 * group_rows)
    height: gl.constexpr = weights.block_type.shape[0]
    parts: gl.constexpr = H // height
    count = gl.minimum(images - first, RUN) * parts

    uppers = gl.allocate_shared_memory(texts.dtype, [STAGES, group_rows, depth], texts.layout)
    lowers = gl.allocate_shared_memory(texts.dtype, [STAGES, group_rows, depth], texts.layout)
    units = gl.allocate_shared_memory(weights.dtype, [STAGES, height, depth], weights.layout)
    whole = gl.allocate_shared_memory(decoder.dtype, [parts, height, decoder.block_type.shape[1]], decoder.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(full.index(stage), count=1)
    mbarrier.init(loaded, count=1)
    fence_async_shared()
    mbarrier.expect(loaded, parts * decoder.block_type.nbytes)
    for part in gl.static_range(parts):
        tma.async_copy_global_to_shared(decoder, [part * height, 0], loaded, whole.index(part))
    mbarrier.wait(loaded, 0)
    gl.warp_specialize([
        (score_texts, (empty, full, uppers, units, whole, edge, last, gain, out, row, first, count, T, constant,
                       D, ADD, GAIN)),
        (score_texts, (empty, full, lowers, units, whole, edge, last, gain, out, row + group_rows, first, count, T,
                       constant, D, ADD, GAIN)),
        (copy_tiles, (texts, weights, empty, full, uppers, lowers, units, row, first * H, count, D)),
    ], [4, 1], [240, 24])  # fmt: skip
