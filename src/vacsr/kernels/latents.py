# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
"""All between the matrix product of the adapter's heads and its decoder, as one kernel forward and one backward.

Written with torch it is a dozen passes over [pairs, K, D] float32 numbers, and noise that has to be stored. Here a
pair's means and log-variances are read once, in the precision of the product; the noise is drawn where it is used, the
same numbers as :meth:`vacsr.noise.PairNoise.normal`; only z is written. The gradient draws the noise again.

L_σ needs the decoded logit, which comes after z. But it is linear in the error e: Σ_D e/(2v) + ½·log v is e times one
sum plus another, and a pair keeps just these two sums of its variances.

A program has one pair and all D numbers of it: a sum over D needs no second pass, and every number of the heads is
fetched from memory once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from vacsr import kernels

PER_WARP = 256  # numbers of z: 8 per thread, a 16-byte read in half precision

# SplitMix64's constants, as in `noise`
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_HALF = tl.constexpr(2.0**-24)  # what `noise._unit` adds to its 23 bits


@triton.jit
def _exp(x, FAST: tl.constexpr):
    """FAST is the hardware's function; the interpreter has none."""
    return libdevice.fast_expf(x) if FAST else tl.exp(x)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """FAST errs by 2e-7 near 1, and relatively by as much elsewhere."""
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def _word(key, lane):
    """Output number ``lane`` + 1 of a key's SplitMix64 stream, as `noise._at` has it. int64, int32 -> uint64"""
    x = key.to(tl.uint64, bitcast=True) * _GAMMA + (lane + 1).to(tl.uint64) * _GAMMA
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _from_one(bits):
    """1 + bits/2^23 of 23 bits: they are its mantissa."""
    return (bits.to(tl.int32) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _two_normals(key, lane, FAST: tl.constexpr):
    """Both standard normal draws of a word, by Box–Muller: radius times cosine, and times sine.

    Half a turn is taken off the angle, so that it lies within ± π where the hardware's functions are good.
    """
    word = _word(key, lane)
    below = (2.0 - _from_one(word >> 41)) - _HALF  # 1 − u, exactly
    series = below * (1.0 + below * (0.5 + below * (1.0 / 3.0)))
    radius = tl.sqrt(2.0 * tl.where(below < 0.015625, series, -_log(1.0 - below, FAST)))
    angle = ((_from_one(word & 0x7FFFFF) - 1.5) + _HALF) * 6.283185307179586
    cosine = libdevice.fast_cosf(angle) if FAST else tl.cos(angle)
    sine = libdevice.fast_sinf(angle) if FAST else tl.sin(angle)
    return -radius * cosine, -radius * sine


@triton.jit
def _normal(key, lane, words, FAST: tl.constexpr):
    """The draws of any lanes: the first ``words`` are cosines, the others the sines of the same words."""
    second = lane >= words
    cosine, sine = _two_normals(key, tl.where(second, lane - words, lane), FAST)
    return tl.where(second, sine, cosine)


@triton.jit
def _beside(lane, numbers):
    """The same lanes, held by the threads that hold these numbers: else noise is passed through shared memory.

    What is added is 0, which the compiler sees only after it has laid out the work.
    """
    return lane + ((numbers.to(tl.int32, bitcast=True) & 1) >> 1)


@triton.jit
def _log_var(raw, clamp, BOUNDED: tl.constexpr, FAST: tl.constexpr):
    """What the heads' output means: logσ², clamped; BOUNDED: of a variance in (0, 1). NaN stays."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    log_var = tl.minimum(tl.maximum(raw, -clamp, propagate_nan=nan), clamp, propagate_nan=nan)
    if BOUNDED:  # log of the logistic function, for either sign without overflow
        log_var = tl.minimum(log_var, 0.0, propagate_nan=nan) - _log(1.0 + _exp(-tl.abs(log_var), FAST), FAST)
    return log_var


@triton.jit
def _component(heads, k, clamp, lane, K: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, FAST: tl.constexpr):
    """One component of a pair: its mean, what the second head gave, the logσ² it means, and σ."""
    inside = lane < D
    mean = tl.load(heads + k * D + lane, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(heads + (K + k) * D + lane, mask=inside, other=0.0).to(tl.float32)
    log_var = _log_var(raw, clamp, BOUNDED, FAST)
    return mean, raw, log_var, _exp(0.5 * log_var, FAST)


@triton.jit
def _add_component(
    total, mixed, k, noise, heads, weights, sigma_weights, kl, clamp, lane,
    K: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One component's share of z and of the mixed logσ²; its KL is written."""
    inside = lane < D
    mean, _, log_var, deviation = _component(heads, k, clamp, lane, K, D, BOUNDED, FAST)
    cost = 0.5 * (mean * mean + deviation * deviation - 1.0 - log_var)
    tl.store(kl + k, tl.sum(tl.where(inside, cost, 0.0)))
    total += tl.load(weights + k) * (mean + deviation * noise)
    return total, mixed + tl.load(sigma_weights + k) * log_var


@triton.jit
def draw_latents(
    heads, weights, sigma_weights, keys, z, kl, inverse, log_variance, clamp,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr, SQUASH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """z, the components' KL, and L_σ's two sums of a pair. heads [P, 2, K, D]; weights, sigma_weights [P, K]; keys [P]

    -> z [P, D]; kl [P, K]; inverse [P] = Σ_D 1/(2v); log_variance [P] = Σ_D ½·log v. With SQUASH v = sigmoid(m) of the
    mixed logσ² m, whose inverse is 1 + e^-m; else v = e^m.
    """
    pair = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    key = tl.load(keys + pair)
    heads += pair * (2 * K * D)
    weights, sigma_weights, kl = weights + pair * K, sigma_weights + pair * K, kl + pair * K
    draw_lane = _beside(lane, tl.load(heads + lane, mask=lane < D, other=0.0).to(tl.float32))
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.static_range(K if K % 2 else K // 2):
        if K % 2:
            noise = _normal(key, step * D + draw_lane, (K * D + 1) // 2, FAST)
        else:  # two components share their words
            noise, other = _two_normals(key, step * D + draw_lane, FAST)
            total, mixed = _add_component(
                total, mixed, step + K // 2, other, heads, weights, sigma_weights, kl, clamp, lane,
                K, D, BOUNDED, FAST,
            )  # fmt: skip
        total, mixed = _add_component(
            total, mixed, step, noise, heads, weights, sigma_weights, kl, clamp, lane, K, D, BOUNDED, FAST
        )
    inside = lane < D
    tl.store(z + pair * D + lane, total.to(z.dtype.element_ty), mask=inside)
    inverted = _exp(-mixed, FAST)
    if SQUASH:
        inverted += 1.0
        mixed = -_log(inverted, FAST)
    tl.store(inverse + pair, 0.5 * tl.sum(tl.where(inside, inverted, 0.0)))
    tl.store(log_variance + pair, 0.5 * tl.sum(tl.where(inside, mixed, 0.0)))


@triton.jit
def _component_gradient(
    k, noise, d_z, d_mixed, heads, weights, sigma_weights, d_kl, d_heads, d_weights, d_sigma_weights, clamp, lane,
    K: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Of one component's mean, log-variance and two weights."""
    inside = lane < D
    mean, raw, log_var, deviation = _component(heads, k, clamp, lane, K, D, BOUNDED, FAST)
    moved = deviation * noise
    variance = deviation * deviation
    tl.store(d_weights + k, tl.sum(d_z * (mean + moved)))
    tl.store(d_sigma_weights + k, tl.sum(d_mixed * log_var))
    push = tl.load(weights + k) * d_z
    cost = tl.load(d_kl + k)
    d_mean = push + cost * mean
    d_raw = 0.5 * (push * moved + cost * (variance - 1.0)) + tl.load(sigma_weights + k) * d_mixed
    if BOUNDED:
        d_raw *= 1.0 - variance
    d_raw = tl.where(tl.abs(raw) <= clamp, d_raw, 0.0)
    kind = d_heads.dtype.element_ty
    tl.store(d_heads + k * D + lane, d_mean.to(kind), mask=inside)
    tl.store(d_heads + (K + k) * D + lane, d_raw.to(kind), mask=inside)


@triton.jit
def latents_gradient(
    heads, weights, sigma_weights, keys, d_z, d_kl, d_inverse, d_log_variance, d_heads, d_weights, d_sigma_weights,
    clamp,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr, SQUASH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of :func:`draw_latents`, everything drawn and computed again. -> d_heads, d_weights, d_sigma_weights

    First the mixed logσ², which takes all components; their second look at logσ² finds it in the cache.
    """
    pair = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < D
    key = tl.load(keys + pair)
    heads, d_heads = heads + pair * (2 * K * D), d_heads + pair * (2 * K * D)
    weights, sigma_weights, d_kl = weights + pair * K, sigma_weights + pair * K, d_kl + pair * K
    d_weights, d_sigma_weights = d_weights + pair * K, d_sigma_weights + pair * K
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        raw = tl.load(heads + (K + k) * D + lane, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(sigma_weights + k) * _log_var(raw, clamp, BOUNDED, FAST)
    inverted = _exp(-mixed, FAST)
    d_inv, d_log = tl.load(d_inverse + pair), tl.load(d_log_variance + pair)
    if SQUASH:
        above = 1.0 + inverted
        share = libdevice.fast_dividef(d_log, above) if FAST else d_log / above
        d_mixed = 0.5 * inverted * (share - d_inv)
    else:
        d_mixed = 0.5 * (d_log - d_inv * inverted)
    d_mixed = tl.where(inside, d_mixed, 0.0)
    d_total = tl.load(d_z + pair * D + lane, mask=inside, other=0.0).to(tl.float32)
    draw_lane = _beside(lane, d_total)
    for step in tl.static_range(K if K % 2 else K // 2):
        if K % 2:
            noise = _normal(key, step * D + draw_lane, (K * D + 1) // 2, FAST)
        else:
            noise, other = _two_normals(key, step * D + draw_lane, FAST)
            _component_gradient(
                step + K // 2, other, d_total, d_mixed, heads, weights, sigma_weights, d_kl, d_heads, d_weights,
                d_sigma_weights, clamp, lane, K, D, BOUNDED, FAST,
            )  # fmt: skip
        _component_gradient(
            step, noise, d_total, d_mixed, heads, weights, sigma_weights, d_kl, d_heads, d_weights, d_sigma_weights,
            clamp, lane, K, D, BOUNDED, FAST,
        )  # fmt: skip


def pair_latents(
    heads: Tensor, weights: Tensor, *, sigma_weights: Tensor, keys: Tensor, clamp: float, bounded: bool, squash: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw z for every pair, with what the losses need of its distribution; differentiable.

    heads [N, 2·K·D]: means, then log-variances as the heads gave them, which are clamped to ± ``clamp``; weights [N, K]
    mix z, sigma_weights [N, K] mix logσ² into v; keys [N]: where the normal draws of each pair begin. ``bounded``: σ²
    is the sigmoid of the clamped number; ``squash``: v is the sigmoid of the mixed logσ², else its exponential.

    -> z [N, D] in the precision of the heads; float32: each component's KL to N(0, I) [N, K], Σ_D 1/(2v) [N],
    Σ_D ½·log v [N]
    """
    assert heads.shape[:1] == weights.shape[:1] == keys.shape, "the pairs are one dimension"
    assert weights.shape == sigma_weights.shape
    assert heads.shape[1] % (2 * weights.shape[1]) == 0
    z, kl, inverse, log_variance = _forward(heads, weights.float(), sigma_weights.float(), keys, clamp, bounded, squash)
    return z, kl, inverse, log_variance


def sizes(heads: Tensor, weights: Tensor, *, bounded: bool, squash: bool) -> dict[str, int | bool]:
    """What the kernels are compiled for."""
    components = weights.shape[1]
    latent = heads.shape[1] // (2 * components)
    block = max(32, 1 << (latent - 1).bit_length())
    return {
        "K": components, "D": latent, "BLOCK": block, "BOUNDED": bounded, "SQUASH": squash,
        "FAST": heads.is_cuda and not kernels.INTERPRETED, "num_warps": min(8, max(1, block // PER_WARP)),
    }  # fmt: skip


@torch.library.custom_op("vacsr::pair_latents", mutates_args=())
def _forward(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor, clamp: float, bounded: bool, squash: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _outputs(heads, weights)
    if len(heads):
        inputs = [x.contiguous() for x in (heads, weights, sigma_weights, keys)]
        with torch.cuda.device_of(heads):
            draw_latents[(len(heads),)](*inputs, *out, clamp, **sizes(heads, weights, bounded=bounded, squash=squash))
    return out


@_forward.register_fake
def _outputs(heads: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, components = weights.shape
    z = heads.new_empty(pairs, heads.shape[1] // (2 * components))
    return z, weights.new_empty(pairs, components), weights.new_empty(pairs), weights.new_empty(pairs)


@torch.library.custom_op("vacsr::pair_latents_backward", mutates_args=())
def _backward(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor,
    d_z: Tensor, d_kl: Tensor, d_inverse: Tensor, d_log_variance: Tensor, clamp: float, bounded: bool, squash: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out: tuple[Tensor, Tensor, Tensor] = _gradients(heads, weights)
    if len(heads):
        inputs = heads, weights, sigma_weights, keys, d_z, d_kl, d_inverse, d_log_variance
        with torch.cuda.device_of(heads):
            latents_gradient[(len(heads),)](
                *(x.contiguous() for x in inputs), *out, clamp, **sizes(heads, weights, bounded=bounded, squash=squash)
            )
    return out


@_backward.register_fake
def _gradients(heads: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads.new_empty(heads.shape), weights.new_empty(weights.shape), weights.new_empty(weights.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(*ctx.saved_tensors, *grads, *ctx.settings), None, None, None, None)


_forward.register_autograd(_gradient, setup_context=_save)
