from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vacsr.methods import Embedding, InfoNCE
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.pairwise import batch_block


def case(seed: int, size: int, dim: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    v, t = functional.normalize(torch.randn(2, size, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return v.requires_grad_(), t.requires_grad_()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.floats(0.5, 50), st.integers(0, 99))
def test_it_is_torchs_cross_entropy(size: int, scale: float, seed: int) -> None:
    method, (v, t) = InfoNCE(InfoNCEConfig(scale=scale), dim=8), case(seed, size)
    ids = torch.arange(size).remainder(3)  # other captions of the image stay negatives
    terms = method.loss(Embedding(v), Embedding(t), batch_block(ids, seed=0, step=0))
    logit, own = scale * (v @ t.T), torch.arange(size)
    rows, cols = functional.cross_entropy(logit, own), functional.cross_entropy(logit.T, own)
    torch.testing.assert_close(terms.total, (rows + cols) / 2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["i2t"], rows.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["t2i"], cols.detach(), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(terms.total, [v, t]), torch.autograd.grad((rows + cols) / 2, [v, t]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_ids_spread_the_target_over_the_images_captions() -> None:
    ids = [4, 4, 5, 4]
    method, (v, t) = InfoNCE(InfoNCEConfig(scale=3.0, positives="ids"), dim=8), case(1, 4)
    got = method.loss(Embedding(v), Embedding(t), batch_block(torch.tensor(ids), seed=0, step=0))
    logit = 3.0 * (v @ t.T)
    total = 0.0
    for matrix in (logit.tolist(), logit.T.tolist()):
        for i, row in enumerate(matrix):
            whole = sum(math.exp(x) for x in row)
            own = [j for j in range(4) if ids[j] == ids[i]]
            total -= sum(math.log(math.exp(row[j]) / whole) for j in own) / len(own) / 4 / 2
    assert got.total.item() == pytest.approx(total, rel=1e-5)
    diagonal = InfoNCE(InfoNCEConfig(scale=3.0), dim=8)
    assert diagonal.loss(
        Embedding(v), Embedding(t), batch_block(torch.tensor(ids), seed=0, step=0)
    ).total.item() != pytest.approx(total, rel=1e-3)


def test_scale_score_and_uncertainty() -> None:
    method, (v, t) = InfoNCE(InfoNCEConfig(), dim=8), case(0, 3)
    assert not method.pairwise
    assert method.log_scale.exp().item() == pytest.approx(14.3)
    torch.testing.assert_close(method.score(Embedding(v), Embedding(t)), v @ t.T)
    assert method.uncertainty(Embedding(v), Embedding(t)) is None
    (group,) = method.param_groups()
    assert group.params == [method.log_scale]
    assert not group.decay
    assert InfoNCE(InfoNCEConfig(learnable=False), dim=8).param_groups() == []


def test_the_scale_learns_by_its_logarithm() -> None:
    method, (v, t) = InfoNCE(InfoNCEConfig(scale=2.0), dim=8), case(3, 4)
    block = batch_block(torch.arange(4), seed=0, step=0)
    (grad,) = torch.autograd.grad(method.loss(Embedding(v), Embedding(t), block).total, [method.log_scale])

    def at(log_scale: float) -> float:
        logit, own = math.exp(log_scale) * (v @ t.T).double(), torch.arange(4)
        return (functional.cross_entropy(logit, own) + functional.cross_entropy(logit.T, own)).item() / 2

    here, step = math.log(2.0), 1e-5
    assert grad.item() == pytest.approx((at(here + step) - at(here - step)) / (2 * step), rel=1e-3)
