"""InfoNCE: cross entropy of exp(log_scale)·cos over rows and over columns, averaged (CLIP's loss)."""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.methods.base import Embedding, Likelihood, Method, RetrievalConfig, register
from vacsr.objective import LossTerms, PairBlock, cosines


class InfoNCEConfig(RetrievalConfig):
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
    soft_labels = True

    def __init__(self, config: InfoNCEConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.scale)), config.learnable)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        labels = (pairs if self.config.positives == "ids" else pairs.diagonal()).relevance
        if pairs.targets is not None:
            labels = torch.where(pairs.relevance, labels.float(), pairs.targets)
        logit = self.log_scale.exp() * cosines(v.mean, t.mean)
        rows, cols = (pairs.weigh_rows(cross_entropy(x, y)).mean() for x, y in ((logit, labels), (logit.T, labels.T)))
        return LossTerms(0.5 * (rows + cols), {"i2t": rows.detach(), "t2i": cols.detach()})

    def opinion(self, score: Tensor) -> Tensor:
        """The mean of each caption's share among the captions and of each image's among the images."""
        logit = self.log_scale.exp() * score
        return 0.5 * (logit.softmax(dim=-1) + logit.softmax(dim=-2))

    def likelihood(self) -> Likelihood:
        return Likelihood("softmax", float(self.log_scale.detach().exp()))


def cross_entropy(logit: Tensor, relevance: Tensor) -> Tensor:
    """−Σ_j y_ij log softmax(logit_i)_j with y spread evenly over the row's positives. [..., R, C] -> [..., R]"""
    share = relevance / relevance.sum(dim=-1, keepdim=True)
    return -(share * torch.log_softmax(logit, dim=-1)).sum(dim=-1)
