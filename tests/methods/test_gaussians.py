from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding
from vacsr.methods.gaussians import bottleneck, kl_per_dimension, squared_distances
from vacsr.methods.pcmepp import Pcmepp, PcmeppConfig
from vacsr.pairwise import batch_block


def items(count: int, dim: int = 4, *, seed: int = 0) -> Embedding:
    mean, log_var = torch.randn(2, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Embedding(mean, log_var - 1)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_squared_distances_are_those_of_torch(rows: int, cols: int, dim: int, seed: int) -> None:
    x, y = items(rows, dim, seed=seed).mean, items(cols, dim, seed=seed + 1).mean
    torch.testing.assert_close(squared_distances(x, y), torch.cdist(x, y).square())


def test_rounding_gives_no_negative_distance() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 100
    assert squared_distances(x, x).min() >= 0


def test_the_divergence_is_torchs() -> None:
    x = items(5)
    assert x.log_var is not None
    standard = Normal(torch.zeros_like(x.mean), torch.ones_like(x.mean))
    expected = kl_divergence(Normal(x.mean, (x.log_var / 2).exp()), standard).mean(dim=1)
    torch.testing.assert_close(kl_per_dimension(x), expected)


def test_the_bottlenecks_of_row_blocks_add_up() -> None:
    v, t = items(6, seed=1), items(6, seed=2)
    block = batch_block(torch.arange(6), seed=0, step=0)
    whole = bottleneck(v, t, block)
    torch.testing.assert_close(whole, kl_per_dimension(v).mean() + kl_per_dimension(t).mean())
    assert v.log_var is not None
    parts = [
        bottleneck(Embedding(v.mean[rows], v.log_var[rows]), t, block.rows(rows)) for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_uncertainty_is_the_variance_of_both() -> None:
    v, t = items(3, seed=1), items(3, seed=2)
    assert v.log_var is not None
    assert t.log_var is not None
    expected = [sum((v.log_var[n, d].exp() + t.log_var[n, d].exp()).item() for d in range(4)) for n in range(3)]
    torch.testing.assert_close(
        Pcmepp(PcmeppConfig(), dim=4).uncertainty(v, t), torch.tensor(expected, dtype=torch.float64)
    )


def test_means_alone_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no variance.*MatchingModel\.build"):
        Pcmepp(PcmeppConfig(), dim=2).uncertainty(Embedding(torch.ones(1, 2)), Embedding(torch.ones(1, 2)))
