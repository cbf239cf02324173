"""Sigmoid loss: −Σ log σ(±(a·cos+b)) / B over all pairs, the paper's baseline (SigLIP's loss)."""

from typing import Literal

import torch
from torch import Tensor, nn

from vacsr.methods.base import Embedding, Likelihood, Method, RetrievalConfig, register
from vacsr.objective import LossTerms, PairBlock, cosines, reconstruction_error


class SigmoidConfig(RetrievalConfig):
    """Sigmoid loss on a·cos+b over all pairs (SigLIP)."""

    name: Literal["sigmoid"] = "sigmoid"
    scale: float = 10.0
    """a at the start."""
    bias: float = -10.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""


@register("sigmoid", SigmoidConfig, presets={"paper": {}})
class Sigmoid(Method):
    """Score = cosine. Every caption of the image is a positive, every other pair a negative."""

    config: SigmoidConfig
    pairwise = True
    soft_labels = True

    def __init__(self, config: SigmoidConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.affine = nn.Parameter(torch.tensor([config.scale, config.bias]), config.learnable)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        logit = self.affine[0] * cosines(v.mean, t.mean) + self.affine[1]
        target = pairs.relevance.to(logit.dtype) if pairs.targets is None else pairs.targets
        total = pairs.weigh(reconstruction_error(logit, target, kind="bce")).sum() / pairs.batch
        return LossTerms(total, {"bce": total.detach()})

    def grade(self, score: Tensor) -> Tensor:
        return torch.sigmoid(self.affine[0] * score + self.affine[1])  # the probability that the loss trains

    def likelihood(self) -> Likelihood:
        scale, bias = self.affine.detach().tolist()
        return Likelihood("logistic", scale, bias)
