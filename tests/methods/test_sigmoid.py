from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.methods import Sigmoid
from vacsr.methods.sigmoid import SigmoidConfig

from .cases import block, pair


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.floats(-12, 12), st.floats(-12, 12))
def test_it_is_the_plain_loop(ids: list[int], scale: float, bias: float) -> None:
    size, (v, t) = len(ids), pair(0, len(ids))
    method = Sigmoid(SigmoidConfig(scale=scale, bias=bias), dim=8)
    terms = method.loss(v, t, block(ids))
    cosine = (v.mean @ t.mean.T).tolist()
    total, slope_a, slope_b = 0.0, 0.0, 0.0
    for i in range(size):
        for j in range(size):
            sign = 1 if ids[i] == ids[j] else -1
            margin = sign * (scale * cosine[i][j] + bias)
            total += math.log1p(math.exp(-margin)) / size
            slope = -sign / (1 + math.exp(margin)) / size
            slope_a, slope_b = slope_a + slope * cosine[i][j], slope_b + slope
    assert terms.total.item() == pytest.approx(total, rel=1e-4, abs=1e-5)
    (grad,) = torch.autograd.grad(terms.total, [method.affine])
    assert grad.tolist() == pytest.approx([slope_a, slope_b], rel=1e-3, abs=1e-4)


def test_the_bias_takes_part_in_grade_and_likelihood() -> None:
    method = Sigmoid(SigmoidConfig(scale=4.0, bias=-3.0), dim=8)
    assert method.grade(torch.tensor(0.5)).item() == pytest.approx(1 / (1 + math.exp(1.0)))
    assert method.likelihood() == ("logistic", 4.0, -3.0)
