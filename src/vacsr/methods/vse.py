"""VSE∞: a hinge on the hardest negative of every image and every caption."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vacsr.methods.base import Embedding, Method, RetrievalConfig, register
from vacsr.objective import LossTerms, PairBlock, cosines


class VseConfig(RetrievalConfig):
    """Hinge loss with the hardest negatives (VSE∞)."""

    name: Literal["vse"] = "vse"
    margin: Annotated[float, Field(ge=0)] = 0.2
    """By how much a match should score above every other pair."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs in which all negatives count, not the hardest alone."""


@register("vse", VseConfig, presets={"paper": {"warmup_epochs": 2}})
class Vse(Method):
    """Score = cosine. Σ_i max_j [m + s_ij − s_ii]₊ over rows, and the same over columns.

    Other captions of the image are no negatives; in the public code they are. A column's hardest negative lies in any
    row, so blocks of rows are not allowed.
    """

    config: VseConfig

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        rows, columns = hinge_costs(cosines(v.mean, t.mean), pairs.relevance, margin=self.config.margin)
        i2t, t2i = self._reduce(rows, pairs), self._reduce(columns.T, pairs)
        return LossTerms(i2t + t2i, {"i2t": i2t.detach(), "t2i": t2i.detach()})

    def _reduce(self, costs: Tensor, pairs: PairBlock) -> Tensor:
        """All costs during warm-up, each row's largest afterwards; the epoch is a tensor, so both are computed."""
        hardest = costs.amax(dim=1).sum()
        if pairs.epoch is None or self.config.warmup_epochs == 0:
            return hardest
        return torch.where(pairs.epoch < self.config.warmup_epochs, costs.sum(), hardest)


def hinge_costs(score: Tensor, relevance: Tensor, *, margin: float | Tensor) -> tuple[Tensor, Tensor]:
    """i2t (m_i + s_ij − s_ii)₊ and t2i (m_j + s_ij − s_jj)₊ of every pair, 0 at labelled matches.

    Scores [..., B, B], bool [..., B, B], margin a number or one per pair [..., B] -> [..., B, B] each
    """
    matches = score.diagonal(dim1=-2, dim2=-1)
    lack = (margin if isinstance(margin, Tensor) else torch.full_like(matches, margin)) - matches
    i2t = (score + lack.unsqueeze(-1)).clamp_min(0.0)
    t2i = (score + lack.unsqueeze(-2)).clamp_min(0.0)
    return i2t.masked_fill(relevance, 0.0), t2i.masked_fill(relevance, 0.0)
