"""The one ordering: (−score, index), NaN first, whatever the blocks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.scoring import topk
from vacsr.scoring.topk import TopK, best_of, blocks_topk, stable_topk

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)
SIZES = (0.0, 1.0, 1.0 + 2.0**-23, 2.0, 1e-45, 3e38, math.inf, math.nan)
VALUES = [*SIZES, *(-size for size in SIZES)]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Ties in almost every row, often across the border, and every kind of float; float32 or float64."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    flat = draw(st.lists(st.sampled_from(VALUES), min_size=rows * cols, max_size=rows * cols))
    return torch.tensor(flat, dtype=draw(st.sampled_from([torch.float32, torch.float64]))).view(rows, cols)


def expected(scores: Tensor, k: int) -> list[list[int]]:
    """By (−score, index), NaN before all."""

    def key(value: float) -> tuple[bool, float]:
        return not math.isnan(value), 0.0 if math.isnan(value) else -value

    return [sorted(range(len(row)), key=lambda j, row=row: (*key(row[j]), j))[:k] for row in scores.tolist()]


def check(top: TopK, scores: Tensor, k: int) -> None:
    assert top.index.tolist() == expected(scores, k)
    torch.testing.assert_close(top.score, scores.gather(1, top.index), atol=0, rtol=0, equal_nan=True)


def cut(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    edges = sorted({0, len(matrix), *(min(c, len(matrix)) for c in cuts)})
    return [matrix[a:b] for a, b in pairwise(edges)]


@PROPERTY
@given(matrices(), st.integers(1, 12), st.lists(st.integers(0, 9), max_size=4))
def test_topk_is_the_full_sort(scores: Tensor, k: int, cuts: list[int]) -> None:
    check(stable_topk(scores, k), scores, k)
    matrices = {"i2t": scores, "t2i": scores.T}
    for directions in (["i2t"], ["t2i"], ["i2t", "t2i"], ["t2i", "i2t"]):
        tops = blocks_topk(iter(cut(scores, cuts)), k, directions=directions)
        for top, direction in zip(tops, directions, strict=True):
            check(top, matrices[direction], k)


@PROPERTY
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=9), st.integers(0, 2**32 - 1))
def test_keys_hold_score_and_index(values: list[float], index: int) -> None:
    scores = torch.tensor(values)
    back = topk.from_keys(topk.order_keys(scores, torch.full(scores.shape, index)))
    assert back.index.eq(index).all()
    torch.testing.assert_close(back.score, scores, atol=0, rtol=0, equal_nan=True)


def test_candidates_go_by_score_then_index() -> None:
    assert best_of(torch.zeros(1, 3), torch.tensor([[7, 2, 5]]), k=2).index.tolist() == [[2, 5]]
    assert best_of(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[7, 2, 5]]), k=9).index.tolist() == [[2, 5, 7]]


def test_float64_scores_that_float32_cannot_tell_apart() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 1.0]], dtype=torch.float64)
    assert stable_topk(scores, 3).index.tolist() == [[1, 0, 2]]
    wide = scores.T.expand(3, 700)
    assert blocks_topk(wide.split(1), 3)[1].index.tolist() == [[1, 0, 2]] * 700


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_to_choose_from(shape: tuple[int, int]) -> None:
    top = stable_topk(torch.zeros(shape), 3)
    assert top.index.shape == top.score.shape == (shape[0], min(3, shape[1]))
    assert stable_topk(torch.zeros(2, 5), 0).index.shape == (2, 0)
