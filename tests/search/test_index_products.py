"""Searches by rounded products are exact all the same: against sums of whole numbers, which are not rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from vacsr.search import blocked, open_index, products
from vacsr.search.exact import ExactIndex
from vacsr.search.products import arithmetics


def filled(folder: Path, vectors: Tensor, *, dtype: str, files: int = 2) -> ExactIndex:
    index = open_index(f"exact:{folder}", dim=vectors.shape[1], create=True, dtype=dtype)
    assert isinstance(index, ExactIndex)
    for rows in torch.arange(len(vectors)).chunk(files):
        index.add([str(row) for row in rows.tolist()], vectors[rows])
    return index


def by_whole_numbers(
    vectors: Tensor, queries: Tensor, k: int, *, dead: frozenset[int] = frozenset()
) -> list[list[str]]:
    """Sums of whole numbers, all below 2⁶³, rounded to float32 once, as scores are; equal ones by age."""
    sums = queries.to(torch.int64).numpy() @ vectors.to(torch.int64).numpy().T
    orders = np.argsort(-sums.astype(np.float64).astype(np.float32), axis=1, kind="stable").tolist()
    return [[str(row) for row in order if row not in dead][:k] for order in orders]


def near_ties(count: int, dim: int, *, seed: int, spread: int) -> Tensor:
    """Vectors that float16 holds exactly, all close to one, many of them equal, so that rounding misplaces many."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-1024, 1025, (1, dim), generator=generator)
    moved = torch.randint(-spread, spread + 1, (count, dim), generator=generator)
    few = torch.rand(count, dim, generator=generator) < 2 / dim
    return (base + moved * few).float()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(["float16", "float32"]),
    count=st.integers(1, 300),
    dim=st.sampled_from([1, 3, 64, 700]),
    queries=st.integers(1, 9),
    k=st.integers(1, 40),
    spread=st.integers(0, 3),
    vector_power=st.integers(-14, 2),
    query_power=st.integers(-60, 30),
    seed=st.integers(0, 10_000),
    block=st.sampled_from([7, 1 << 20]),
    alone=st.sampled_from([0, 1 << 25]),
)
def test_near_ties_are_ranked_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    count: int,
    dim: int,
    queries: int,
    k: int,
    spread: int,
    vector_power: int,
    query_power: int,
    seed: int,
    block: int,
    alone: int,
) -> None:
    vectors = near_ties(count, dim, seed=seed, spread=spread)
    generator = torch.Generator().manual_seed(seed + 1)
    asked = torch.randint(-(2**20), 2**20, (queries, dim), generator=generator).float()
    dead = frozenset(torch.randperm(count, generator=generator)[: count // 3].tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        index = filled(tmp_path_factory.mktemp("i") / "i", vectors * 2.0**vector_power, dtype=dtype)
        index.delete([str(row) for row in dead])
        patch.setattr(blocked, "_SCORES", block * queries)
        patch.setattr(products, "_ALONE", alone)
        found = index.search(asked * 2.0**query_power, k)
    assert found.ids == by_whole_numbers(vectors, asked, k, dead=dead)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("length", [1.0, 1e4, 3e5, 6e-8])
def test_lengths_at_the_ends_of_float16(tmp_path: Path, dtype: str, length: float) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-15, 16, (500, 40), generator=generator).float()
    scale = 2.0 ** round(float(torch.tensor(length / 60).log2()))  # up to beyond 65504, and to its smallest numbers
    scale = max(scale, 2.0**-24)
    asked = torch.randint(-(2**20), 2**20, (3, 40), generator=generator).float()
    index = filled(tmp_path / "i", vectors * scale, dtype=dtype)
    for power in (-100, 0, 30):
        assert index.search(asked * 2.0**power, 25).ids == by_whole_numbers(vectors, asked, 25)
    assert index.search(torch.zeros(1, 40), 4).ids == [["0", "1", "2", "3"]]


def test_numbers_too_small_for_float32_are_not_lost(tmp_path: Path) -> None:
    vectors = torch.arange(1.0, 40.0).unsqueeze(1)
    index = filled(tmp_path / "i", vectors * 2.0**-100, dtype="float32")
    assert index.search(torch.full((1, 1), 2.0**-49), 5).ids == [["38", "37", "36", "35", "34"]]  # some are equal, as 0


def test_rows_that_rise_are_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_SCORES", 10)
    vectors = torch.arange(500.0).unsqueeze(1).expand(-1, 3).contiguous()
    index = filled(tmp_path / "i", vectors, dtype="float32", files=3)
    assert index.search(torch.ones(2, 3), 4).ids == [["499", "498", "497", "496"]] * 2
    assert index.search(-torch.ones(1, 3), 3).ids == [["0", "1", "2"]]


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1e-3, 1.0, 3e4])
@pytest.mark.parametrize("alone", [0, 1 << 25])
def test_no_product_is_further_off_than_it_says(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, length: float, alone: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(400, 96, generator=generator), dim=1) * length
    kept = vectors.to(stored)
    queries = torch.randn(4, 96, generator=generator)
    queries[1] = kept[0].float() * 7  # the longest product that there can be
    queries[2] *= 1e-6
    monkeypatch.setattr(products, "_ALONE", alone)
    longest = float(kept.float().norm(dim=1).max())
    truth = queries.double() @ kept.double().T
    ways = list(arithmetics(queries, stored=stored, longest=longest))
    assert [way.queries.dtype for way in ways[-2:]] == [torch.float32, torch.float64]
    assert (ways[0].queries.dtype == torch.float16) == (stored == torch.float16)
    for way in ways:
        together = products.products(kept, way)
        singly = [products.products(kept, way._replace(queries=query)) for query in way.queries.split(1)]
        for found in (together, np.concatenate(singly)):
            off = np.abs(found * way.scale[:, None] - truth.numpy()).max(axis=1)
            assert (off <= way.error * way.scale).all()
        assert (way.error * way.scale <= queries.double().norm(dim=1).numpy() * (longest * 2e-3 + 1e-6)).all()


@pytest.mark.parametrize(
    ("stored", "queries", "longest", "expected"),
    [
        (torch.float16, 1, 1.0, True),
        (torch.float16, 4, 1.0, True),
        (torch.float16, 5, 1.0, False),
        (torch.float16, 1, 40_000.0, False),
        (torch.float32, 1, 1.0, False),
    ],
)
def test_float16_is_used_where_it_is_quick_and_cannot_overflow(
    stored: torch.dtype, queries: int, longest: float, expected: bool
) -> None:
    first = next(arithmetics(torch.ones(queries, 8), stored=stored, longest=longest))
    assert (first.queries.dtype == torch.float16) == expected


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_queries_of_any_strides_are_multiplied_in_the_usual_ones(stored: torch.dtype) -> None:
    odd = torch.ones(8)[:, None].T  # [1, 8] like any other, but BLAS goes by the strides
    assert odd.stride() == (1, 1)
    assert {way.queries.stride() for way in arithmetics(odd, stored=stored, longest=1.0)} == {(8, 1)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_arithmetic_that_is_worse_than_it_should_be_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    vectors = near_ties(200, 64, seed=3, spread=3)
    asked = torch.randint(-(2**20), 2**20, (2, 64), generator=torch.Generator().manual_seed(4)).float()
    index, tried = filled(tmp_path / "i", vectors, dtype=dtype), list[torch.dtype]()
    plain = products.products

    def poor(some: Tensor, way: products.Arithmetic) -> products.Floats:
        found = plain(some, way)
        if way.queries.dtype not in tried:
            tried.append(way.queries.dtype)
        if way.queries.dtype == torch.float64:
            return found
        return found * (1 + 0.05 * np.random.default_rng(len(some)).random(found.shape, np.float32))

    monkeypatch.setattr(blocked, "products", poor)
    assert index.search(asked, 9).ids == by_whole_numbers(vectors, asked, 9)
    wide = [torch.float32, torch.float64]
    assert tried == ([torch.float16, *wide] if dtype == "float16" else wide)


@contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_process_that_multiplies_roughly_searches_exactly(tmp_path: Path, dtype: str) -> None:
    vectors = near_ties(3000, 64, seed=5, spread=3)
    asked = torch.randint(-(2**20), 2**20, (6, 64), generator=torch.Generator().manual_seed(6)).float()
    index = filled(tmp_path / "i", vectors, dtype=dtype)
    with precision("medium"):
        assert index.search(asked, 30).ids == by_whole_numbers(vectors, asked, 30)
