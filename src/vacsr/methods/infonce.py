"""InfoNCE: cross entropy of exp(log_scale)·cos over rows and over columns, averaged (CLIP's loss)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.methods.base import Embedding, Likelihood, Method, MethodConfig, register
from vacsr.objective import LossTerms, PairBlock, cosines


class InfoNCEConfig(MethodConfig):
    """Two-way cross entropy over scaled cosines (CLIP)."""

    name: Literal["infonce"] = "infonce"
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, 1/0.07; the paper's preset starts at 1."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    positives: Literal["diagonal", "ids"] = "diagonal"
    """CLIP's target is the row's own caption; `ids` spreads it over all captions of the image."""


@register("infonce", InfoNCEConfig, presets={"paper": {"scale": 1.0}})
class InfoNCE(Method):
    """Score = cosine. No grade: a softmax gives one pair no probability of its own.

    The softmax over columns needs the whole batch, so blocks of rows are not allowed.
    """

    config: InfoNCEConfig

    def __init__(self, config: InfoNCEConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.scale)), config.learnable)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        relevance = (pairs if self.config.positives == "ids" else pairs.diagonal()).relevance
        logit = self.log_scale.exp() * cosines(v.mean, t.mean)
        rows, cols = cross_entropy(logit, relevance).mean(), cross_entropy(logit.T, relevance.T).mean()
        return LossTerms(0.5 * (rows + cols), {"i2t": rows.detach(), "t2i": cols.detach()})

    def likelihood(self) -> Likelihood:
        return Likelihood("softmax", float(self.log_scale.detach().exp()))


def cross_entropy(logit: Tensor, relevance: Tensor) -> Tensor:
    """−Σ_j y_ij log softmax(logit_i)_j with y spread evenly over the row's positives. [..., R, C] -> [..., R]"""
    share = relevance / relevance.sum(dim=-1, keepdim=True)
    return -(share * torch.log_softmax(logit, dim=-1)).sum(dim=-1)
