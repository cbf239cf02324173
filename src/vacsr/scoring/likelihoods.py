"""Which likelihood of the labels a cosine method's loss stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.sigmoid import Sigmoid
from vacsr.scoring.curvature import Likelihood

_SCALES = torch.logspace(0.0, 2.5, 101).tolist()


class LabelledCosines(NamedTuple):
    """A batch's cosines and which of its pairs are labelled a match. [B, B] each"""

    cosine: Tensor
    match: Tensor


def check_cosine(method: Method, *, dim: int, device: torch.device) -> None:
    """Raise unless the method scores pairs by the cosine of their embeddings, which a probe of it shows."""
    generator = torch.Generator().manual_seed(0)
    v, t = (functional.normalize(torch.randn(3, dim, generator=generator), dim=1).to(device) for _ in range(2))
    with torch.no_grad():
        found = method.score(Embedding(v, torch.zeros_like(v)), Embedding(t, torch.zeros_like(t)))
    if not torch.allclose(found.float(), v @ t.T, atol=1e-5):
        message = f"{type(method).__name__} does not score by a cosine, which post-hoc uncertainty needs"
        raise UsageError(f"{message} — use a method such as infonce or sigmoid, or set evaluate.posthoc=none")


def likelihood_of(method: Method, batches: Sequence[LabelledCosines]) -> Likelihood:
    """The loss's own where it is one; a hinge has no curvature, so it gets the softmax that fits ``batches`` best."""
    if isinstance(method, InfoNCE):
        return Likelihood("softmax", float(method.log_scale.detach().exp()))
    if isinstance(method, Sigmoid):
        scale, bias = method.affine.detach().tolist()
        return Likelihood("logistic", scale, bias)
    return Likelihood("softmax", min(_SCALES, key=lambda scale: sum(_loss(batch, scale) for batch in batches)))


def _loss(batch: LabelledCosines, scale: float) -> float:
    """−Σ log of the labels' share in the softmax over rows and in that over columns. [B, B] -> float"""
    total = 0.0
    for dim in (0, 1):
        share = batch.match / batch.match.sum(dim=dim, keepdim=True)
        total -= float((share * torch.log_softmax(scale * batch.cosine, dim=dim)).sum())
    return total
