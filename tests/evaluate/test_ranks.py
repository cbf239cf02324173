"""Ranks by counting against plain sorting, and the metrics against their definitions and torchmetrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_r_precision

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.metrics import (
    RetrievalMetrics,
    average_precisions_at_r,
    best_ranks,
    hits_at,
    map_at_r,
    median_rank,
    r_precision,
    r_precisions,
    recall_at,
    retrieval_metrics,
    rsum,
)
from vacsr.evaluate.ranks import (
    Positives,
    Ties,
    positive_ranks,
    stream_positive_ranks,
)

TIES = ("stable", "pessimistic")


def reference_ranks(scores: Tensor, relevance: Tensor, ties: str) -> list[int]:
    """Sort every row by Python's own sort and look the positives up, query by query."""
    found = []
    for row, relevant in zip(scores.tolist(), relevance.tolist(), strict=True):
        last = [relevant[j] if ties == "pessimistic" else False for j in range(len(row))]
        order = sorted(range(len(row)), key=lambda j, row=row, last=last: (-row[j], last[j], j))
        found += [order.index(j) + 1 for j in range(len(row)) if relevant[j]]
    return found


def reference_query_metrics(ranks: list[int]) -> tuple[float, float, float]:
    """Best rank, R-precision and mAP@R of one query, written as the definitions read."""
    total = len(ranks)
    relevant = [r in ranks for r in range(1, total + 1)]
    precision = [sum(relevant[:r]) / r for r in range(1, total + 1)]
    return min(ranks), sum(relevant) / total, sum(p * rel for p, rel in zip(precision, relevant, strict=True)) / total


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Integer scores with many ties and a relevance matrix with at least one positive."""
    queries, items = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    levels = draw(st.sampled_from([1, 2, 4, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = torch.randint(-levels, levels, (queries, items), generator=generator).float()
    scores = torch.where(scores == levels - 1, torch.inf, scores) if draw(st.booleans()) else scores
    relevance = torch.rand(queries, items, generator=generator) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    relevance[draw(st.integers(0, queries - 1)), draw(st.integers(0, items - 1))] = True
    return scores, relevance


@settings(max_examples=150, deadline=None)
@given(problem=problems(), ties=st.sampled_from(TIES), block=st.sampled_from([1, 7, 20, 1 << 20]))
def test_ranks_equal_sorting(problem: tuple[Tensor, Tensor], ties: Ties, block: int) -> None:
    scores, relevance = problem
    ranks = positive_ranks(scores, Positives.from_matrix(relevance), ties=ties, block=block)
    assert ranks.rank.tolist() == reference_ranks(scores, relevance, ties)
    assert ranks.left_out == int((~relevance.any(1)).sum())


@settings(max_examples=150, deadline=None)
@given(problem=problems(), ties=st.sampled_from(TIES), rows=st.integers(1, 8), block=st.sampled_from([1, 7, 1 << 20]))
def test_stream_equals_matrix(problem: tuple[Tensor, Tensor], ties: Ties, rows: int, block: int) -> None:
    scores, relevance = problem
    positives = Positives.from_matrix(relevance)
    both = stream_positive_ranks(lambda: scores.split(rows), positives, ties=ties, block=block)
    assert torch.equal(both.i2t.rank, positive_ranks(scores, positives, ties=ties).rank)
    assert torch.equal(both.t2i.rank, positive_ranks(scores.T, positives.transposed(), ties=ties).rank)
    assert both.t2i.rank.tolist() == reference_ranks(scores.T, relevance.T, ties)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), other=st.integers(0, 2**32), ties=st.sampled_from(TIES), rows=st.integers(1, 8))
def test_stream_of_directions_that_differ(problem: tuple[Tensor, Tensor], other: int, ties: Ties, rows: int) -> None:
    scores, relevance = problem
    draw = torch.Generator().manual_seed(other)
    backwards = torch.rand(relevance.T.shape, generator=draw) < 0.4
    backwards[0, 0] = True
    found = stream_positive_ranks(
        lambda: scores.split(rows), Positives.from_matrix(relevance), Positives.from_matrix(backwards), ties=ties
    )
    assert found.i2t.rank.tolist() == reference_ranks(scores, relevance, ties)
    assert found.t2i.rank.tolist() == reference_ranks(scores.T, backwards, ties)


def test_a_relevant_item_that_is_absent_is_never_found_but_counted() -> None:
    """As if it were among the items, behind all others."""
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    relevance = torch.tensor([[True, False, True], [False, False, False], [False, False, False]])
    full = torch.cat([relevance, torch.tensor([[True, True], [True, False], [False, False]])], dim=1)
    behind = positive_ranks(
        torch.cat([scores, torch.full((3, 2), -torch.inf)], dim=1), Positives.from_matrix(full), ties="pessimistic"
    )
    absent = replace(Positives.from_matrix(relevance), absent=torch.tensor([2, 1, 0]))
    ranks = positive_ranks(scores, absent)
    assert (ranks.evaluated, ranks.left_out) == (2, 1)
    assert absent.relevant.tolist() == full.sum(1).tolist() == [4, 1, 0]
    assert best_ranks(ranks)[0] == 1
    assert best_ranks(ranks)[1] == torch.inf
    assert hits_at(ranks, 3).nan_to_num(-1).tolist() == [1, 0, -1]
    expected = [(1 / 1 + 2 / 3) / 4, 0.0]
    assert average_precisions_at_r(ranks)[:2].tolist() == pytest.approx(expected)
    assert r_precisions(ranks)[:2].tolist() == pytest.approx([2 / 4, 0])
    assert r_precisions(behind)[1] == 0


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_query_metrics_equal_their_definitions(problem: tuple[Tensor, Tensor]) -> None:
    scores, relevance = problem
    ranks = positive_ranks(scores, Positives.from_matrix(relevance))
    of_query = [reference_ranks(s[None], r[None], "stable") for s, r in zip(scores, relevance, strict=True)]
    expected = np.array([reference_query_metrics(r) if r else (np.nan,) * 3 for r in of_query])
    np.testing.assert_array_equal(best_ranks(ranks), expected[:, 0])
    np.testing.assert_allclose(r_precisions(ranks), expected[:, 1], rtol=1e-12)
    np.testing.assert_allclose(average_precisions_at_r(ranks), expected[:, 2], rtol=1e-12)
    assert median_rank(ranks) == np.nanmedian(expected[:, 0])
    assert r_precision(ranks) == pytest.approx(np.nanmean(expected[:, 1]))
    assert map_at_r(ranks) == pytest.approx(np.nanmean(expected[:, 2]))
    for k in (1, 2, 100):
        assert recall_at(ranks, k) == pytest.approx(np.mean([min(r) <= k for r in of_query if r]))


def test_torchmetrics_agrees() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(40, 60, generator=generator)
    relevance = torch.rand(40, 60, generator=generator) < 0.1
    relevance[:, 3] = True
    ranks = positive_ranks(scores, Positives.from_matrix(relevance))
    pairs = list(zip(scores, relevance, strict=True))
    for k in (1, 5, 10):
        hits = torch.stack([retrieval_hit_rate(s, r, top_k=k) for s, r in pairs])
        torch.testing.assert_close(hits_at(ranks, k), hits.double())
    precisions = torch.stack([retrieval_r_precision(s, r) for s, r in pairs])
    torch.testing.assert_close(r_precisions(ranks), precisions.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("ties", TIES)
def test_any_number_type(dtype: torch.dtype, ties: Ties) -> None:
    scores = torch.tensor([[1, -1, 1, 0], [0, 0, 0, 0]], dtype=dtype)
    relevance = torch.tensor([[True, False, True, True], [False, True, False, True]])
    ranks = positive_ranks(scores, Positives.from_matrix(relevance), ties=ties)
    assert ranks.rank.tolist() == reference_ranks(scores, relevance, ties)


@pytest.mark.parametrize("ties", TIES)
def test_both_zeros_are_one_score(ties: Ties) -> None:
    relevance = torch.tensor([[True, False, True]])
    ranks = positive_ranks(torch.tensor([[0.0, -0.0, -0.0]]), Positives.from_matrix(relevance), ties=ties)
    assert ranks.rank.tolist() == ([1, 3] if ties == "stable" else [2, 3])


def test_captions_give_both_directions() -> None:
    owner = torch.tensor([1, 0, 1, 3])
    i2t = Positives.from_captions(owner, 4)
    t2i = i2t.transposed()
    assert i2t.count.tolist() == [1, 2, 0, 1]
    assert (t2i.query.tolist(), t2i.item.tolist()) == ([0, 1, 2, 3], owner.tolist())
    assert (t2i.num_queries, t2i.num_items) == (4, 4)
    again = t2i.transposed()
    assert torch.equal(again.query, i2t.query)
    assert torch.equal(again.item, i2t.item)


def test_metrics_are_percent_and_rsum_adds_six() -> None:
    scores = torch.eye(20)
    ranks = positive_ranks(scores, Positives.from_captions(torch.arange(20), 20))
    metrics = retrieval_metrics(ranks)
    assert metrics == RetrievalMetrics(100, 100, 100, 100, 100, 1)
    assert rsum(metrics, metrics) == 600


def test_nan_names_the_query_and_item() -> None:
    scores = torch.zeros(5, 4)
    scores[3, 2] = scores[4, 0] = torch.nan
    positives = Positives.from_captions(torch.tensor([0, 1, 2, 3]), 5)
    with pytest.raises(DataError, match="query 3, item 2"):
        positive_ranks(scores, positives, block=8)
    with pytest.raises(DataError, match="query 3, item 2"):
        stream_positive_ranks(lambda: scores.split(2), positives)


def test_no_positive_at_all_is_refused() -> None:
    nothing = Positives.from_matrix(torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(DataError, match="none of 2 queries has a positive"):
        positive_ranks(torch.zeros(2, 3), nothing)
    with pytest.raises(DataError, match="none of 0 queries has a positive"):
        stream_positive_ranks(lambda: [], Positives.from_captions(torch.zeros(0).long(), 0))


def test_wrong_shapes_and_names_are_refused() -> None:
    positives = Positives.from_captions(torch.tensor([0, 1]), 2)
    with pytest.raises(ShapeMismatch, match=r"\[2, 3\].*\[2, 2\]"):
        positive_ranks(torch.zeros(2, 3), positives)
    with pytest.raises(UsageError, match="optimistic"):
        positive_ranks(torch.zeros(2, 2), positives, ties="optimistic")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="k=0"):
        recall_at(positive_ranks(torch.zeros(2, 2), positives), 0)
    with pytest.raises(DataError, match=r"query\[1\] is 2, expected 0 to 1"):
        Positives.from_captions(torch.tensor([0, 2]), 2)
    with pytest.raises(ShapeMismatch, match=r"torch\.bool"):
        Positives.from_matrix(torch.zeros(2, 2))
    with pytest.raises(ShapeMismatch, match="one length"):
        Positives.from_pairs(torch.tensor([0]), torch.tensor([0, 1]), num_queries=1, num_items=2)


def test_blocks_must_be_the_matrix_twice() -> None:
    positives = Positives.from_captions(torch.tensor([0, 1]), 2)
    with pytest.raises(ShapeMismatch, match="hold 1 rows"):
        stream_positive_ranks(lambda: [torch.zeros(1, 2)], positives)
    with pytest.raises(ShapeMismatch, match="block at row 2"):
        stream_positive_ranks(lambda: torch.zeros(3, 2).split(2), positives)
    passes = iter([torch.zeros(2, 2), torch.ones(2, 2)])
    with pytest.raises(DataError, match="repeatable"):
        stream_positive_ranks(lambda: [next(passes)], positives)


def test_blocks_may_be_cut_differently_the_second_time() -> None:
    scores = torch.randint(0, 4, (6, 8), generator=torch.Generator().manual_seed(1)).float()
    positives = Positives.from_captions(torch.arange(8) % 6, 6)
    sizes = iter([2, 5])
    both = stream_positive_ranks(lambda: scores.split(next(sizes)), positives)
    assert torch.equal(both.t2i.rank, positive_ranks(scores.T, positives.transposed()).rank)


@pytest.mark.gpu
@pytest.mark.parametrize("ties", TIES)
def test_cuda_equals_cpu(ties: Ties) -> None:
    scores = torch.randint(0, 50, (300, 1500), generator=torch.Generator().manual_seed(0)).float()
    positives = Positives.from_captions(torch.arange(1500) // 5, 300)
    ranks = positive_ranks(scores, positives, ties=ties)
    assert torch.equal(ranks.rank, positive_ranks(scores.cuda(), positives, ties=ties).rank)
    both = stream_positive_ranks(lambda: scores.cuda().split(64), positives, ties=ties)
    assert torch.equal(both.i2t.rank, ranks.rank)
    assert torch.equal(both.t2i.rank, positive_ranks(scores.T, positives.transposed(), ties=ties).rank)
