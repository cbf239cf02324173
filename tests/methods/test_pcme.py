import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from vacsr.errors import UsageError
from vacsr.methods import Embedding
from vacsr.methods.base import take
from vacsr.methods.pcme import Pcme, PcmeConfig, scoring_noise
from vacsr.noise import RowNoise, Stream

from .cases import assert_same, block, gaussians

IMAGES, TEXTS = Stream.IMAGE_SAMPLES, Stream.TEXT_SAMPLES


def pcme(**fields: Any) -> Pcme:
    return Pcme(PcmeConfig(**{"samples": 2, **fields}), dim=8).double()


def noise(rows: int | list[int], *, step: int = 3, stream: Stream = IMAGES) -> RowNoise:
    return RowNoise(5, torch.tensor(step), torch.arange(rows) if isinstance(rows, int) else torch.tensor(rows), stream)


def divergence(x: Embedding) -> Tensor:
    """KL to N(0, I) of every item and dimension."""
    assert x.log_var is not None
    return kl_divergence(Normal(x.mean, (0.5 * x.log_var).exp()), Normal(0.0, 1.0))


def test_means_alone_are_refused() -> None:
    with pytest.raises(UsageError, match=r"MatchingModel\.build"):
        pcme().uncertainty(Embedding(torch.ones(1, 2)), Embedding(torch.ones(1, 2)))


def test_draws_are_standard_normal_and_go_by_position_and_step() -> None:
    draws = noise(2000).normal(51)
    assert draws.shape == (2000, 51)
    assert draws.mean().abs() < 0.01
    assert abs(draws.std().item() - 1) < 0.01
    assert abs((draws**4).mean().item() - 3) < 0.1
    assert (torch.corrcoef(draws.T) - torch.eye(51)).abs().max() < 0.12, "lanes share no bits"
    assert torch.equal(noise([5, 1999]).normal(51), draws[[5, 1999]])
    assert not torch.equal(noise(2000, step=4).normal(51), draws)


def probability(method: Pcme, v: Embedding, t: Embedding, draws: tuple[Tensor, Tensor], i: int, j: int) -> Tensor:
    """Of image i and text j: the mean over all samples of e^l/(e^l + e^−l)."""
    assert v.log_var is not None
    assert t.log_var is not None
    a, b = method.affine
    images = v.mean[i] + (v.log_var[i] / 2).exp() * draws[0][i % len(draws[0])]
    texts = t.mean[j] + (t.log_var[j] / 2).exp() * draws[1][j % len(draws[1])]
    logits = [b - a * (x - y).square().sum().sqrt() for x in images for y in texts]
    return torch.stack([logit.exp() / (logit.exp() + (-logit).exp()) for logit in logits]).mean()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.floats(0.5, 4), st.floats(-2, 4), st.integers(0, 99))
def test_the_loss_and_its_gradient_pair_by_pair(size: int, scale: float, shift: float, seed: int) -> None:
    ids = [number % 3 for number in range(size)]
    method, v, t = pcme(scale=scale, shift=shift, vib_weight=0.3), gaussians(seed, size), gaussians(seed + 1, size)
    first, second = (noise(size, stream=s).normal(6).double().view(size, 2, 3) for s in (IMAGES, TEXTS))
    expected = 0.3 * (divergence(v).mean() + divergence(t).mean())
    for i in range(size):
        for j in range(size):
            p = probability(method, v, t, (first, second), i, j)
            expected = expected - 2 * (p if ids[i] == ids[j] else 1 - p).log()
    leaves = [x for x in (v.mean, v.log_var, t.mean, t.log_var, method.affine) if x is not None]
    assert_same(method.loss(v, t, block(ids)).total, expected, leaves, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("vib", ["mean", "sum"])
def test_blocks_of_rows_add_up_to_the_batch(vib: str) -> None:
    method, v, t = pcme(vib_reduction=vib, vib_weight=0.2), gaussians(1, 6), gaussians(2, 6)
    batch = block([0, 0, 1, 2, 3, 3])
    whole = method.loss(v, t, batch)
    parts = [method.loss(take(v, rows), t, batch.rows(rows)) for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total)
    for name in ("match", "vib"):
        torch.testing.assert_close(parts[0].parts[name] + parts[1].parts[name], whole.parts[name])
    total = divergence(v).sum() + divergence(t).sum()
    torch.testing.assert_close(whole.parts["vib"], total.detach() / (1 if vib == "sum" else 6 * 3))
    torch.testing.assert_close(whole.total.detach(), whole.parts["match"] + 0.2 * whole.parts["vib"])


@pytest.mark.parametrize("scale", [5.0, 500.0])
def test_far_pairs_and_equal_items_have_finite_gradients(scale: float) -> None:
    """exp of a logit of −1000 is 0 in any precision, its logarithm is not; and the root of 0 has no slope."""
    method = Pcme(PcmeConfig(scale=scale, samples=2), dim=8)
    mean = torch.cat((torch.ones(2, 3), torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))).requires_grad_()
    x = Embedding(mean, torch.full((4, 3), -200.0, requires_grad=True))
    total = method.loss(x, x, block(range(4))).total
    assert x.log_var is not None
    assert total.isfinite()
    for gradient in torch.autograd.grad(total, [mean, x.log_var, method.affine]):
        assert gradient.isfinite().all()


def test_the_score_is_the_logit_of_the_mean_match_probability() -> None:
    method, v, t = pcme(samples=3), gaussians(1, 4), gaussians(2, 5)
    draws = tuple(scoring_noise(s, v.mean.device).normal(9).double().view(1, 3, 3) for s in (IMAGES, TEXTS))
    assert not torch.equal(*draws), "images and texts have draws of their own"
    grade = method.grade(method.score(v, t))
    for i in range(4):
        for j in range(5):
            torch.testing.assert_close(grade[i, j], probability(method, v, t, (draws[0], draws[1]), i, j))


def test_scores_do_not_depend_on_who_else_is_scored() -> None:
    method, v, t = pcme(), gaussians(1, 7), gaussians(2, 6)
    whole = method.score(v, t)
    torch.testing.assert_close(method.score(take(v, slice(3, 5)), take(t, slice(2, 3))), whole[3:5, 2:3])
    method.at_once = 2 * 6 * 4  # two images at a time
    torch.testing.assert_close(method.score(v, t), whole)
    assert method.score(take(v, slice(0, 0)), t).shape == (0, 6)


def test_sure_and_hopeless_pairs_keep_their_order() -> None:
    method = Pcme(PcmeConfig(scale=40.0, shift=40.0, samples=2), dim=8)
    angle = torch.linspace(0.0, math.pi, 9)
    v = Embedding(torch.tensor([[1.0, 0.0]]), torch.full((1, 2), -20.0))
    t = Embedding(torch.stack((angle.cos(), angle.sin()), dim=1), torch.full((9, 2), -20.0))
    assert (method.score(v, t)[0].diff() < 0).all(), "probabilities would round to 1 and 0"
