"""What lies between the heads' matrix product and the decoder as one Triton kernel forward and one backward.

Written with torch it is a dozen passes over [pairs, K, D] float32 numbers, and noise that has to be stored. Here a
pair's means and log-variances are read once, in the precision in which the product left them; the noise is drawn where
it is used, the same numbers that :meth:`PairNoise.normal` has; only z is written. The gradient draws them again.

L_σ needs the decoded logit, which comes after z; but it is linear in the error e: Σ_D e/(2v) + ½·log v is e times one
sum plus another, and these two are what a pair keeps of its variances.

The operator is opaque to `torch.compile`, waits for nothing on the host and can be held by a CUDA graph.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vacsr.adapter import AdapterConfig
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.operators import Operator, current, interpreted, need_kernels, register
from vacsr.operators import available as available

if TYPE_CHECKING:
    from vacsr.objective import ObjectiveConfig

_MOST, _WIDEST = 4, 8192  # components are unrolled; all of z is held by one program
_PER_WARP = 256  # numbers: 8 a thread, a 16-byte read in half precision
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


class PairLatents(NamedTuple):
    """What is kept of N pairs."""

    z: Tensor  # [N, D] in the heads' precision
    kl: Tensor  # [N, K] each component's KL to N(0, I), float32
    inverse: Tensor  # [N] Σ_D 1/(2v), float32
    log_variance: Tensor  # [N] Σ_D ½·log v, float32


class Reading(NamedTuple):
    """How the heads' numbers are to be read."""

    clamp: float  # logσ² lies within ± this
    bounded: bool  # σ² is in (0, 1) already, and v = σ²
    squash: bool  # v = sigmoid(logσ²), not its exponential

    @classmethod
    def of(cls, adapter: AdapterConfig, objective: ObjectiveConfig) -> Reading:
        """As the two configurations have it."""
        bounded = adapter.variance == "sigmoid"
        squash = objective.sigma_variance == "sigmoid" and not bounded
        return cls(adapter.log_var_clamp, bounded, squash)


def runs(hidden: Tensor, adapter: AdapterConfig, *, objective: ObjectiveConfig, latent: int) -> bool:
    """Are the kernels asked for, and can they do it, for heads of this trunk output?"""
    if objective.fused is False:
        return False
    can = adapter.components <= _MOST and latent <= _WIDEST and hidden.dtype in _KINDS
    if objective.fused is True and not can:
        raise UsageError(
            f"method.objective.fused=true with components={adapter.components}, z of {latent} numbers in "
            f"{hidden.dtype}: the kernels take at most {_MOST} components, {_WIDEST} numbers and float32 or half "
            "precision — set method.objective.fused=auto"
        )
    return can and (objective.fused is True or available(hidden.device))


def pair_latents(
    heads: Tensor, weights: Tensor, *, sigma_weights: Tensor, keys: Tensor, reading: Reading
) -> PairLatents:
    """Draw z for every pair, with what the losses need of its distribution.

    heads [N, 2·K·D]: means, then log-variances as the heads gave them; weights [N, K] mix z, sigma_weights [N, K] mix
    logσ² into v; keys [N]: where each pair's normal draws begin.
    """
    pairs, components = weights.shape
    if len(heads) != pairs or heads.shape[1] % (2 * components) or sigma_weights.shape != weights.shape:
        raise ShapeMismatch(
            f"heads {list(heads.shape)}, weights {list(weights.shape)}, sigma_weights {list(sigma_weights.shape)}: "
            "expected [N, 2·K·D], [N, K], [N, K] — flatten the pairs first"
        )
    if keys.shape != (pairs,):
        raise ShapeMismatch(f"keys {list(keys.shape)}: expected one for each of {pairs} pairs — flatten them first")
    found = torch.ops.vacsr.pair_latents(heads, weights.float(), sigma_weights.float(), keys, *reading)
    return PairLatents(*found)


def _kernels(device: torch.device) -> ModuleType:
    """Imported at first use: this module must load where Triton is absent."""
    need_kernels(device, what="fused", otherwise="set method.objective.fused=auto")
    from vacsr import fused_triton

    return fused_triton


def _sizes(heads: Tensor, weights: Tensor, reading: Reading) -> dict[str, int | bool]:
    """What the kernels are compiled for."""
    components = weights.shape[1]
    latent = heads.shape[1] // (2 * components)
    block = max(32, 1 << (latent - 1).bit_length())
    return {
        "K": components, "D": latent, "BLOCK": block, "BOUNDED": reading.bounded, "SQUASH": reading.squash,
        "FAST": heads.is_cuda and not interpreted(),
        "num_warps": min(8, max(1, block // _PER_WARP)),
    }  # fmt: skip


def _forward(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor, *reading: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    read, out = Reading(*reading), _forward_fake(heads, weights, sigma_weights, keys, *reading)
    inputs = [x.contiguous() for x in (heads, weights, sigma_weights, keys)]
    if len(heads):
        with current(heads.device):
            _kernels(heads.device).draw_latents[(len(heads),)](
                *inputs, *out, read.clamp, **_sizes(heads, weights, read)
            )
    return out


def _backward(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor,
    d_z: Tensor, d_kl: Tensor, d_inverse: Tensor, d_log_variance: Tensor, *reading: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    read, inputs = Reading(*reading), (heads, weights, sigma_weights, keys, d_z, d_kl, d_inverse, d_log_variance)
    out = _backward_fake(*inputs, *reading)
    if len(heads):
        with current(heads.device):
            _kernels(heads.device).latents_gradient[(len(heads),)](
                *(x.contiguous() for x in inputs), *out, read.clamp, **_sizes(heads, weights, read)
            )
    return out


def _forward_fake(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor, *reading: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, components = weights.shape
    z = heads.new_empty(pairs, heads.shape[1] // (2 * components))
    return z, weights.new_empty(pairs, components), weights.new_empty(pairs), weights.new_empty(pairs)


def _backward_fake(
    heads: Tensor, weights: Tensor, sigma_weights: Tensor, keys: Tensor,
    d_z: Tensor, d_kl: Tensor, d_inverse: Tensor, d_log_variance: Tensor, *reading: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return heads.new_empty(heads.shape), weights.new_empty(weights.shape), weights.new_empty(weights.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.reading = inputs[4:]


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.vacsr.pair_latents_backward(*ctx.saved_tensors, *grads, *ctx.reading)
    return (*found, None, *(None for _ in ctx.reading))


_INPUTS = "Tensor heads, Tensor weights, Tensor sigma_weights, Tensor keys"
_GRADS = "Tensor d_z, Tensor d_kl, Tensor d_inverse, Tensor d_log_variance"
_READING = "float clamp, bool bounded, bool squash"
register(
    "pair_latents",
    Operator(_forward, _forward_fake, f"({_INPUTS}, {_READING}) -> (Tensor, Tensor, Tensor, Tensor)"),
    backward=Operator(_backward, _backward_fake, f"({_INPUTS}, {_GRADS}, {_READING}) -> (Tensor, Tensor, Tensor)"),
    keep=_keep,
    gradient=_gradient,
)
