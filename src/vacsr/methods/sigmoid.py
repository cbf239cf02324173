"""Sigmoid loss: −Σ log σ(±(a·cos+b)) / B over all pairs, the paper's baseline (SigLIP's loss)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vacsr.config import SigmoidConfig
from vacsr.methods.base import Embedding, ParamGroup, split_by_decay
from vacsr.objective import LossTerms, reconstruction_error
from vacsr.pairwise import PairBlock, cosines


class Sigmoid(nn.Module):
    """Score = cosine. Every caption of the image is a positive, every other pair a negative."""

    pairwise = True

    def __init__(self, config: SigmoidConfig) -> None:
        super().__init__()
        self.config = config
        self.affine = nn.Parameter(torch.tensor([config.scale, config.bias]), config.learnable)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """Binary cross entropy with logit a·cos+b, summed over pairs, divided by B."""
        logit = self.affine[0] * cosines(v.mean, t.mean) + self.affine[1]
        total = reconstruction_error(logit, pairs.relevance.to(logit.dtype), kind="bce").sum() / pairs.batch
        return LossTerms(total, {"bce": total.detach()})

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """Cosine. [I, d], [T, d] -> [I, T]"""
        return v.mean @ t.mean.T

    def grade(self, score: Tensor) -> Tensor:
        """σ(a·cos+b), the probability the loss trains."""
        return torch.sigmoid(self.affine[0] * score + self.affine[1])

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """None: a cosine has no spread."""
        return None

    def param_groups(self) -> list[ParamGroup]:
        """a and b, without decay."""
        return split_by_decay("loss", self.named_parameters())
