from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.scoring.rescore import MARGIN, best_of, fine_scores, surely_best
from vacsr.scoring.topk import stable_topk


def test_candidates_are_ordered_by_the_new_score() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4, 30, generator=generator)
    index = torch.stack([torch.randperm(30, generator=generator)[:6] for _ in range(4)])
    fine = fine_scores(index, lambda query, item: table[query, item])
    assert torch.equal(fine, table.gather(1, index))
    best = best_of(index, fine, k=2)
    for row, (items, scores) in enumerate(zip(best.index.tolist(), best.score.tolist(), strict=True)):
        expected = sorted(index[row].tolist(), key=lambda item, row=row: -float(table[row, item]))[:2]
        assert items == expected
        assert scores == [float(table[row, item]) for item in expected]


def test_pairs_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.scoring.rescore._CHUNK", 4)
    seen: list[int] = []
    fine = fine_scores(
        torch.arange(10).view(5, 2), lambda query, item: seen.append(len(item)) or (100.0 * query + item)
    )
    assert seen == [4, 4, 2]
    assert fine.tolist() == [[100.0 * row + 2 * row, 100.0 * row + 2 * row + 1] for row in range(5)]
    assert fine_scores(torch.empty(0, 3, dtype=torch.int64), lambda query, item: query).shape == (0, 3)


def test_equals_go_by_index_whatever_order_they_come_in() -> None:
    assert best_of(torch.tensor([[7, 2, 5]]), torch.zeros(1, 3), k=2).index.tolist() == [[2, 5]]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(1e-4, 1.0), st.integers(1, 5), st.integers(1, 9))
def test_what_is_sure_is_the_full_sort(seed: int, size: float, k: int, spare: int) -> None:
    """As long as no error exceeds the margin, here by making the others' errors as large as it allows."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(20, 40, generator=generator)
    rough = truth + size * (2 * torch.rand(truth.shape, generator=generator) - 1)
    found = rough.topk(k + spare, dim=1)
    fine = truth.gather(1, found.indices)
    allowed = MARGIN * (found.values - fine).abs().amax(dim=1, keepdim=True)
    others = torch.minimum(rough + allowed, found.values[:, -1:] + allowed).scatter(1, found.indices, fine)
    sure = surely_best(found.values, fine, k=k)
    right = stable_topk(others, k).index
    assert torch.equal(best_of(found.indices, fine, k=k).index[sure], right[sure])


def test_clear_queries_are_sure_and_close_ones_are_not() -> None:
    fine = torch.tensor([[9.0, 8.0, 1.0], [9.0, 1.5, 1.0], [2.0, 2.0, 2.0]])
    rough = fine + torch.tensor([0.1, 0.0, 0.0])
    rough[2] = 2.0
    assert surely_best(rough, fine, k=2).tolist() == [True, False, False]  # 8 > 1 + 8·0.1; 1.5 is not; a tie is not


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_not_finite_is_never_sure(worst: float, side: int, place: int) -> None:
    scores = [torch.tensor([[9.0, 8.0, 1.0]]), torch.tensor([[9.0, 8.0, 1.0]])]
    assert surely_best(*scores, k=2).all()
    scores[side] = scores[side].clone()
    scores[side][0, place] = worst
    assert not surely_best(*scores, k=2).any()
