# mypy: ignore-errors
"""The Triton kernels behind `gpo_kernel`; imported only where they run, so that nothing else needs Triton.

One file apart because a kernel is no ordinary Python: it is compiled at first call, or interpreted when
TRITON_INTERPRET=1 was set before Triton was imported.
"""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gru_forward(gates, weight_t, bias, lengths, hidden, saved, L, H: tl.constexpr):
    """One recurrence per program: program 0 runs forwards over all places, program b + 1 backwards from item b's end.

    gates [2, L, 3H]; weight_t [2, H, 3H] (input unit, gate unit); bias [2, 3H] -> hidden [1 + B, L, H] and, for the
    gradient, saved [1 + B, L, 4, H]: r, z, n and the candidate's recurrent part. The weights stay in registers. The
    next place's gates are asked for before this place's are used, because memory is slower than a step.
    """
    chain = tl.program_id(0)
    back = (chain > 0).to(tl.int32)
    count = tl.minimum(tl.load(lengths + chain), L)
    place = back * (count - 1)
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
    g_r = tl.load(gates + place * (3 * H), mask=some, other=0.0)
    g_z = tl.load(gates + place * (3 * H) + H, mask=some, other=0.0)
    g_n = tl.load(gates + place * (3 * H) + 2 * H, mask=some, other=0.0)
    h = tl.zeros((H,), dtype=tl.float32)
    for step in range(0, count):
        ahead = place + stride
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
        tl.store(hidden + place * H, h)
        tl.store(saved + place * (4 * H), r)
        tl.store(saved + place * (4 * H) + H, z)
        tl.store(saved + place * (4 * H) + 2 * H, n)
        tl.store(saved + place * (4 * H) + 3 * H, a)
        g_r, g_z, g_n = next_r, next_z, next_n
        place = ahead


@triton.jit
def gru_backward(weight, lengths, hidden, saved, d_hidden, d_gates, L, H: tl.constexpr):
    """The same chains walked from their ends: only what depends on the step before is done here.

    weight [2, 3H, H]; d_hidden [1 + B, L, H] -> d_gates [1 + B, L, 4, H]: the gradients of r, z and n before their
    squashing, and of the candidate's recurrent part. Sums over places and items are matrix products, done by torch.
    """
    chain = tl.program_id(0)
    back = (chain > 0).to(tl.int32)
    count = tl.minimum(tl.load(lengths + chain), L)
    place = (1 - back) * (count - 1)
    stride = 2 * back - 1
    unit = tl.arange(0, H)
    tile = weight + back * (3 * H * H) + unit[:, None] * H + unit[None, :]
    w_r, w_z, w_n = tl.load(tile), tl.load(tile + H * H), tl.load(tile + 2 * H * H)
    hidden += chain.to(tl.int64) * L * H + unit
    d_hidden += chain.to(tl.int64) * L * H + unit
    saved += chain.to(tl.int64) * L * (4 * H) + unit
    d_gates += chain.to(tl.int64) * L * (4 * H) + unit
    some = unit < count * H  # all units or none: the interpreter takes no single flag for a mask
    r = tl.load(saved + place * (4 * H), mask=some, other=0.0)
    z = tl.load(saved + place * (4 * H) + H, mask=some, other=0.0)
    n = tl.load(saved + place * (4 * H) + 2 * H, mask=some, other=0.0)
    a = tl.load(saved + place * (4 * H) + 3 * H, mask=some, other=0.0)
    before = tl.load(hidden + (place + stride) * H, mask=unit < (count - 1) * H, other=0.0)
    d_out = tl.load(d_hidden + place * H, mask=some, other=0.0)
    carry = tl.zeros((H,), dtype=tl.float32)
    for step in range(0, count):
        ahead = place + stride
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
        tl.store(d_gates + place * (4 * H), d_r)
        tl.store(d_gates + place * (4 * H) + H, d_z)
        tl.store(d_gates + place * (4 * H) + 2 * H, d_n)
        tl.store(d_gates + place * (4 * H) + 3 * H, d_a)
        r, z, n, a, before, d_out = next_r, next_z, next_n, next_a, next_before, next_out
        place = ahead


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
    """Rank every value of a tile among its channel's real tokens by counting, and put it in its place.

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
    own = tl.load(keys + row[:, None] * padded_d + column[None, :])
    count = tl.zeros((ROWS, COLUMNS), dtype=tl.uint32)
    for first in range(0, start, UNROLL):
        for step in tl.static_range(UNROLL):
            other = tl.load(keys + (first + step) * padded_d + column)
            count += (other[None, :] - own).to(tl.uint32, bitcast=True) >> 31
    count = start.to(tl.uint32) - count
    for j in range(start, start + ROWS):
        other = tl.load(keys + j * padded_d + column)
        wins_ties = (row > j).to(tl.uint32)[:, None]
        count += ((own - other[None, :]).to(tl.uint32, bitcast=True) - wins_ties) >> 31
    for first in range(start + ROWS, L, UNROLL):
        for step in tl.static_range(UNROLL):
            other = tl.load(keys + (first + step) * padded_d + column)
            count += (own - other[None, :]).to(tl.uint32, bitcast=True) >> 31
    place = count.to(tl.int32)
    inside = (row < L)[:, None] & (column < D)[None, :]
    real = (tl.load(mask + item * L + row, mask=row < L, other=0) != 0)[:, None]
    base = item * L * D
    at = base + row[:, None] * D + column[None, :]
    tl.store(rank + at, tl.where(real, place, -1).to(tl.int16), mask=inside)
    x = tl.load(values + at, mask=inside, other=0.0)
    tl.store(ranked + base + place * D + column[None, :], x, mask=inside & real)


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
    place = tl.load(rank + at, mask=inside, other=-1).to(tl.int32)
    weight = tl.load(weights + item * L + place, mask=place >= 0, other=0.0)
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
