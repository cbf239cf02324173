"""Metrics against their definitions and torchmetrics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.evaluate.metrics import (
    METRICS,
    average_precisions_at_r,
    best_ranks,
    hits_at,
    r_precisions,
    retrieval_metrics,
    retrieval_result,
)
from vacsr.evaluate.ranks import BothRanks, Positives, Ranks, positive_ranks


def ranks_of(scores: Tensor, relevance: Tensor, absent: Tensor | None = None) -> Ranks:
    pairs = relevance.nonzero().unbind(1)
    positives = Positives.from_pairs(*pairs, num_queries=len(scores), num_items=scores.shape[1])
    return positive_ranks(lambda: [scores], replace(positives, absent=absent)).i2t


@pytest.mark.parametrize("levels", [2, 1000])
@pytest.mark.parametrize("density", [0.05, 0.5])
def test_metrics_equal_their_definitions(levels: int, density: float, plain_metrics: Any) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (40, 30), generator=generator).float()
    relevance = torch.rand(40, 30, generator=generator) < density
    relevance[0], relevance[1, 0] = False, True
    ranks = ranks_of(scores, relevance)
    expected = [plain_metrics(s, r) if r.any() else None for s, r in zip(scores, relevance, strict=True)]
    for name, metric in METRICS.items():
        shares = [np.nan if one is None else one[name] for one in expected]
        np.testing.assert_allclose(metric(ranks), shares, rtol=1e-12)
    result, asked = retrieval_metrics(ranks), [one for one in expected if one is not None]
    assert list(result) == [*METRICS, "median_rank", "queries"]
    assert result["queries"] == len(asked) < 40
    assert result["median_rank"] == np.median([one["median_rank"] for one in asked])
    assert result["map_at_r"] == pytest.approx(100 * np.mean([one["map_at_r"] for one in asked]))


def test_an_absent_relevant_item_is_never_retrieved_but_counted() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]]).repeat(3, 1)
    relevance = torch.tensor([[True, False, True], [False, False, False], [False, False, False]])
    ranks = ranks_of(scores, relevance, torch.tensor([2, 1, 0]))
    assert ranks.positives.relevant.tolist() == [4, 1, 0]
    assert best_ranks(ranks)[:2].tolist() == [1, torch.inf]
    assert hits_at(ranks, 3).nan_to_num(-1).tolist() == [1, 0, -1]
    assert average_precisions_at_r(ranks)[:2].tolist() == pytest.approx([(1 / 1 + 2 / 3) / 4, 0])
    assert r_precisions(ranks)[:2].tolist() == pytest.approx([2 / 4, 0])


def test_results_are_percent_and_rsum_adds_six() -> None:
    ranks = ranks_of(torch.eye(20), torch.eye(20))
    result = retrieval_result([BothRanks(ranks, ranks)])
    assert result["i2t"] == result["t2i"] == {**dict.fromkeys(METRICS, 100.0), "median_rank": 1.0, "queries": 20}
    assert result["rsum"] == 600
