"""Retrieval metrics of one query as their definitions read: the reference of several modules."""

from collections.abc import Callable, Sequence

import pytest

Plain = Callable[[Sequence[float], Sequence[bool]], dict[str, float]]


def _plain_metrics(score: Sequence[float], relevant: Sequence[bool]) -> dict[str, float]:
    order = sorted(range(len(score)), key=lambda item: (-score[item], item))
    hits = [bool(relevant[item]) for item in order]
    total = sum(hits)
    best = hits.index(True) + 1
    precisions = [sum(hits[:rank]) / rank for rank in range(1, total + 1)]
    return {
        **{f"r{k}": float(best <= k) for k in (1, 5, 10)},
        "map_at_r": sum(share * hit for share, hit in zip(precisions, hits, strict=False)) / total,
        "r_precision": sum(hits[:total]) / total,
        "median_rank": float(best),
    }


@pytest.fixture(scope="session")
def plain_metrics() -> Plain:
    """Shares of one query, from its scores and its relevant items; its best rank as ``median_rank``."""
    return _plain_metrics
