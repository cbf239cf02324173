from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.scoring.topk import TopK, columns_topk, rows_topk, stable_topk, streamed_rows

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Small integers: almost every row has ties, often across the border; some rows have NaN."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    values = st.one_of(st.integers(0, 2), st.sampled_from([float("-inf"), float("inf"), -0.0, float("nan")]))
    flat = draw(st.lists(values, min_size=rows * cols, max_size=rows * cols))
    return torch.tensor(flat, dtype=torch.float32).view(rows, cols)


def expected(scores: Tensor, k: int) -> list[list[int]]:
    """By (−score, index), NaN before all."""

    def place(value: float) -> tuple[bool, float]:
        return not math.isnan(value), 0.0 if math.isnan(value) else -value

    return [sorted(range(len(row)), key=lambda j, row=row: (*place(row[j]), j))[:k] for row in scores.tolist()]


def check(got: TopK, scores: Tensor, k: int) -> None:
    assert got.index.tolist() == expected(scores, k)
    torch.testing.assert_close(got.score, scores.gather(1, got.index), atol=0, rtol=0, equal_nan=True)


def cut(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    edges = sorted({0, len(matrix), *(min(c, len(matrix)) for c in cuts)})
    return [matrix[a:b] for a, b in pairwise(edges)]


@PROPERTY
@given(matrices(), st.integers(1, 12))
def test_stable_topk_is_the_full_sort(scores: Tensor, k: int) -> None:
    check(stable_topk(scores, k), scores, k)


@PROPERTY
@given(matrices(), st.integers(1, 12), st.lists(st.integers(0, 9), max_size=4))
def test_rows_in_blocks(scores: Tensor, k: int, cuts: list[int]) -> None:
    check(rows_topk(iter(cut(scores, cuts)), k), scores, k)


@PROPERTY
@given(matrices(), st.integers(1, 12), st.lists(st.integers(0, 9), max_size=4))
def test_columns_in_blocks(scores: Tensor, k: int, cuts: list[int]) -> None:
    check(columns_topk(iter(cut(scores, cuts)), k), scores.T, k)


def test_all_equal_gives_the_first_ones() -> None:
    scores = torch.zeros(3, 500)
    assert stable_topk(scores, 4).index.tolist() == [[0, 1, 2, 3]] * 3
    assert columns_topk([scores.T[:100], scores.T[100:]], 4).index.tolist() == [[0, 1, 2, 3]] * 3


def test_a_large_random_matrix() -> None:
    scores = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    for k in (1, 10, 300):
        check(stable_topk(scores, k), scores, k)
        check(columns_topk(scores.split(7), k), scores.T, k)


def test_nan_in_one_row_leaves_a_tie_in_another() -> None:
    scores = torch.tensor([[math.nan, 1.0, 0.0], [1.0, 1.0, 1.0], [math.nan, math.nan, math.nan]])
    assert stable_topk(scores, 2).index.tolist() == [[0, 1], [0, 1], [0, 1]]
    assert rows_topk(scores.split(1), 2).index.tolist() == [[0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("rows", "texts", "expected"),
    [(264, 0, 264), (264, 100_000, 264), (264, 1_000_000, 33), (64, 1_000_000, 33), (264, 10**9, 1)],
)
def test_long_rows_come_in_smaller_blocks(rows: int, texts: int, expected: int) -> None:
    assert streamed_rows(rows, texts) == expected


def test_no_queries() -> None:
    got = stable_topk(torch.zeros(0, 5), 3)
    assert got.index.shape == got.score.shape == (0, 3)


def test_nothing_to_choose_from() -> None:
    assert stable_topk(torch.zeros(2, 0), 3).index.shape == (2, 0)


def test_none_asked_for() -> None:
    assert stable_topk(torch.zeros(2, 5), 0).index.shape == (2, 0)
