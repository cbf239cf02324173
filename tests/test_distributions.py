import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence
from torch.nn import functional

from vacsr.distributions import bounded_variance, kl_to_standard_normal, mixture_kl_bound, relaxed_one_hot

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))  # N, K, D, seed


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("hard", [False, True])
def test_relaxed_one_hot_is_gumbel_softmax(hard: bool) -> None:
    # torch draws its Gumbel noise as -log of exponentials: repeat that draw and hand it over.
    logits = random(6, 3, seed=0).log_softmax(-1).float()
    torch.manual_seed(5)
    expected = functional.gumbel_softmax(logits, tau=0.7, hard=hard)
    torch.manual_seed(5)
    gumbel = -torch.empty_like(logits).exponential_().log()
    torch.testing.assert_close(relaxed_one_hot(logits, gumbel, temperature=0.7, hard=hard), expected)
    shared = relaxed_one_hot(logits[0], gumbel, hard=hard)  # one α for all pairs
    torch.testing.assert_close(shared, relaxed_one_hot(logits[:1].expand(6, 3), gumbel, hard=hard))


@PROPERTY
@given(sizes)
def test_kl_is_torchs(size: tuple[int, int, int, int]) -> None:
    n, k, d, seed = size
    mean, log_var = random(n, k, d, seed=seed), random(n, k, d, seed=seed + 1)
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = kl_divergence(Normal(mean, (0.5 * log_var).exp()), prior).sum(-1)
    torch.testing.assert_close(kl_to_standard_normal(mean, log_var), expected)


def test_the_bound_lies_above_the_mixtures_kl() -> None:
    seed, k, d, count = 1, 3, 2, 40_000
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


def test_bounded_variance_is_sigma_squared_over_one_plus() -> None:
    variance = torch.tensor([1e-3, 0.5, 1.0, 40.0], dtype=torch.float64)
    torch.testing.assert_close(bounded_variance(variance.log()), variance / (1 + variance))
