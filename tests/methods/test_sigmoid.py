from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vacsr.methods import Embedding, Sigmoid
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.pairwise import batch_block

PROPERTY = settings(max_examples=20, deadline=None, derandomize=True)
ids_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def case(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    v, t = functional.normalize(torch.randn(2, size, 4, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return v.requires_grad_(), t.requires_grad_()


@PROPERTY
@given(ids_strategy, st.floats(-12, 12), st.floats(-12, 12))
def test_it_is_the_plain_loop(ids: list[int], scale: float, bias: float) -> None:
    size = len(ids)
    v, t = case(size)
    method = Sigmoid(SigmoidConfig(scale=scale, bias=bias), dim=8)
    got = method.loss(Embedding(v), Embedding(t), batch_block(torch.tensor(ids), seed=0, step=0))
    cosine = (v @ t.T).tolist()
    total, slope_a, slope_b = 0.0, 0.0, 0.0
    for i in range(size):
        for j in range(size):
            sign = 1 if ids[i] == ids[j] else -1
            margin = sign * (scale * cosine[i][j] + bias)
            total += math.log1p(math.exp(-margin)) / size
            slope = -sign / (1 + math.exp(margin)) / size
            slope_a, slope_b = slope_a + slope * cosine[i][j], slope_b + slope
    assert got.total.item() == pytest.approx(total, rel=1e-4, abs=1e-5)
    (grad,) = torch.autograd.grad(got.total, [method.affine])
    assert grad.tolist() == pytest.approx([slope_a, slope_b], rel=1e-3, abs=1e-4)


@PROPERTY
@given(ids_strategy, st.lists(st.integers(0, 6), max_size=3))
def test_row_blocks_add_up(ids: list[int], cuts: list[int]) -> None:
    v, t = case(len(ids))
    method, block = Sigmoid(SigmoidConfig(scale=5.0, bias=-2.0), dim=8), batch_block(torch.tensor(ids), seed=0, step=0)
    assert method.pairwise
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    rows = [slice(a, b) for a, b in pairwise(edges)]
    whole = method.loss(Embedding(v), Embedding(t), block)
    parts = [method.loss(Embedding(v[r]), Embedding(t), block.rows(r)) for r in rows]
    total = torch.stack([p.total for p in parts]).sum()
    torch.testing.assert_close(total, whole.total)
    torch.testing.assert_close(sum(p.parts["bce"] for p in parts), whole.parts["bce"])
    inputs = [v, t, method.affine]
    for ours, theirs in zip(torch.autograd.grad(total, inputs), torch.autograd.grad(whole.total, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_score_grade_and_groups() -> None:
    method, (v, t) = Sigmoid(SigmoidConfig(), dim=8), case(3)
    score = method.score(Embedding(v), Embedding(t))
    torch.testing.assert_close(score, v @ t.T)
    torch.testing.assert_close(method.grade(score), torch.sigmoid(10 * score - 10))
    assert method.uncertainty(Embedding(v), Embedding(t)) is None
    (group,) = method.param_groups()
    assert group.params == [method.affine]
    assert not group.decay
    assert Sigmoid(SigmoidConfig(learnable=False), dim=8).param_groups() == []
