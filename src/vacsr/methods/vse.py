"""VSE∞: a hinge on the hardest negative of every image and every caption."""

from __future__ import annotations

import torch
from torch import Tensor

from vacsr.config import VseConfig
from vacsr.methods.base import Embedding, Method, register
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock, cosines


@register("vse", VseConfig, presets={"paper": {"warmup_epochs": 2}})
class Vse(Method):
    """Score = cosine. Σ_i max_j [m + s_ij − s_ii]₊ over rows, and the same over columns.

    In the first ``warmup_epochs`` all negatives add up instead of the hardest alone. Other captions of the image are
    neither its positive nor its negatives; the public code calls them negatives. A column's hardest negative lies in
    any row, so blocks of rows are not allowed. It has no parameters of its own.
    """

    config: VseConfig

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """Both directions' hinges, summed over the batch, or divided by B too."""
        score = cosines(v.mean, t.mean)
        own = score.diagonal()
        rows = hinge(score, own.unsqueeze(1), pairs.relevance, margin=self.config.margin)
        cols = hinge(score, own.unsqueeze(0), pairs.relevance, margin=self.config.margin)
        divisor = pairs.batch if self.config.reduction == "mean" else 1
        i2t, t2i = self._over(rows, pairs) / divisor, self._over(cols.T, pairs) / divisor
        return LossTerms(i2t + t2i, {"i2t": i2t.detach(), "t2i": t2i.detach()})

    def _over(self, costs: Tensor, pairs: PairBlock) -> Tensor:
        """All costs while warming up, each row's largest afterwards; the epoch is a tensor, so both are computed."""
        hardest = costs.amax(dim=1).sum()
        if pairs.epoch is None or self.config.warmup_epochs == 0:
            return hardest
        return torch.where(pairs.epoch < self.config.warmup_epochs, costs.sum(), hardest)


def hinge(score: Tensor, own: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """[m + s_ij − s_own]₊ of every negative, 0 for positives. [R, C], [R, 1] or [1, C], [R, C] -> [R, C]"""
    return (margin + score - own).clamp_min(0.0).masked_fill(relevance, 0.0)
