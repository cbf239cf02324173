"""The hinge cost of every negative in a batch, with a margin per pair: what NCR and BiCro are built from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HingeCosts(NamedTuple):
    """[..., B, B] each, 0 at pairs that are labelled a match."""

    i2t: Tensor
    """(m_i + s_ij − s_ii)₊: caption j of another image beside image i's own."""
    t2i: Tensor
    """(m_j + s_ij − s_jj)₊: image i beside caption j's own."""

    def mean(self) -> Tensor:
        """Both directions' costs of each pair, averaged over the batch. -> [..., B]"""
        return self.i2t.mean(dim=-1) + self.t2i.mean(dim=-2)

    def hardest(self) -> Tensor:
        """Both directions' largest cost of each pair. -> [..., B]"""
        return self.i2t.amax(dim=-1) + self.t2i.amax(dim=-2)


def hinge_costs(score: Tensor, relevance: Tensor, *, margin: float | Tensor) -> HingeCosts:
    """Pair i is image i with caption i. Scores [..., B, B], bool [..., B, B], margin a number or [..., B]"""
    own = score.diagonal(dim1=-2, dim2=-1)
    lack = (margin if isinstance(margin, Tensor) else torch.full_like(own, margin)) - own
    i2t = (score + lack.unsqueeze(-1)).clamp_min(0.0)
    t2i = (score + lack.unsqueeze(-2)).clamp_min(0.0)
    return HingeCosts(i2t.masked_fill(relevance, 0.0), t2i.masked_fill(relevance, 0.0))


def soft_margin(label: Tensor, *, margin: float, base: float) -> Tensor:
    """m·(base^y − 1)/(base − 1): a label of 1 keeps the margin, one of 0 asks for none, in between much less. [...]

    >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]), margin=0.2, base=10.0)
    tensor([0.0000, 0.0481, 0.2000])
    """
    return margin * (base**label - 1.0) / (base - 1.0)
