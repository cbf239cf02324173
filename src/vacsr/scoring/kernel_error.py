"""What a rougher precision does to rankings: overlap of the top-k, and Kendall's τ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SAMPLED = 1000  # items a query's τ is taken over: pairs of them are compared one by one


class RankingError(NamedTuple):
    """Means over the queries; 1 is a perfect agreement."""

    overlap: float
    """Share of the reference's top-k that is in the other's."""
    tau: float
    """Kendall's τ-a over at most 1,000 evenly spaced items of each query."""


def topk_overlap(index: Tensor, reference: Tensor) -> float:
    """Mean share of each row of the reference that is in the same row of the other. [Q, k], [Q, k]

    >>> topk_overlap(torch.tensor([[1, 2], [0, 3]]), torch.tensor([[2, 5], [3, 0]]))
    0.75
    """
    found = (reference.unsqueeze(2) == index.unsqueeze(1)).any(dim=2)
    return float(found.float().mean())


def ranking_error(scores: Tensor, reference: Tensor, *, k: int = 10) -> RankingError:
    """Of one matrix of scores against a better one, queries in rows. [Q, N], [Q, N]"""
    top = min(k, scores.shape[1])
    overlap = topk_overlap(scores.topk(top, dim=1).indices, reference.topk(top, dim=1).indices)
    step = max(1, -(-scores.shape[1] // _SAMPLED))
    taus = [_tau(one, other) for one, other in zip(scores[:, ::step], reference[:, ::step], strict=True)]
    return RankingError(overlap, float(torch.stack(taus).mean()))


def _tau(one: Tensor, other: Tensor) -> Tensor:
    """(agreeing − disagreeing pairs) / all pairs. [N], [N] -> []"""
    signs = [torch.sign(x.unsqueeze(1) - x.unsqueeze(0)) for x in (one, other)]
    return (signs[0] * signs[1]).sum() / max(1, len(one) * (len(one) - 1))
