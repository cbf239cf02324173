"""Retrieval metrics from the ranks of the positives.

The metrics of each query are float64 [Q], NaN for a query without a positive; averages leave those queries out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.evaluate.ranks import Positives, Ranks


def best_ranks(ranks: Ranks) -> Tensor:
    """Rank of the best positive of each query, infinite where all are absent, NaN without one. -> [Q]"""
    positives = ranks.positives
    best = torch.full((positives.num_queries,), torch.inf, dtype=torch.float64)
    best.scatter_reduce_(0, positives.query, ranks.rank.double(), "amin")
    return best.masked_fill(positives.relevant == 0, torch.nan)


def hits_at(ranks: Ranks, k: int) -> Tensor:
    """1 where some positive is among the first k, else 0; NaN without a positive. -> [Q]"""
    if k < 1:
        raise UsageError(f"k={k}, expected at least 1")
    best = best_ranks(ranks)
    return torch.where(best.isnan(), torch.nan, (best <= k).double())


def r_precisions(ranks: Ranks) -> Tensor:
    """Share of positives among the first R, R the number of positives of the query. -> [Q]"""
    return _mean_over_positives(_within_r(ranks).double(), ranks.positives)


def average_precisions_at_r(ranks: Ranks) -> Tensor:
    """mAP@R of each query: mean over r ≤ R of P@r·rel_r. -> [Q]"""
    order = ranks.rank.argsort()
    order = order[ranks.positives.query[order].argsort(stable=True)]
    found = torch.empty_like(order)  # how many positives of the query stand at this rank or before
    found[order] = ranks.positives.slot + 1
    return _mean_over_positives(_within_r(ranks) * found.double() / ranks.rank, ranks.positives)


def _within_r(ranks: Ranks) -> Tensor:
    return ranks.rank <= ranks.positives.relevant[ranks.positives.query]


def _mean_over_positives(value: Tensor, positives: Positives) -> Tensor:
    """[P] -> [Q]; 0/0 = NaN where there is no positive."""
    total = torch.zeros(positives.num_queries, dtype=torch.float64).index_add_(0, positives.query, value)
    return total / positives.relevant


def recall_at(ranks: Ranks, k: int) -> float:
    """Share of queries with a positive among the first k.

    >>> from vacsr.evaluate.ranks import positive_ranks
    >>> positives = Positives.from_captions(torch.tensor([0, 0, 1]), 2)
    >>> ranks = positive_ranks(torch.tensor([[0.9, 0.3, 0.5], [0.4, 0.6, 0.5]]), positives)
    >>> recall_at(ranks, 1), r_precision(ranks), map_at_r(ranks), median_rank(ranks)
    (0.5, 0.25, 0.25, 1.5)
    """
    return float(hits_at(ranks, k).nanmean())


def r_precision(ranks: Ranks) -> float:
    """Mean R-precision, a share."""
    return float(r_precisions(ranks).nanmean())


def map_at_r(ranks: Ranks) -> float:
    """Mean of mAP@R over the queries, a share."""
    return float(average_precisions_at_r(ranks).nanmean())


def median_rank(ranks: Ranks) -> float:
    """Median over the queries of the best positive's rank."""
    return float(best_ranks(ranks).nanquantile(0.5))


class RetrievalMetrics(NamedTuple):
    """One direction's figures; all in percent but the median rank."""

    r1: float
    r5: float
    r10: float
    map_at_r: float
    r_precision: float
    median_rank: float


def retrieval_metrics(ranks: Ranks) -> RetrievalMetrics:
    """The usual figures of one direction, in percent."""
    return RetrievalMetrics(
        r1=100 * recall_at(ranks, 1),
        r5=100 * recall_at(ranks, 5),
        r10=100 * recall_at(ranks, 10),
        map_at_r=100 * map_at_r(ranks),
        r_precision=100 * r_precision(ranks),
        median_rank=median_rank(ranks),
    )


def rsum(i2t: RetrievalMetrics, t2i: RetrievalMetrics) -> float:
    """Sum of the six recalls in percent, at most 600."""
    return i2t.r1 + i2t.r5 + i2t.r10 + t2i.r1 + t2i.r5 + t2i.r10
