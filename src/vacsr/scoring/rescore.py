"""Candidates that a rough score found, scored again by a finer one; and whether the best can lie outside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vacsr.scoring.kernel_topk import from_keys, order_keys
from vacsr.scoring.topk import TopK

MARGIN = 8.0
"""The error allowed for in items that are no candidates, over the largest seen on the query's candidates."""
_CHUNK = 1 << 15  # pairs at a time


def fine_scores(index: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``score(query, item)`` of aligned pairs, for each query and its candidates. [Q, m] -> [Q, m]"""
    queries, m = index.shape
    query = torch.arange(queries, device=index.device).repeat_interleave(m)
    item = index.flatten()
    parts = [score(query[at : at + _CHUNK], item[at : at + _CHUNK]) for at in range(0, len(item), _CHUNK)]
    return torch.cat(parts).view_as(index) if parts else torch.empty(index.shape, device=index.device)


def best_of(index: Tensor, score: Tensor, *, k: int) -> TopK:
    """The first k candidates by (−score, index), whatever order they come in. [Q, m], [Q, m] -> [Q, min(k, m)]"""
    return from_keys(order_keys(score, index).topk(min(k, index.shape[1]), dim=1).values)


def surely_best(rough: Tensor, fine: Tensor, *, k: int) -> Tensor:
    """Of which queries no other item can be among the k best. Candidates' scores [Q, m], [Q, m], k ≤ m -> [Q] bool

    The others' rough scores are at most the lowest of the candidates', and their fine ones higher by an error at most.
    A query with a score that is not finite is never sure.
    """
    error = (rough - fine).abs().amax(dim=1)
    return fine.topk(k, dim=1).values[:, -1] > rough.amin(dim=1) + MARGIN * error
