"""VSE∞: a hinge on the hardest negative of every image and every caption."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vacsr.methods.base import Embedding, Method, MethodConfig, register
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock, cosines


class VseConfig(MethodConfig):
    """Hinge loss with the hardest negatives (VSE∞)."""

    name: Literal["vse"] = "vse"
    margin: Annotated[float, Field(ge=0)] = 0.2
    """By how much a match should score above every other pair."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs in which all negatives count, not the hardest alone."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over the batch's images and captions: summed, or summed and divided by B."""


@register("vse", VseConfig, presets={"paper": {"warmup_epochs": 2}})
class Vse(Method):
    """Score = cosine. Σ_i max_j [m + s_ij − s_ii]₊ over rows, and the same over columns.

    In the first ``warmup_epochs`` all negatives add up instead of the hardest alone. Other captions of the image are
    neither its positive nor its negatives; the public code calls them negatives. A column's hardest negative lies in
    any row, so blocks of rows are not allowed. It has no parameters.
    """

    config: VseConfig

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """Both directions' hinges, summed over the batch, or divided by B too."""
        costs = hinge_costs(cosines(v.mean, t.mean), pairs.relevance, margin=self.config.margin)
        divisor = pairs.batch if self.config.reduction == "mean" else 1
        i2t, t2i = self._reduce(costs.i2t, pairs) / divisor, self._reduce(costs.t2i.T, pairs) / divisor
        return LossTerms(i2t + t2i, {"i2t": i2t.detach(), "t2i": t2i.detach()})

    def _reduce(self, costs: Tensor, pairs: PairBlock) -> Tensor:
        """All costs during warm-up, each row's largest afterwards; the epoch is a tensor, so both are computed."""
        hardest = costs.amax(dim=1).sum()
        if pairs.epoch is None or self.config.warmup_epochs == 0:
            return hardest
        return torch.where(pairs.epoch < self.config.warmup_epochs, costs.sum(), hardest)


class HingeCosts(NamedTuple):
    """[..., B, B] each, 0 at pairs that are labelled a match."""

    i2t: Tensor
    """(m_i + s_ij − s_ii)₊: caption j of another image against image i's own caption."""
    t2i: Tensor
    """(m_j + s_ij − s_jj)₊: image i against caption j's own image."""


def hinge_costs(score: Tensor, relevance: Tensor, *, margin: float | Tensor) -> HingeCosts:
    """The cost of every negative. Pair i is image i with caption i.

    Scores [..., B, B], bool [..., B, B], margin a number or one per pair [..., B]
    """
    matches = score.diagonal(dim1=-2, dim2=-1)
    lack = (margin if isinstance(margin, Tensor) else torch.full_like(matches, margin)) - matches
    i2t = (score + lack.unsqueeze(-1)).clamp_min(0.0)
    t2i = (score + lack.unsqueeze(-2)).clamp_min(0.0)
    return HingeCosts(i2t.masked_fill(relevance, 0.0), t2i.masked_fill(relevance, 0.0))
