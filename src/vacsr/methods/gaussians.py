"""Items as Gaussians N(μ, σ²) with diagonal covariance: what PCME and PCME++ share."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method, MethodConfig
from vacsr.pairwise import PairBlock


class GaussianConfig(MethodConfig):
    """Settings that PCME and PCME++ share."""

    scale: Annotated[float, Field(gt=0)] = 5.0
    """a at the start, of the logit b − a·distance."""
    shift: float = 5.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    vib_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL to N(0, I)."""
    log_var_start: float = -8.0
    """logσ² at the start is around this; the public code starts at 0, and short runs do not recover from that."""


class GaussianMethod(Method):
    """A logit b − a·distance with learned a and b; the uncertainty of a pair is Σσ²_v + Σσ²_t."""

    config: GaussianConfig

    def __init__(self, config: GaussianConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.log_var_start = config.log_var_start
        self.affine = nn.Parameter(torch.tensor([config.scale, config.shift]), config.learnable)

    def logit(self, distance: Tensor) -> Tensor:
        """b − a·distance. [...] -> [...]"""
        return self.affine[1] - self.affine[0] * distance

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """Σσ²_v + Σσ²_t of aligned pairs: either item may be vague. [N, d], [N, d] -> [N]"""
        return total_variance(v) + total_variance(t)


def log_variance(x: Embedding) -> Tensor:
    """logσ² of items that must have one. -> [N, d]"""
    if x.log_var is None:
        raise UsageError(
            "these embeddings have no variance, which this method compares — build the model with "
            "MatchingModel.build, which gives such methods their variance heads"
        )
    return x.log_var


def total_variance(x: Embedding) -> Tensor:
    """Σ_d σ² of each item. -> [N]"""
    return log_variance(x).exp().sum(dim=-1)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖² by one matrix product, never below 0 and never in half precision. [R, d], [C, d] -> [R, C]"""
    with torch.autocast(x.device.type, enabled=False):
        square = x.square().sum(dim=-1).unsqueeze(1) + y.square().sum(dim=-1)
        return (square - 2.0 * (x @ y.T)).clamp_min(0.0)


def kl_per_dimension(x: Embedding) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) / d = mean over d of −½(1 + logσ² − μ² − σ²). -> [N]"""
    log_var = log_variance(x)
    return -0.5 * (1.0 + log_var - x.mean.square() - log_var.exp()).mean(dim=-1)


def bottleneck(v: Embedding, t: Embedding, pairs: PairBlock) -> Tensor:
    """VIB_v + VIB_t, each the mean over the batch's items; a block of rows gives its share of both. -> 0-d

    A block holds every caption, so it counts them in proportion to its rows.
    """
    texts = kl_per_dimension(t).mean() * len(v.mean)
    return (kl_per_dimension(v).sum() + texts) / pairs.batch
