"""Retrieval metrics from the ranks of the positives.

A metric is a function from :class:`Ranks` to one share per query, float64 [Q], NaN for a query without a positive.
Add it to :data:`METRICS`, and reports, stored outcomes, comparison tables and significance tests have it.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vacsr.evaluate.ranks import BothRanks, Positives, Ranks
from vacsr.scoring.topk import DIRECTIONS


def best_ranks(ranks: Ranks) -> Tensor:
    """Rank of the best positive of each query, infinite where all are absent, NaN without one. -> [Q]"""
    positives = ranks.positives
    best = torch.full((positives.num_queries,), torch.inf, dtype=torch.float64)
    best.scatter_reduce_(0, positives.query, ranks.rank.double(), "amin")
    return best.masked_fill(positives.relevant == 0, torch.nan)


def hits_at(ranks: Ranks, k: int) -> Tensor:
    """1 where some positive is among the first k, else 0; NaN without a positive. -> [Q]"""
    best = best_ranks(ranks)
    return torch.where(best.isnan(), torch.nan, (best <= k).double())


def r_precisions(ranks: Ranks) -> Tensor:
    """Share of positives among the first R, R the number of positives of the query. -> [Q]"""
    return _mean_over_positives(_within_r(ranks).double(), ranks.positives)


def average_precisions_at_r(ranks: Ranks) -> Tensor:
    """mAP@R of each query: mean over r ≤ R of P@r·rel_r. -> [Q]"""
    order = ranks.rank.argsort()
    order = order[ranks.positives.query[order].argsort(stable=True)]
    up_to = torch.empty_like(order)  # how many positives of the query are at this rank or before
    up_to[order] = ranks.positives.slot + 1
    return _mean_over_positives(_within_r(ranks) * up_to.double() / ranks.rank, ranks.positives)


def _within_r(ranks: Ranks) -> Tensor:
    return ranks.rank <= ranks.positives.relevant[ranks.positives.query]


def _mean_over_positives(value: Tensor, positives: Positives) -> Tensor:
    """[P] -> [Q]; 0/0 = NaN where there is no positive."""
    total = torch.zeros(positives.num_queries, dtype=torch.float64).index_add_(0, positives.query, value)
    return total / positives.relevant


METRICS: dict[str, Callable[[Ranks], Tensor]] = {
    "r1": partial(hits_at, k=1),
    "r5": partial(hits_at, k=5),
    "r10": partial(hits_at, k=10),
    "map_at_r": average_precisions_at_r,
    "r_precision": r_precisions,
}
"""By name: the share of each query. Reports have the mean over queries, in percent."""
RECALLS = ("r1", "r5", "r10")  # their sum over both directions is RSUM, at most 600


def mean_of(metric: Callable[[Ranks], Tensor], ranks: Ranks) -> float:
    """Mean over the queries that have a positive, in percent."""
    return 100 * float(metric(ranks).nanmean())


def retrieval_metrics(ranks: Ranks) -> dict[str, float]:
    """All metrics of one direction in percent, the median rank of the best positives, and the number of queries."""
    shares = {name: mean_of(metric, ranks) for name, metric in METRICS.items()}
    best = best_ranks(ranks)
    return {**shares, "median_rank": float(best.nanquantile(0.5)), "queries": float((~best.isnan()).sum())}


def retrieval_result(galleries: Sequence[BothRanks]) -> dict[str, Any]:
    """Metrics of both directions and RSUM, as means over galleries."""
    result: dict[str, Any] = {}
    for direction, ranks in zip(DIRECTIONS, zip(*galleries, strict=True), strict=True):
        parts = [retrieval_metrics(one) for one in ranks]
        result[direction] = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    return {**result, "rsum": sum(sum(metrics[name] for name in RECALLS) for metrics in result.values())}
