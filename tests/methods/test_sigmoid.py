import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig

from .cases import assert_same, block, pair


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.floats(-12, 12), st.floats(-12, 12))
def test_it_is_the_plain_loop(ids: list[int], scale: float, bias: float) -> None:
    v, t = pair(0, len(ids))
    method = Sigmoid(SigmoidConfig(scale=scale, bias=bias), dim=8)
    logit = method.affine[0] * (v.mean @ t.mean.T) + method.affine[1]
    expected = torch.zeros(())
    for i, image in enumerate(ids):
        for j, other in enumerate(ids):
            p = torch.sigmoid(logit[i, j].double())
            expected = expected - (p if image == other else 1 - p).log() / len(ids)
    leaves = [v.mean, t.mean, method.affine]
    assert_same(method.loss(v, t, block(ids)).total, expected, leaves, atol=1e-4, rtol=1e-4)


def test_the_bias_takes_part_in_grade_and_likelihood() -> None:
    method = Sigmoid(SigmoidConfig(scale=4.0, bias=-3.0), dim=8)
    assert method.grade(torch.tensor(0.5)).item() == pytest.approx(1 / (1 + math.exp(1.0)))
    assert method.likelihood() == ("logistic", 4.0, -3.0)
