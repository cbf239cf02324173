"""Small VACSR losses in which every term shows, run with their gradients and compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.adapter import AdapterConfig
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.objective import LossTerms, ObjectiveConfig, batch_block
from vacsr.strips import PairLoss

Fields = dict[str, Any]


def make_vacsr(adapter: Fields, objective: Fields, *, dim: int) -> Vacsr:
    """Parameters and weights of the terms are far from 0, so that every term shows in every gradient."""
    plain = {"kl_weight": 0.37, "sigma_weight": 0.6, "negative_weight": 1.7, "correction": 0.2, "cosine_weight": 0.3}
    config = VacsrConfig(adapter=AdapterConfig(**adapter), objective=ObjectiveConfig(**{**plain, **objective}))
    method, generator = Vacsr(config, dim=dim), torch.Generator().manual_seed(dim)
    with torch.no_grad():
        for p in method.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    return method


def sides(
    count: int, dim: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", variance: bool = False
) -> tuple[Embedding, Embedding]:
    """Images and texts, as leaves."""
    x = torch.randn(4, count, dim, generator=torch.Generator().manual_seed(count), dtype=dtype).to(device)
    v, t = functional.normalize(x[:2], dim=-1)
    spread = [(y - 1).requires_grad_() if variance else None for y in x[2:]]
    return Embedding(v.requires_grad_(), spread[0]), Embedding(t.requires_grad_(), spread[1])


def leaves(method: nn.Module, v: Embedding, t: Embedding) -> list[Tensor]:
    """What learns."""
    return [x for x in (*method.parameters(), *v, *t) if x is not None and x.requires_grad]


class Result(NamedTuple):
    terms: LossTerms
    grads: tuple[Tensor | None, ...]


def run_loss(
    loss: PairLoss, method: nn.Module, ids: Tensor, v: Embedding, t: Embedding, *, seed: Any = 2, step: Any = 5
) -> Result:
    """Loss and gradients of a step."""
    terms = loss(v, t, batch_block(ids, seed=seed, step=step))
    return Result(terms, torch.autograd.grad(terms.total, leaves(method, v, t), allow_unused=True))


def assert_same(result: Result, expected: Result, *, within: float) -> None:
    """Every term and gradient, relative to the largest entry of its tensor."""
    assert result.terms.parts.keys() == expected.terms.parts.keys()
    terms = [(result.terms.total, expected.terms.total)]
    terms += [(result.terms.parts[name], part) for name, part in expected.terms.parts.items()]
    for ours, theirs in [*terms, *zip(result.grads, expected.grads, strict=True)]:
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            assert float((ours - theirs).detach().abs().max()) <= within * max(1.0, float(theirs.detach().abs().max()))
