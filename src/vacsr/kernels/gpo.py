# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
"""GPO pooling's two slow parts: the recurrence over ranks, and the weighted sum of sorted values.

A step of the recurrence needs the one before, and a library call launches several kernels for each. Here every
direction and item is one program that keeps the weights in registers from end to end: at batch 128 and L=257 forward
and backward take 0.44 ms on an H200, replayed as a graph, and 1.94 ms with cuDNN. Sorting is replaced by counting: the
rank of a value is how many others are larger, L² comparisons that need no exchange of data.

:mod:`vacsr.backbones.heads` does the same with torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

_TILE = (32, 64)  # tokens × channels of one program: 16 values per thread, few idle rows at 257 tokens


def gru_states(gru: nn.Module, codes: Tensor, *, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Both directions of a one-layer GRU over the same position codes for all items. [L, F], [B]

    ``gru`` holds the eight parameters of a bidirectional nn.GRU under their names. It may be one, but Dynamo refuses to
    look into an nn.GRU.

    -> hidden states forwards [L, H], the same for every item, since a prefix does not know how long the item is; and
    backwards [B, L, H], from the last position of each item, 0 beyond it
    """
    w_ih, w_hh, b_ih, b_hh = (
        torch.stack([getattr(gru, f"{name}_l0"), getattr(gru, f"{name}_l0_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    assert w_hh.shape[-1] in (16, 32, 64, 128), "the kernel needs a power of two as hidden size"
    with torch.autocast(codes.device.type, enabled=False):
        gates = torch.baddbmm(b_ih.unsqueeze(1), codes.float().expand(2, -1, -1), w_ih.transpose(1, 2))
    steps = torch.cat((lengths.new_full((1,), len(codes)), lengths)).to(torch.int32)
    hidden, _ = _bigru(gates.float(), steps, w_hh.float(), b_hh.float())
    return hidden[0], hidden[1:]


def ranked_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Σ_r weights[b, r] · (r-th largest real value of channel c). [B, L, D], [B, L], [B, L] -> [B, D] float32

    Ties go to the earlier token. Weights past an item's number of real tokens count for nothing.
    """
    assert values.shape[:2] == mask.shape == weights.shape, "one mask entry and one weight per token"
    assert values.shape[1] < 1 << 15, "ranks are stored as int16"
    total: Tensor = _ranked_sum(values, mask, weights.float())[0]
    return total


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gru_forward(gates, weight_t, bias, lengths, hidden, saved, L, H: tl.constexpr):
    """One recurrence per program: program 0 runs forwards over all positions, program b + 1 backwards from item b.

    gates [2, L, 3H]; weight_t [2, H, 3H] (input unit, gate unit); bias [2, 3H] -> hidden [1 + B, L, H] and, for the
    gradient, saved [1 + B, L, 4, H]: r, z, n and the candidate's recurrent part. The weights stay in registers. The
    next position's gates are loaded before this position's are used, because memory is slower than a step.
    """
    chain = tl.program_id(0)
    back = (chain > 0).to(tl.int32)
    count = tl.minimum(tl.load(lengths + chain), L)
    position = back * (count - 1)
    stride = 1 - 2 * back
    unit = tl.arange(0, H)
    tile = weight_t + back * (3 * H * H) + unit[:, None] * (3 * H) + unit[None, :]
    w_r, w_z, w_n = tl.load(tile), tl.load(tile + H), tl.load(tile + 2 * H)
    b_at = bias + back * (3 * H) + unit
    b_r, b_z, b_n = tl.load(b_at), tl.load(b_at + H), tl.load(b_at + 2 * H)
    gates += back * (3 * H) * L + unit
    hidden += chain.to(tl.int64) * L * H + unit
    saved += chain.to(tl.int64) * L * (4 * H) + unit
    some = unit < count * H  # all units or none: the interpreter takes no single flag for a mask
    g_r = tl.load(gates + position * (3 * H), mask=some, other=0.0)
    g_z = tl.load(gates + position * (3 * H) + H, mask=some, other=0.0)
    g_n = tl.load(gates + position * (3 * H) + 2 * H, mask=some, other=0.0)
    h = tl.zeros((H,), dtype=tl.float32)
    for step in range(0, count):
        ahead = position + stride
        more = unit < (count - 1 - step) * H
        next_r = tl.load(gates + ahead * (3 * H), mask=more, other=0.0)
        next_z = tl.load(gates + ahead * (3 * H) + H, mask=more, other=0.0)
        next_n = tl.load(gates + ahead * (3 * H) + 2 * H, mask=more, other=0.0)
        column = h[:, None]
        r = _sigmoid(g_r + b_r + tl.sum(w_r * column, axis=0))
        z = _sigmoid(g_z + b_z + tl.sum(w_z * column, axis=0))
        a = b_n + tl.sum(w_n * column, axis=0)
        n = 2.0 * _sigmoid(2.0 * (g_n + r * a)) - 1.0
        h = n + z * (h - n)
        tl.store(hidden + position * H, h)
        tl.store(saved + position * (4 * H), r)
        tl.store(saved + position * (4 * H) + H, z)
        tl.store(saved + position * (4 * H) + 2 * H, n)
        tl.store(saved + position * (4 * H) + 3 * H, a)
        g_r, g_z, g_n = next_r, next_z, next_n
        position = ahead


@triton.jit
def gru_backward(weight, lengths, hidden, saved, d_hidden, d_gates, L, H: tl.constexpr):
    """The same chains walked from their ends: only what depends on the step before is done here.

    weight [2, 3H, H]; d_hidden [1 + B, L, H] -> d_gates [1 + B, L, 4, H]: the gradients of r, z and n before their
    squashing, and of the candidate's recurrent part. Sums over positions and items are matrix products, done by torch.
    """
    chain = tl.program_id(0)
    back = (chain > 0).to(tl.int32)
    count = tl.minimum(tl.load(lengths + chain), L)
    position = (1 - back) * (count - 1)
    stride = 2 * back - 1
    unit = tl.arange(0, H)
    tile = weight + back * (3 * H * H) + unit[:, None] * H + unit[None, :]
    w_r, w_z, w_n = tl.load(tile), tl.load(tile + H * H), tl.load(tile + 2 * H * H)
    hidden += chain.to(tl.int64) * L * H + unit
    d_hidden += chain.to(tl.int64) * L * H + unit
    saved += chain.to(tl.int64) * L * (4 * H) + unit
    d_gates += chain.to(tl.int64) * L * (4 * H) + unit
    some = unit < count * H  # all units or none: the interpreter takes no single flag for a mask
    r = tl.load(saved + position * (4 * H), mask=some, other=0.0)
    z = tl.load(saved + position * (4 * H) + H, mask=some, other=0.0)
    n = tl.load(saved + position * (4 * H) + 2 * H, mask=some, other=0.0)
    a = tl.load(saved + position * (4 * H) + 3 * H, mask=some, other=0.0)
    before = tl.load(hidden + (position + stride) * H, mask=unit < (count - 1) * H, other=0.0)
    d_out = tl.load(d_hidden + position * H, mask=some, other=0.0)
    carry = tl.zeros((H,), dtype=tl.float32)
    for step in range(0, count):
        ahead = position + stride
        more = unit < (count - 1 - step) * H
        next_r = tl.load(saved + ahead * (4 * H), mask=more, other=0.0)
        next_z = tl.load(saved + ahead * (4 * H) + H, mask=more, other=0.0)
        next_n = tl.load(saved + ahead * (4 * H) + 2 * H, mask=more, other=0.0)
        next_a = tl.load(saved + ahead * (4 * H) + 3 * H, mask=more, other=0.0)
        next_before = tl.load(hidden + (ahead + stride) * H, mask=unit < (count - 2 - step) * H, other=0.0)
        next_out = tl.load(d_hidden + ahead * H, mask=more, other=0.0)
        d_h = d_out + carry
        d_n = d_h * (1.0 - z) * (1.0 - n * n)
        d_z = d_h * (before - n) * z * (1.0 - z)
        d_r = d_n * a * r * (1.0 - r)
        d_a = d_n * r
        carry = d_h * z + tl.sum(w_r * d_r[:, None] + w_z * d_z[:, None] + w_n * d_a[:, None], axis=0)
        tl.store(d_gates + position * (4 * H), d_r)
        tl.store(d_gates + position * (4 * H) + H, d_z)
        tl.store(d_gates + position * (4 * H) + 2 * H, d_n)
        tl.store(d_gates + position * (4 * H) + 3 * H, d_a)
        r, z, n, a, before, d_out = next_r, next_z, next_n, next_a, next_before, next_out
        position = ahead


@triton.jit
def order_keys(values, mask, keys, L, D, padded_l, padded_d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Finite floats in the order of the values, so that the sign of a difference tells which of two is larger.

    NaN counts as largest, as in torch.sort; -0 becomes 0; masked tokens and padding lie below all.
    values [B, L, D], mask [B, L] -> keys float32 [B, padded_l, padded_d], whole tiles.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.program_id(2).to(tl.int64)
    inside = (row < L)[:, None] & (column < D)[None, :]
    x = tl.load(values + item * L * D + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    real = tl.load(mask + item * L + row, mask=row < L, other=0) != 0
    key = tl.where(x == 0.0, 0.0, tl.where(x < -3.40282e38, -3.40282e38, x))
    key = tl.where(x < 3.4028234e38, key, 3.4028234e38)
    at = item * padded_l * padded_d + row[:, None] * padded_d + column[None, :]
    tl.store(keys + at, tl.where(real[:, None], key, -3.4028234e38))


@triton.jit
def rank_values(
    values, mask, keys, rank, ranked, L, D, padded_l, padded_d,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rank every value of a tile among its channel's real tokens by counting, and store it at its rank.

    A comparison is a subtraction whose sign bit is added up. Tokens before the tile win ties, so there the smaller ones
    are counted and taken from their number; tokens after it lose ties; inside the tile, taking 1 from the bits of a
    difference of 0 makes it negative. ROWS is a multiple of UNROLL; with fewer COLUMNS than threads, every thread
    fetches what it needs itself instead of meeting the others at each token.
    values [B, L, D], mask [B, L], keys -> rank int16 [B, L, D] (-1: masked), ranked [B, L, D] in descending order.
    """
    start = tl.program_id(0) * ROWS  # neighbours in time read the same channels
    row = start + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.program_id(2).to(tl.int64)
    keys += item * padded_l * padded_d
    key = tl.load(keys + row[:, None] * padded_d + column[None, :])
    count = tl.zeros((ROWS, COLUMNS), dtype=tl.uint32)
    for first in range(0, start, UNROLL):
        for step in tl.static_range(UNROLL):
            other = tl.load(keys + (first + step) * padded_d + column)
            count += (other[None, :] - key).to(tl.uint32, bitcast=True) >> 31
    count = start.to(tl.uint32) - count
    for j in range(start, start + ROWS):
        other = tl.load(keys + j * padded_d + column)
        wins_ties = (row > j).to(tl.uint32)[:, None]
        count += ((key - other[None, :]).to(tl.uint32, bitcast=True) - wins_ties) >> 31
    for first in range(start + ROWS, L, UNROLL):
        for step in tl.static_range(UNROLL):
            other = tl.load(keys + (first + step) * padded_d + column)
            count += (key - other[None, :]).to(tl.uint32, bitcast=True) >> 31
    position = count.to(tl.int32)
    inside = (row < L)[:, None] & (column < D)[None, :]
    real = (tl.load(mask + item * L + row, mask=row < L, other=0) != 0)[:, None]
    base = item * L * D
    at = base + row[:, None] * D + column[None, :]
    tl.store(rank + at, tl.where(real, position, -1).to(tl.int16), mask=inside)
    x = tl.load(values + at, mask=inside, other=0.0)
    tl.store(ranked + base + position * D + column[None, :], x, mask=inside & real)


@triton.jit
def weigh_ranks(ranked, weights, counts, out, L, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[b, c] = Σ_r weights[b, r] · ranked[b, r, c] over the item's real tokens, in float32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + item)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        weight = tl.load(weights + item * L + row, mask=row < count, other=0.0)
        inside = (row < count)[:, None] & (column < D)[None, :]
        at = item * L * D + row[:, None] * D + column[None, :]
        total += weight[:, None] * tl.load(ranked + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + item * D + column, tl.sum(total, axis=0), mask=column < D)


@triton.jit
def values_gradient(rank, weights, d_out, d_values, L, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """d_values[b, i, c] = weights[b, rank[b, i, c]] · d_out[b, c]; 0 where masked."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.program_id(2).to(tl.int64)
    inside = (row < L)[:, None] & (column < D)[None, :]
    at = item * L * D + row[:, None] * D + column[None, :]
    position = tl.load(rank + at, mask=inside, other=-1).to(tl.int32)
    weight = tl.load(weights + item * L + position, mask=position >= 0, other=0.0)
    out = tl.load(d_out + item * D + column, mask=column < D, other=0.0)
    tl.store(d_values + at, (weight * out[None, :]).to(d_values.dtype.element_ty), mask=inside)


@triton.jit
def weights_gradient(ranked, counts, d_out, d_weights, L, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """d_weights[b, r] = Σ_c d_out[b, c] · ranked[b, r, c]; 0 past the item's last rank."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    item = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + item)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        out = tl.load(d_out + item * D + column, mask=column < D, other=0.0)
        inside = (row < count)[:, None] & (column < D)[None, :]
        at = item * L * D + row[:, None] * D + column[None, :]
        total += out[None, :] * tl.load(ranked + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_weights + item * L + row, tl.sum(total, axis=1), mask=row < L)


@torch.library.custom_op("vacsr::bigru", mutates_args=())
def _bigru(gates: Tensor, steps: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gates [2, L, 3H] = W_ih·x + b_ih of each direction (r, z, n); weight [2, 3H, H] and bias [2, 3H] are torch's
    ``weight_hh`` and ``bias_hh``; all float32. steps [1 + B] int32: L forwards, then each item's length backwards.

    -> hidden [1 + B, L, H] (chain 0 runs forwards) and what the gradient needs, [1 + B, L, 4, H]
    """
    hidden, saved = _states(gates, steps, weight)
    length, width = hidden.shape[1:]
    turned = weight.transpose(1, 2).contiguous()
    with torch.cuda.device_of(gates):
        gru_forward[(len(hidden),)](
            gates.contiguous(), turned, bias.contiguous(), steps, hidden, saved, length, H=width, num_warps=1
        )
    return hidden, saved


@_bigru.register_fake
def _states(gates: Tensor, steps: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    shape = (steps.shape[0], gates.shape[1], weight.shape[-1])
    return gates.new_zeros(shape), gates.new_zeros((*shape[:2], 4, shape[2]))


@torch.library.custom_op("vacsr::bigru_backward", mutates_args=())
def _bigru_backward(
    hidden: Tensor, saved: Tensor, steps: Tensor, weight: Tensor, d_hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of gates [2, L, 3H], weight [2, 3H, H] and bias [2, 3H]."""
    length, width = hidden.shape[1:]
    parts = torch.zeros_like(saved)
    with torch.cuda.device_of(hidden):
        gru_backward[(len(hidden),)](
            weight.contiguous(), steps, hidden, saved, d_hidden.contiguous(), parts, length, H=width, num_warps=1
        )
    d_gates = torch.stack((parts[0, :, :3], parts[1:, :, :3].sum(0))).flatten(2)
    recurrent = torch.cat((parts[:, :, :2], parts[:, :, 3:]), dim=2).flatten(2)  # [1 + B, L, 3H]
    d_bias = torch.stack((recurrent[0].sum(0), recurrent[1:].sum((0, 1))))
    with torch.autocast(hidden.device.type, enabled=False):
        ahead = recurrent[0, 1:].T @ hidden[0, :-1]  # the state before each position
        behind = recurrent[1:, :-1].flatten(0, 1).T @ hidden[1:, 1:].flatten(0, 1)
    return d_gates, torch.stack((ahead, behind)), d_bias


@_bigru_backward.register_fake
def _(hidden: Tensor, saved: Tensor, steps: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    length, width = hidden.shape[1:]
    d_gates, d_bias = hidden.new_empty((2, length, 3 * width)), hidden.new_empty((2, 3 * width))
    return d_gates, torch.empty_like(weight), d_bias


def _bigru_save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[1:3])
    ctx.set_materialize_grads(False)


def _bigru_gradient(ctx: Any, d_hidden: Tensor, _: None) -> tuple[Tensor | None, ...]:
    d_gates, d_weight, d_bias = _bigru_backward(*ctx.saved_tensors, d_hidden)
    return d_gates, None, d_weight, d_bias


_bigru.register_autograd(_bigru_gradient, setup_context=_bigru_save)


@torch.library.custom_op("vacsr::ranked_sum", mutates_args=())
def _ranked_sum(values: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> out [B, D] float32, rank int16 [B, L, D], ranked [B, L, D]."""
    items, length, channels = values.shape
    values, mask, weights = values.contiguous(), mask.to(torch.uint8).contiguous(), weights.contiguous()
    out, rank, ranked = _sums_and_ranks(values)
    if not values.numel():
        return out.zero_(), rank, ranked
    down, across, tile = _tiles(length, channels)
    keys = values.new_empty((items, down * _TILE[0], across * _TILE[1]), dtype=torch.float32)
    with torch.cuda.device_of(values):
        order_keys[down, across, items](values, mask, keys, length, channels, *keys.shape[1:], **tile)
        rank_values[down, across, items](
            values, mask, keys, rank, ranked, length, channels, *keys.shape[1:], UNROLL=4, **tile
        )
        counts = mask.sum(1, dtype=torch.int32)
        weigh_ranks[across, items](ranked, weights, counts, out, length, channels, **tile)
    return out, rank, ranked


@_ranked_sum.register_fake
def _sums_and_ranks(values: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = values.new_empty((values.shape[0], values.shape[2]), dtype=torch.float32)
    return out, values.new_empty(values.shape, dtype=torch.int16), values.new_empty(values.shape)


def _tiles(length: int, channels: int) -> tuple[int, int, dict[str, int]]:
    """Tiles down and across, and the settings of a kernel that works tile by tile."""
    rows, columns = _TILE
    return -(-length // rows), -(-channels // columns), {"ROWS": rows, "COLUMNS": columns, "num_warps": 4}


@torch.library.custom_op("vacsr::ranked_sum_backward", mutates_args=())
def _ranked_sum_backward(
    rank: Tensor, ranked: Tensor, mask: Tensor, weights: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """-> gradients of values [B, L, D] and weights [B, L]."""
    items, length, channels = ranked.shape
    d_values, d_weights = _ranked_gradients(rank, ranked, mask, weights)
    if not ranked.numel():
        return d_values, d_weights.zero_()
    weights, d_out, counts = weights.contiguous(), d_out.contiguous(), mask.sum(1, dtype=torch.int32)
    down, across, tile = _tiles(length, channels)
    with torch.cuda.device_of(ranked):
        values_gradient[down, across, items](rank, weights, d_out, d_values, length, channels, **tile)
        weights_gradient[down, items](ranked, counts, d_out, d_weights, length, channels, **tile)
    return d_values, d_weights


@_ranked_sum_backward.register_fake
def _ranked_gradients(rank: Tensor, ranked: Tensor, mask: Tensor, weights: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return ranked.new_empty(ranked.shape), weights.new_empty(weights.shape)


def _ranked_sum_save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[2], *inputs[1:])
    ctx.set_materialize_grads(False)


def _ranked_sum_gradient(ctx: Any, d_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    d_values, d_weights = _ranked_sum_backward(*ctx.saved_tensors, d_out)
    return d_values, None, d_weights


_ranked_sum.register_autograd(_ranked_sum_gradient, setup_context=_ranked_sum_save)
