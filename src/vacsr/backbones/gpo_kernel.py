"""GPO pooling's two slow parts as Triton kernels: the recurrence over ranks, and the weighted sum of sorted values.

The recurrence is short of work and long of waiting: each step needs the one before, and a library call starts several
kernels for it. Here every direction and item is one program that keeps the weights in registers from end to end.
Sorting is replaced by counting: a value's rank is how many beat it, L² comparisons that need no exchange of data.

Both are opaque to `torch.compile` (custom operators with their own gradients), wait for nothing on the host and can be
held by a CUDA graph. `available` says where they run; elsewhere use `pooling`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vacsr.errors import ShapeMismatch, UsageError
from vacsr.operators import Operator, current, need_kernels, register
from vacsr.operators import available as available

_TILE = (32, 64)  # tokens × channels of one program: 16 values per thread, few idle rows at 257 tokens
_LONGEST = 32_767  # ranks are kept as int16


class GruStates(NamedTuple):
    """Hidden states of both directions."""

    forward: Tensor
    """[L, H]: the same for every item, since a prefix does not know how long the item is."""
    backward: Tensor
    """[B, L, H]: from each item's own last place; 0 beyond it."""


def gru_states(gru: nn.Module, places: Tensor, *, lengths: Tensor) -> GruStates:
    """Both directions of a one-layer GRU over the same places for all items. [L, F], [B] -> states

    ``gru`` is a bidirectional nn.GRU, or any module that holds its eight parameters under the same names: Dynamo
    refuses to look into an nn.GRU, and takes the other.
    """
    if not hasattr(gru, "bias_hh_l0_reverse") or hasattr(gru, "weight_ih_l1"):
        raise UsageError(f"{gru} is not a one-layer bidirectional GRU with biases — use vacsr.backbones.pooling")
    w_ih, w_hh, b_ih, b_hh = (
        torch.stack([getattr(gru, f"{name}_l0"), getattr(gru, f"{name}_l0_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    with torch.autocast(places.device.type, enabled=False):
        gates = torch.baddbmm(b_ih.unsqueeze(1), places.float().expand(2, -1, -1), w_ih.transpose(1, 2))
    return bigru(gates, lengths, weight=w_hh, bias=b_hh)


def bigru(gates: Tensor, lengths: Tensor, *, weight: Tensor, bias: Tensor) -> GruStates:
    """The recurrence alone: gates [2, L, 3H] = W_ih·x + b_ih per direction (r, z, n), lengths [B]; float32 throughout.

    weight [2, 3H, H] and bias [2, 3H] are torch's ``weight_hh`` and ``bias_hh`` of both directions.
    """
    width = weight.shape[-1]
    expected = (2, 3 * width)
    if (gates.shape[0], gates.shape[-1]) != expected or weight.shape[:2] != expected or bias.shape != expected:
        raise ShapeMismatch(
            f"gates {list(gates.shape)}, weight {list(weight.shape)}, bias {list(bias.shape)}: expected [2, L, 3H], "
            "[2, 3H, H], [2, 3H] — stack the two directions"
        )
    if width < 16 or width & (width - 1):
        raise UsageError(f"the kernel needs a power of two from 16 up as hidden size, not {width} — use nn.GRU")
    hidden, _ = torch.ops.vacsr.bigru(gates.float(), lengths, weight.float(), bias.float())
    return GruStates(hidden[0], hidden[1:])


def ranked_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Σ_r weights[b, r] · (r-th largest real value of channel c). [B, L, D], [B, L], [B, L] -> [B, D] float32

    Ties go to the earlier token. Weights past an item's number of real tokens count for nothing.
    """
    if mask.shape != values.shape[:2] or weights.shape != mask.shape:
        raise ShapeMismatch(
            f"values {list(values.shape)}, mask {list(mask.shape)}, weights {list(weights.shape)}: expected [B, L, D], "
            "[B, L], [B, L] — pass one mask entry and one weight per token"
        )
    if values.shape[1] > _LONGEST:
        raise UsageError(f"{values.shape[1]} tokens, at most {_LONGEST} can be ranked — use pooling.ranked_sum")
    out: Tensor = torch.ops.vacsr.ranked_sum(values, mask, weights.float())[0]
    return out


def _kernels(device: torch.device) -> ModuleType:
    """Imported at first use: this module must load where Triton is absent."""
    need_kernels(device, what="GPO", otherwise="use vacsr.backbones.pooling, which runs anywhere")
    from vacsr.backbones import gpo_triton

    return gpo_triton


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


# --- the recurrence


def _bigru(gates: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """-> hidden [1 + B, L, H] (chain 0 runs forwards) and what the gradient needs, [1 + B, L, 4, H]."""
    length, width = gates.shape[1], weight.shape[-1]
    hidden = gates.new_zeros(1 + len(lengths), length, width)
    saved = gates.new_zeros(1 + len(lengths), length, 4, width)
    turned = weight.transpose(1, 2).contiguous()
    with current(gates.device):
        _kernels(gates.device).gru_forward[(len(hidden),)](
            gates.contiguous(), turned, bias.contiguous(), _chains(lengths, length), hidden, saved, length,
            H=width, num_warps=1,
        )  # fmt: skip
    return hidden, saved


def _bigru_backward(
    hidden: Tensor, saved: Tensor, lengths: Tensor, weight: Tensor, d_hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of gates [2, L, 3H], weight [2, 3H, H] and bias [2, 3H]."""
    length, width = hidden.shape[1:]
    parts = torch.zeros_like(saved)
    with current(hidden.device):
        _kernels(hidden.device).gru_backward[(len(hidden),)](
            weight.contiguous(), _chains(lengths, length), hidden, saved, d_hidden.contiguous(), parts, length,
            H=width, num_warps=1,
        )  # fmt: skip
    d_gates = torch.stack((parts[0, :, :3], parts[1:, :, :3].sum(0))).flatten(2)
    recurrent = torch.cat((parts[:, :, :2], parts[:, :, 3:]), dim=2).flatten(2)  # [1 + B, L, 3H]
    d_bias = torch.stack((recurrent[0].sum(0), recurrent[1:].sum((0, 1))))
    with torch.autocast(hidden.device.type, enabled=False):
        ahead = recurrent[0, 1:].T @ hidden[0, :-1]  # the state before a place, seen from that place
        behind = recurrent[1:, :-1].flatten(0, 1).T @ hidden[1:, 1:].flatten(0, 1)
    return d_gates, torch.stack((ahead, behind)), d_bias


def _chains(lengths: Tensor, length: int) -> Tensor:
    """Steps of every chain: all places forwards, then each item's own number backwards. [B] -> [1 + B] int32"""
    return torch.cat((lengths.new_full((1,), length), lengths)).to(torch.int32)


def _bigru_fake(gates: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = (1 + lengths.shape[0], gates.shape[1], weight.shape[-1])
    return gates.new_empty(shape), gates.new_empty((*shape[:2], 4, shape[2]))


def _bigru_backward_fake(
    hidden: Tensor, saved: Tensor, lengths: Tensor, weight: Tensor, d_hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    length, width = hidden.shape[1:]
    d_gates, d_bias = hidden.new_empty((2, length, 3 * width)), hidden.new_empty((2, 3 * width))
    return d_gates, weight.new_empty(weight.shape), d_bias


def _bigru_keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, lengths, weight, _ = inputs
    ctx.save_for_backward(*output, lengths, weight)
    ctx.set_materialize_grads(False)


def _bigru_gradient(ctx: Any, d_hidden: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_hidden is None:
        return None, None, None, None
    d_gates, d_weight, d_bias = torch.ops.vacsr.bigru_backward(*ctx.saved_tensors, d_hidden)
    return d_gates, None, d_weight, d_bias


register(
    "bigru",
    Operator(_bigru, _bigru_fake, "(Tensor gates, Tensor lengths, Tensor weight, Tensor bias) -> (Tensor, Tensor)"),
    backward=Operator(
        _bigru_backward,
        _bigru_backward_fake,
        "(Tensor hidden, Tensor saved, Tensor lengths, Tensor weight, Tensor d_hidden) -> (Tensor, Tensor, Tensor)",
    ),
    keep=_bigru_keep,
    gradient=_bigru_gradient,
)


# --- the weighted sum of ranked values


def _ranked_sum(values: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> out [B, D] float32, rank int16 [B, L, D], ranked [B, L, D]."""
    items, length, channels = values.shape
    values, mask, weights = values.contiguous(), mask.to(torch.uint8).contiguous(), weights.contiguous()
    out = values.new_empty((items, channels), dtype=torch.float32)
    rank, ranked = torch.empty_like(values, dtype=torch.int16), torch.empty_like(values)
    if not values.numel():
        return out.zero_(), rank, ranked
    down, across = _blocks(length, _TILE[0]), _blocks(channels, _TILE[1])
    keys = values.new_empty((items, down * _TILE[0], across * _TILE[1]), dtype=torch.float32)
    kernels, tile = _kernels(mask.device), {"ROWS": _TILE[0], "COLUMNS": _TILE[1], "num_warps": 4}
    with current(values.device):
        kernels.order_keys[down, across, items](values, mask, keys, length, channels, *keys.shape[1:], **tile)
        kernels.rank_values[down, across, items](
            values, mask, keys, rank, ranked, length, channels, *keys.shape[1:], UNROLL=4, **tile
        )
        counts = mask.sum(1, dtype=torch.int32)
        kernels.weigh_ranks[across, items](ranked, weights, counts, out, length, channels, **tile)
    return out, rank, ranked


def _ranked_sum_backward(
    rank: Tensor, ranked: Tensor, mask: Tensor, weights: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """-> gradients of values [B, L, D] and weights [B, L]."""
    items, length, channels = ranked.shape
    d_values, d_weights = torch.empty_like(ranked), weights.new_empty(weights.shape)
    if not ranked.numel():
        return d_values, d_weights.zero_()
    weights, d_out, counts = weights.contiguous(), d_out.contiguous(), mask.sum(1, dtype=torch.int32)
    down, across = _blocks(length, _TILE[0]), _blocks(channels, _TILE[1])
    kernels, tile = _kernels(mask.device), {"ROWS": _TILE[0], "COLUMNS": _TILE[1], "num_warps": 4}
    with current(ranked.device):
        kernels.values_gradient[down, across, items](rank, weights, d_out, d_values, length, channels, **tile)
        kernels.weights_gradient[down, items](ranked, counts, d_out, d_weights, length, channels, **tile)
    return d_values, d_weights


def _ranked_sum_fake(values: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = values.new_empty((values.shape[0], values.shape[2]), dtype=torch.float32)
    return out, values.new_empty(values.shape, dtype=torch.int16), values.new_empty(values.shape)


def _ranked_sum_backward_fake(
    rank: Tensor, ranked: Tensor, mask: Tensor, weights: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    return ranked.new_empty(ranked.shape), weights.new_empty(weights.shape)


def _ranked_sum_keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[2], *inputs[1:])
    ctx.set_materialize_grads(False)


def _ranked_sum_gradient(ctx: Any, d_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return None, None, None
    d_values, d_weights = torch.ops.vacsr.ranked_sum_backward(*ctx.saved_tensors, d_out)
    return d_values, None, d_weights


register(
    "ranked_sum",
    Operator(_ranked_sum, _ranked_sum_fake, "(Tensor values, Tensor mask, Tensor weights) -> (Tensor, Tensor, Tensor)"),
    backward=Operator(
        _ranked_sum_backward,
        _ranked_sum_backward_fake,
        "(Tensor rank, Tensor ranked, Tensor mask, Tensor weights, Tensor d_out) -> (Tensor, Tensor)",
    ),
    keep=_ranked_sum_keep,
    gradient=_ranked_sum_gradient,
)
