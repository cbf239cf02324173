"""Nearest rows by rounded products are exact all the same: against integer sums, which are not rounded."""

from collections.abc import Collection

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from vacsr.search.nearest import nearest_rows


def search(
    vectors: Tensor, queries: Tensor, k: int, *, deleted: Collection[int] = (), block: int = 1 << 20
) -> list[list[int]]:
    gone = np.zeros(len(vectors), dtype=bool)
    gone[list(deleted)] = True
    norm = float(vectors.float().norm(dim=1).max())
    return nearest_rows(vectors, queries, k, deleted=gone, max_norm=norm, block_scores=block)[0].tolist()


def by_integers(vectors: Tensor, queries: Tensor, k: int, *, deleted: Collection[int] = ()) -> list[list[int]]:
    """Sums of integers, all below 2⁶³, rounded to float32 once, as scores are; equal ones by row."""
    sums = queries.to(torch.int64).numpy() @ vectors.to(torch.int64).numpy().T
    orders = np.argsort(-sums.astype(np.float64).astype(np.float32), axis=1, kind="stable").tolist()
    return [[row for row in order if row not in deleted][:k] for order in orders]


def near_ties(count: int, dim: int, *, seed: int, spread: int) -> Tensor:
    """Vectors that float16 holds exactly, all close to one, many equal, so that rounding misplaces many."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-1024, 1025, (1, dim), generator=generator)
    moved = torch.randint(-spread, spread + 1, (count, dim), generator=generator)
    return (base + moved * (torch.rand(count, dim, generator=generator) < 2 / dim)).float()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.float32]),
    count=st.integers(1, 300),
    dim=st.sampled_from([1, 3, 64, 700]),
    queries=st.integers(1, 9),
    k=st.integers(1, 40),
    spread=st.integers(0, 3),
    powers=st.tuples(st.integers(-14, 2), st.integers(-60, 30)),
    seed=st.integers(0, 10_000),
    block=st.sampled_from([7, 1 << 20]),
)
def test_near_ties_are_ranked_exactly(
    dtype: torch.dtype, count: int, dim: int, queries: int, k: int, spread: int, powers: tuple[int, int], seed: int,
    block: int,
) -> None:  # fmt: skip
    vectors = near_ties(count, dim, seed=seed, spread=spread)
    generator = torch.Generator().manual_seed(seed + 1)
    asked = torch.randint(-(2**20), 2**20, (queries, dim), generator=generator).float()
    deleted = set(torch.randperm(count, generator=generator)[: count // 3].tolist())
    stored = (vectors * 2.0 ** powers[0]).to(dtype)
    rows = search(stored, asked * 2.0 ** powers[1], k, deleted=deleted, block=block * queries)
    assert rows == by_integers(vectors, asked, k, deleted=deleted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1.0, 1e4, 3e5, 6e-8])
def test_lengths_at_the_ends_of_float16(dtype: torch.dtype, length: float) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-15, 16, (500, 40), generator=generator).float()
    scale = max(2.0 ** round(float(torch.tensor(length / 60).log2())), 2.0**-24)
    asked = torch.randint(-(2**20), 2**20, (3, 40), generator=generator).float()
    for power in (-100, 0, 30):
        assert search((vectors * scale).to(dtype), asked * 2.0**power, 25) == by_integers(vectors, asked, 25)
    assert search((vectors * scale).to(dtype), torch.zeros(1, 40), 4) == [[0, 1, 2, 3]]


def test_rising_rows_and_tiny_numbers() -> None:
    rising = torch.arange(500.0).unsqueeze(1).expand(-1, 3).contiguous()
    assert search(rising, torch.ones(2, 3), 4, block=20) == [[499, 498, 497, 496]] * 2
    assert search(rising, -torch.ones(1, 3), 3, block=10) == [[0, 1, 2]]
    tiny = torch.arange(1.0, 40.0).unsqueeze(1) * 2.0**-100
    assert search(tiny, torch.full((1, 1), 2.0**-49), 5) == [[38, 37, 36, 35, 34]]  # some scores are equal in float32
