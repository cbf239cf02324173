"""Moments of the cosine of two Gaussian vectors, against samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.scoring.cosine import Gaussians, Moments, cosine_moments, coupled_cosine_moments, dot_moments

DRAWS = 50_000


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussians(dim: int, *, spread: float, seed: int = 0, near: Tensor | None = None) -> Gaussians:
    """One vector of about unit length whose squared noise is about ``spread``, unevenly over the coordinates."""
    mean = functional.normalize(random(1, dim, seed=seed) + (0.0 if near is None else 3.0 * dim**0.5 * near), dim=1)
    return Gaussians(mean, spread / dim * 2.0 * torch.rand(1, dim, generator=torch.Generator().manual_seed(seed)))


def draws(x: Gaussians, *, seed: int) -> Tensor:
    return x.mean + x.variance.sqrt() * random(DRAWS, x.mean.shape[1], seed=seed)


def sampled(values: Tensor) -> Moments:
    return Moments(values.mean(), values.var())


def test_the_moments_of_a_dot_product_are_those_of_samples() -> None:
    x, y = gaussians(5, spread=2.0, seed=1), gaussians(5, spread=0.5, seed=2)
    expected = sampled((draws(x, seed=3) * draws(y, seed=4)).sum(dim=1))
    found = dot_moments(x, y)
    assert float(found.mean) == pytest.approx(float(expected.mean), abs=0.01)
    assert float(found.variance) == pytest.approx(float(expected.variance), rel=0.02)


def test_held_norms_scale_the_dot_product_by_its_expected_lengths() -> None:
    x, y = gaussians(7, spread=1.0, seed=1), gaussians(7, spread=0.3, seed=2)
    a, b = draws(x, seed=3), draws(y, seed=4)
    lengths = (a.square().sum(dim=1).mean() * b.square().sum(dim=1).mean()).sqrt()
    expected = sampled((a * b).sum(dim=1) / lengths)
    found = cosine_moments(x, y)
    assert float(found.mean) == pytest.approx(float(expected.mean), abs=0.005)
    assert float(found.variance) == pytest.approx(float(expected.variance), rel=0.02)


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("close", [True, False])
def test_coupled_moments_are_those_of_sampled_cosines(spread: float, close: bool) -> None:
    x = gaussians(64, spread=spread, seed=1)
    y = gaussians(64, spread=spread / 2, seed=2, near=x.mean if close else None)
    expected = sampled(functional.cosine_similarity(draws(x, seed=3), draws(y, seed=4), dim=1))
    found = coupled_cosine_moments(x, y)
    assert float(found.mean) == pytest.approx(float(expected.mean), abs=0.01)
    assert float(found.variance) == pytest.approx(float(expected.variance), rel=0.05)
    held = cosine_moments(x, y)
    assert float(held.mean) == pytest.approx(float(expected.mean), abs=0.01)
    if close:  # noise along a vector does not turn it, which held norms do not know
        assert float(held.variance) > 2.0 * float(expected.variance)
    else:
        assert float(held.variance) == pytest.approx(float(expected.variance), rel=0.1)


@pytest.mark.parametrize("moments", [cosine_moments, coupled_cosine_moments])
def test_moments_do_not_see_a_vector_s_length(moments: Any) -> None:
    x, y = gaussians(6, spread=0.4, seed=1), gaussians(6, spread=0.2, seed=2)
    longer = Gaussians(3.0 * x.mean, 9.0 * x.variance)
    torch.testing.assert_close(moments(longer, y), moments(x, y))
