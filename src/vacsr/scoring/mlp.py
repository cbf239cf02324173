"""Scores of every pair by any small network on v⊙t, with gradients, at the memory of the scores and one strip."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vacsr.adapter import FoldedAdapter, FoldedScore
from vacsr.errors import ShapeMismatch
from vacsr.methods.base import Embedding, Method
from vacsr.scoring.kernel import KernelScorer, available, fits
from vacsr.strips import add_gradients


def pair_scores(v: Tensor, t: Tensor, mlp: nn.Module, *, strip: int = 1 << 15) -> Tensor:
    """mlp(v_i ⊙ t_j) of every pair, differentiable with respect to v, t and the weights. [R, d], [C, d] -> [R, C]

    ``mlp`` maps [..., d] to [..., 1], the same at every call: no dropout. In half precision on a GPU with Triton the
    scoring kernel computes two layers (``Sequential(Linear, ReLU, Linear)``), or three of which the second has at most
    128 units. All else, and every gradient, is computed in strips of whole rows with about ``strip`` pairs, by ``mlp``
    itself; the gradient is that of ``mlp`` in the same precision. That is autocast's, or else that of ``v``; half
    precision needs no half-precision weights. Scores are float32, or float64 where ``v`` is.

    >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    >>> v, t = torch.randn(3, 8), torch.randn(5, 8)
    >>> scores = pair_scores(v, t, mlp)
    >>> torch.allclose(scores[2, 4], mlp(v[2] * t[4]), atol=1e-6)
    True
    """
    if v.ndim != 2 or t.ndim != 2 or v.shape[1] != t.shape[1]:
        shapes = f"{list(v.shape)} and {list(t.shape)}"
        raise ShapeMismatch(f"pair_scores takes rows of one width, not {shapes} — pass [R, d] and [C, d]")
    kind, dtype = v.device.type, v.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    params = [p for p in mlp.parameters() if p.requires_grad]
    scores: Tensor = _PairScores.apply(v, t, mlp, dtype, strip, *params)  # type: ignore[no-untyped-call]
    return scores


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: Tensor, t: Tensor, mlp: nn.Module, dtype: torch.dtype, strip: int, *params: Tensor
    ) -> Tensor:
        ctx.save_for_backward(v, t, *params)
        ctx.mlp, ctx.dtype, ctx.rows = mlp, dtype, max(1, strip // max(1, len(t)))
        folded = folded_mlp(mlp) if dtype.itemsize == 2 and available(v.device) else None
        if folded is not None and fits(folded):
            scorer = KernelScorer(cast(Method, mlp), dtype=dtype, folded=folded)  # folded, it is asked nothing else
            return scorer.block(Embedding(v.float()), Embedding(t.float()))
        out = v.new_empty(len(v), len(t), dtype=torch.promote_types(dtype, torch.float32))
        for start in range(0, len(v), ctx.rows):
            rows = slice(start, start + ctx.rows)
            out[rows] = _strip(mlp, v[rows], t, dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, t, *params = whole = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[5:]]
        sums = [torch.zeros_like(x) if needed else None for x, needed in zip(whole, wanted, strict=True)]
        texts = t.detach().requires_grad_(wanted[1])
        for start in range(0, len(v), ctx.rows):
            rows = slice(start, start + ctx.rows)
            images = v[rows].detach().requires_grad_(wanted[0])
            with torch.enable_grad():
                out = _strip(ctx.mlp, images, texts, ctx.dtype)
            push, leaves = grad[rows].to(out.dtype), [images, texts, *params]
            add_gradients(sums, out, leaves, whole=whole, rows=rows, split=1, push=push)
        return (*sums[:2], None, None, None, *sums[2:])


def _strip(mlp: nn.Module, v: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Every pair's score in ``dtype``, the texts in the slow dimension. [r, d], [C, d] -> [r, C]"""
    with torch.autocast(v.device.type, dtype, enabled=dtype.itemsize == 2):
        scores: Tensor = mlp(v.unsqueeze(0) * t.unsqueeze(1))
    if scores.shape[-1] != 1:
        raise ShapeMismatch(f"the network gives {scores.shape[-1]} numbers of a pair, not one score — add a layer")
    return scores.squeeze(-1).T


def folded_mlp(mlp: nn.Module) -> FoldedScore | None:
    """A network of two or three linear layers with ReLU between, as the kernel takes it; None for any other."""
    if type(mlp) is not nn.Sequential or any(x._forward_hooks or x._forward_pre_hooks for x in mlp.modules()):
        return None
    kinds, linear = [type(layer) for layer in mlp], [layer for layer in mlp if isinstance(layer, nn.Linear)]
    if kinds not in ([nn.Linear, nn.ReLU, nn.Linear], [nn.Linear, nn.ReLU] * 2 + [nn.Linear]):  # no subclasses
        return None
    if linear[-1].out_features != 1:
        return None
    biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in linear]
    (trunk, small), last = (layer.weight.detach().float() for layer in linear[:2]), linear[2:]
    return FoldedScore((FoldedAdapter(
        trunk, biases[0].detach().float(), small, biases[1].detach().float(),
        last=last[0].weight[0].detach().float() if last else None,
        last_bias=float(biases[2]) if last else 0.0, residual=None,
    ),))  # fmt: skip
