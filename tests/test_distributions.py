from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence
from torch.nn import functional

from vacsr.distributions import (
    bounded_variance,
    kl_to_standard_normal,
    mixture_draw,
    mixture_kl_bound,
    relaxed_one_hot,
    ste_sigmoid,
)
from vacsr.noise import PairNoise

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))  # N, K, D, seed


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_ste_sigmoid_is_a_sigmoid_with_slope_one() -> None:
    logit = torch.linspace(-30, 30, 101, requires_grad=True)
    out = ste_sigmoid(logit)
    assert torch.equal(out, torch.sigmoid(logit))
    upstream = torch.linspace(-2, 5, 101)
    (grad,) = torch.autograd.grad(out, logit, upstream)
    assert torch.equal(grad, upstream)


@PROPERTY
@given(sizes, st.floats(0.1, 5))
def test_relaxed_one_hot_is_torchs_formula(size: tuple[int, int, int, int], temperature: float) -> None:
    n, k, _, seed = size
    log_alpha, gumbel = random(k, seed=seed).log_softmax(0), random(n, k, seed=seed + 1)
    got = relaxed_one_hot(log_alpha, gumbel, temperature=temperature)
    for row, g in zip(got, gumbel, strict=True):
        raw = [math.exp((float(a) + float(x)) / temperature) for a, x in zip(log_alpha, g, strict=True)]
        torch.testing.assert_close(row, torch.tensor([x / sum(raw) for x in raw], dtype=torch.float64))
    # Per-pair log α broadcasts to the same.
    torch.testing.assert_close(relaxed_one_hot(log_alpha.expand(n, k), gumbel, temperature=temperature), got)


@pytest.mark.parametrize("hard", [False, True])
def test_relaxed_one_hot_is_gumbel_softmax(hard: bool) -> None:
    # torch draws its Gumbel noise as -log of exponentials: repeat that draw and hand it over.
    logits = random(6, 3, seed=0).log_softmax(-1).float()
    torch.manual_seed(5)
    expected = functional.gumbel_softmax(logits, tau=0.7, hard=hard)
    torch.manual_seed(5)
    gumbel = -torch.empty_like(logits).exponential_().log()
    torch.testing.assert_close(relaxed_one_hot(logits, gumbel, temperature=0.7, hard=hard), expected)


def test_hard_one_hot_has_the_soft_gradient() -> None:
    log_alpha = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log().requires_grad_()
    gumbel, upstream = random(7, 3, seed=1), random(7, 3, seed=2)
    soft, hard = (relaxed_one_hot(log_alpha, gumbel, temperature=0.5, hard=h) for h in (False, True))
    assert torch.equal(hard.detach().round(decimals=6).sum(-1), torch.ones(7, dtype=torch.float64))
    assert torch.equal(hard.argmax(-1), soft.argmax(-1))
    assert ((hard.detach() - hard.detach().round()).abs() < 1e-12).all()
    gradients = [torch.autograd.grad(x, log_alpha, upstream)[0] for x in (soft, hard)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


def test_hard_one_hot_picks_components_with_probability_alpha() -> None:
    alpha = torch.tensor([0.1, 0.3, 0.6])
    gumbel = PairNoise.create(seed=0, step=0, rows=150, cols=150).gumbel(3)
    share = relaxed_one_hot(alpha.log(), gumbel, hard=True).mean(dim=(0, 1))
    torch.testing.assert_close(share, alpha, atol=4 * 0.5 / 150, rtol=0)


@PROPERTY
@given(sizes)
def test_mixture_draw_is_the_loop(size: tuple[int, int, int, int]) -> None:
    n, k, d, seed = size
    mean, log_var, noise = (random(n, k, d, seed=seed + i) for i in range(3))
    weights = random(n, k, seed=seed + 3).softmax(-1)
    got = mixture_draw(mean, log_var, weights=weights, noise=noise)
    assert got.shape == (n, d)
    for i in range(n):
        for j in range(d):
            z = 0.0
            for c in range(k):
                sigma = math.sqrt(math.exp(float(log_var[i, c, j])))
                z += float(weights[i, c]) * (float(mean[i, c, j]) + sigma * float(noise[i, c, j]))
            assert float(got[i, j]) == pytest.approx(z, rel=1e-9, abs=1e-9)


def test_draws_have_the_mixtures_moments() -> None:
    # With a hard one-hot the draw is a true mixture sample: compare with torch's closed-form mean and variance.
    mean = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    log_var = torch.tensor([[0.5, -1.0], [-0.5, 0.3]])
    alpha = torch.tensor([0.3, 0.7])
    side = 250
    pairs = PairNoise.create(seed=9, step=1, rows=side, cols=side)
    weights = relaxed_one_hot(alpha.log(), pairs.gumbel(2), hard=True)
    z = mixture_draw(mean, log_var, weights=weights, noise=pairs.normal(4).view(side, side, 2, 2)).flatten(0, 1)
    truth = MixtureSameFamily(Categorical(alpha), Independent(Normal(mean, (0.5 * log_var).exp()), 1))
    error = truth.variance.sqrt() / side
    assert ((z.mean(0) - truth.mean).abs() < 4 * error).all()
    torch.testing.assert_close(z.var(0), truth.variance, rtol=0.03, atol=0)


@PROPERTY
@given(sizes)
def test_kl_is_torchs(size: tuple[int, int, int, int]) -> None:
    n, k, d, seed = size
    mean, log_var = random(n, k, d, seed=seed), random(n, k, d, seed=seed + 1)
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = kl_divergence(Normal(mean, (0.5 * log_var).exp()), prior).sum(-1)
    torch.testing.assert_close(kl_to_standard_normal(mean, log_var), expected)


def test_kl_is_zero_at_the_prior_only() -> None:
    assert kl_to_standard_normal(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]
    off = kl_to_standard_normal(torch.full((1, 3), 0.1), torch.full((1, 3), 0.1))
    assert float(off) > 0


@PROPERTY
@given(sizes)
def test_kl_is_the_loop(size: tuple[int, int, int, int]) -> None:
    n, k, d, seed = size
    mean, log_var = random(n, k, d, seed=seed), random(n, k, d, seed=seed + 1)
    got = kl_to_standard_normal(mean, log_var)
    for i in range(n):
        for c in range(k):
            pairs = zip(mean[i, c].tolist(), log_var[i, c].tolist(), strict=True)
            assert float(got[i, c]) == pytest.approx(sum(0.5 * (m * m + math.exp(s) - 1 - s) for m, s in pairs))


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_lies_above_the_mixtures_kl(seed: int) -> None:
    k, d, count = 3, 2, 40_000
    mean, log_var = 1.5 * random(k, d, seed=seed), random(k, d, seed=seed + 50)
    log_alpha = random(k, seed=seed + 90).log_softmax(0)
    bound = float(mixture_kl_bound(log_alpha.exp(), kl_to_standard_normal(mean, log_var)))
    mixture = MixtureSameFamily(Categorical(logits=log_alpha), Independent(Normal(mean, (0.5 * log_var).exp()), 1))
    prior = Independent(Normal(torch.zeros(d).double(), torch.ones(d).double()), 1)
    torch.manual_seed(seed)
    z = mixture.sample((count,))
    ratio = mixture.log_prob(z) - prior.log_prob(z)
    estimate, error = float(ratio.mean()), float(ratio.std()) / math.sqrt(count)
    assert bound > estimate + 4 * error
    # The gap is the components' mutual information, at most their entropy.
    entropy = float(Categorical(logits=log_alpha).entropy())
    assert bound < estimate + entropy + 4 * error


def test_the_bound_is_tight_when_components_coincide() -> None:
    mean, log_var = random(1, 4, seed=0).expand(3, 4), random(1, 4, seed=1).expand(3, 4)
    log_alpha = torch.tensor([0.2, 0.3, 0.5]).double().log()
    prior = Independent(Normal(torch.zeros(4).double(), torch.ones(4).double()), 1)
    exact = kl_divergence(Independent(Normal(mean[0], (0.5 * log_var[0]).exp()), 1), prior)
    torch.testing.assert_close(mixture_kl_bound(log_alpha.exp(), kl_to_standard_normal(mean, log_var)), exact)


@PROPERTY
@given(sizes, st.booleans())
def test_the_bound_is_the_weighted_sum(size: tuple[int, int, int, int], per_pair: bool) -> None:
    n, k, d, seed = size
    kl = random(n, k, d, seed=seed).square().sum(dim=-1)
    alpha = random(*((n, k) if per_pair else (k,)), seed=seed + 2).softmax(-1)
    got = mixture_kl_bound(alpha, kl)
    assert got.shape == (n,)
    alpha = alpha.expand(n, k)
    for i in range(n):
        assert float(got[i]) == pytest.approx(sum(float(alpha[i, c]) * float(kl[i, c]) for c in range(k)))


def test_gradients_agree_with_finite_differences() -> None:
    mean, log_var = random(2, 2, 3, seed=0).requires_grad_(), random(2, 2, 3, seed=1).requires_grad_()
    log_alpha, noise = random(2, seed=2).log_softmax(0).requires_grad_(), random(2, 2, 3, seed=3)
    weights = random(2, 2, seed=4).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m, s, a: mixture_kl_bound(a.exp(), kl_to_standard_normal(m, s)), (mean, log_var, log_alpha)
    )
    assert torch.autograd.gradcheck(
        lambda m, s, w: mixture_draw(m, s, weights=w, noise=noise), (mean, log_var, weights)
    )


def test_bounded_variance_is_sigma_squared_over_one_plus() -> None:
    variance = torch.tensor([1e-3, 0.5, 1.0, 40.0], dtype=torch.float64)
    torch.testing.assert_close(bounded_variance(variance.log()), variance / (1 + variance))
