import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vacsr.methods.infonce import InfoNCE, InfoNCEConfig

from .cases import assert_same, block, pair


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.floats(0.5, 50), st.integers(0, 99))
def test_it_is_torchs_cross_entropy(size: int, scale: float, seed: int) -> None:
    method, (v, t) = InfoNCE(InfoNCEConfig(scale=scale), dim=8), pair(seed, size)
    terms = method.loss(v, t, block([n % 3 for n in range(size)]))  # other captions of the image stay negatives
    logit, own = method.log_scale.exp() * (v.mean @ t.mean.T), torch.arange(size)
    assert method.likelihood() == ("softmax", pytest.approx(scale), 0.0)
    rows, cols = functional.cross_entropy(logit, own), functional.cross_entropy(logit.T, own)
    assert_same(terms.total, (rows + cols) / 2, [v.mean, t.mean, method.log_scale], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["i2t"], rows.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["t2i"], cols.detach(), atol=1e-5, rtol=1e-5)


def test_an_opinion_is_the_mean_of_both_directions() -> None:
    method, score = InfoNCE(InfoNCEConfig(scale=2.0), dim=8), torch.randn(3, 5)
    among_captions, among_images = functional.softmax(2 * score, dim=1), functional.softmax(2 * score.T, dim=1).T
    torch.testing.assert_close(method.opinion(score), (among_captions + among_images) / 2)


def test_ids_spread_the_target_over_the_images_captions() -> None:
    ids = [4, 4, 5, 4]
    v, t = pair(1, 4)
    logit = 3.0 * (v.mean @ t.mean.T)
    total = 0.0
    for matrix in (logit.tolist(), logit.T.tolist()):
        for i, row in enumerate(matrix):
            whole = sum(math.exp(x) for x in row)
            own = [j for j in range(4) if ids[j] == ids[i]]
            total -= sum(math.log(math.exp(row[j]) / whole) for j in own) / len(own) / 4 / 2
    spread, diagonal = (InfoNCE(InfoNCEConfig(scale=3.0, positives=kind), dim=8) for kind in ("ids", "diagonal"))
    assert spread.loss(v, t, block(ids)).total.item() == pytest.approx(total, rel=1e-5)
    assert diagonal.loss(v, t, block(ids)).total.item() != pytest.approx(total, rel=1e-3)
