"""Ranks by counting against plain sorting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.ranks import Positives, Ties, positive_ranks

TIES = ("stable", "pessimistic")


def reference_ranks(scores: Tensor, relevance: Tensor, ties: str) -> list[int]:
    """Sort every row by Python's own sort and look the positives up, query by query."""
    ranks = []
    for row, relevant in zip(scores.tolist(), relevance.tolist(), strict=True):
        last = [relevant[j] if ties == "pessimistic" else False for j in range(len(row))]
        order = sorted(range(len(row)), key=lambda j, row=row, last=last: (-row[j], last[j], j))
        ranks += [order.index(j) + 1 for j in range(len(row)) if relevant[j]]
    return ranks


def positives_of(relevance: Tensor) -> Positives:
    queries, items = relevance.shape
    return Positives.from_pairs(*relevance.nonzero().unbind(1), num_queries=queries, num_items=items)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Integer scores with many ties and a relevance matrix with at least one positive."""
    queries, items = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    levels = draw(st.sampled_from([1, 2, 4, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = torch.randint(-levels, levels, (queries, items), generator=generator).float()
    scores = torch.where(scores == levels - 1, torch.inf, scores) if draw(st.booleans()) else scores
    relevance = torch.rand(queries, items, generator=generator) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    relevance[draw(st.integers(0, queries - 1)), draw(st.integers(0, items - 1))] = True
    return scores, relevance


@settings(max_examples=200, deadline=None)
@given(
    problem=problems(), other=st.none() | st.integers(0, 2**32), ties=st.sampled_from(TIES),
    rows=st.integers(1, 8), block=st.sampled_from([1, 7, 20, 1 << 20]),
)  # fmt: skip
def test_ranks_equal_sorting(
    problem: tuple[Tensor, Tensor], other: int | None, ties: Ties, rows: int, block: int
) -> None:
    """Whatever the blocks, and also where the two directions have different positives."""
    scores, relevance = problem
    backwards = relevance.T
    if other is not None:
        backwards = torch.rand(relevance.T.shape, generator=torch.Generator().manual_seed(other)) < 0.4
        backwards[0, 0] = True
    t2i = None if other is None else positives_of(backwards)
    ranks = positive_ranks(lambda: scores.split(rows), positives_of(relevance), t2i, ties=ties, block=block)
    assert ranks.i2t.rank.tolist() == reference_ranks(scores, relevance, ties)
    assert ranks.t2i.rank.tolist() == reference_ranks(scores.T, backwards, ties)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("ties", TIES)
def test_any_number_type(dtype: torch.dtype, ties: Ties) -> None:
    scores = torch.tensor([[1, -1, 1, 0], [0, -0.0, 0, 0]]).to(dtype)
    relevance = torch.tensor([[True, False, True, True], [False, True, False, True]])
    ranks = positive_ranks(lambda: [scores], positives_of(relevance), ties=ties)
    assert ranks.i2t.rank.tolist() == reference_ranks(scores, relevance, ties)


def test_what_cannot_be_ranked_is_refused() -> None:
    scores = torch.zeros(5, 4)
    positives = Positives.from_captions(torch.tensor([0, 1, 2, 3]), 5)
    with pytest.raises(UsageError, match="optimistic"):
        positive_ranks(lambda: [scores], positives, ties="optimistic")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="none of 5 queries has a positive"):
        positive_ranks(lambda: [scores], positives_of(torch.zeros(5, 4, dtype=torch.bool)))
    scores[3, 2] = scores[4, 0] = torch.nan
    with pytest.raises(DataError, match="query 3, item 2"):
        positive_ranks(lambda: scores.split(2), positives)


def test_blocks_must_be_the_matrix_twice() -> None:
    positives = Positives.from_captions(torch.tensor([0, 1]), 2)
    for blocks in ([torch.zeros(1, 2)], [torch.zeros(2, 2), torch.zeros(1, 2)], [torch.zeros(2, 3)]):
        with pytest.raises(ShapeMismatch, match=r"\[2, 2\]"):
            positive_ranks(lambda blocks=blocks: blocks, positives)
    passes = iter([torch.zeros(2, 2), torch.ones(2, 2)])
    with pytest.raises(DataError, match="repeatable"):
        positive_ranks(lambda: [next(passes)], positives)


@pytest.mark.gpu
@pytest.mark.parametrize("ties", TIES)
def test_cuda_equals_cpu(ties: Ties) -> None:
    scores = torch.randint(0, 50, (300, 1500), generator=torch.Generator().manual_seed(0)).float()
    positives = Positives.from_captions(torch.arange(1500) // 5, 300)
    expected = positive_ranks(lambda: [scores], positives, ties=ties)
    ranks = positive_ranks(lambda: scores.cuda().split(64), positives, ties=ties)
    assert torch.equal(ranks.i2t.rank, expected.i2t.rank)
    assert torch.equal(ranks.t2i.rank, expected.t2i.rank)
