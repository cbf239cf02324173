from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.pairwise import batch_block, cosines, same_image

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
ids = st.lists(st.integers(0, 4), max_size=8)


@PROPERTY
@given(ids, ids)
def test_same_image_is_the_loop(rows: list[int], cols: list[int]) -> None:
    got = same_image(torch.tensor(rows).long(), torch.tensor(cols).long())
    assert got.shape == (len(rows), len(cols))
    assert got.dtype == torch.bool
    assert got.tolist() == [[r == c for c in cols] for r in rows]


@PROPERTY
@given(ids.filter(bool), st.integers(0, 8), st.integers(0, 8))
def test_a_row_block_keeps_the_batchs_counts(image_ids: list[int], start: int, stop: int) -> None:
    size, rows = len(image_ids), slice(start, stop)
    whole = batch_block(torch.tensor(image_ids), seed=1, step=2)
    soft = replace(whole, targets=torch.arange(size * size).view(size, size) / 64).rows(rows)
    assert soft.targets is not None
    assert soft.targets.tolist() == (torch.arange(size * size).view(size, size) / 64)[rows].tolist()
    for part in (whole.rows(rows), batch_block(torch.tensor(image_ids), seed=1, step=2, rows=rows)):
        assert torch.equal(part.relevance, whole.relevance[rows])
        assert part.batch == len(image_ids)
        assert part.pairs == len(image_ids) ** 2
        assert int(part.positives) == sum(a == b for a in image_ids for b in image_ids)
        assert torch.equal(part.noise.normal(3), whole.noise.normal(3)[rows])
        assert torch.equal(part.noise.gumbel(2), whole.noise.gumbel(2)[rows])


def test_the_diagonal_alone() -> None:
    whole = batch_block(torch.tensor([5, 5, 6]), seed=0, step=0)
    assert int(whole.positives) == 5
    strict = whole.diagonal()
    assert torch.equal(strict.relevance, torch.eye(3, dtype=torch.bool))
    assert int(strict.positives) == 3
    assert torch.equal(whole.rows(slice(1, 3)).diagonal().relevance, torch.eye(3, dtype=torch.bool)[1:])
    assert int(whole.rows(slice(1, 3)).diagonal().positives) == 3


def test_blocks_of_blocks() -> None:
    whole = batch_block(torch.tensor([0, 1, 0, 2, 1]), seed=0, step=0)
    inner = whole.rows(slice(1, 5)).rows(slice(1, 3))
    assert torch.equal(inner.relevance, whole.relevance[2:4])
    assert inner.noise.rows.tolist() == [2, 3]
    assert inner.noise.cols.tolist() == [0, 1, 2, 3, 4]


def test_cosines_keep_float32_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    v, t = (torch.nn.functional.normalize(torch.randn(n, 16, generator=generator), dim=1) for n in (5, 7))
    with torch.autocast("cpu", torch.bfloat16):
        found = cosines(v, t)
        assert (v @ t.T).dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert torch.equal(found, v @ t.T)
