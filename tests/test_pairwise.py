from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.pairwise import AlignedNoise, batch_block, cosines, same_image

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
    whole = batch_block(torch.tensor(image_ids), seed=1, step=2)
    rows = slice(start, stop)
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


@PROPERTY
@given(ids.filter(bool), st.integers(0, 7), st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_a_tile_is_a_corner_of_the_batch(image_ids: list[int], top: int, down: int, left: int, right: int) -> None:
    size = len(image_ids)
    whole = batch_block(torch.tensor(image_ids), seed=1, step=2, captions=torch.arange(size) + 50)
    whole = replace(whole, targets=torch.arange(size * size).view(size, size) / 64)
    rows, cols = slice(top, top + down), slice(left, left + right)
    tile = whole.tile(rows, cols, matches=whole.relevance.sum(dim=1))
    assert torch.equal(tile.relevance, whole.relevance[rows, cols])
    assert torch.equal(tile.noise.normal(3), whole.noise.normal(3)[rows, cols])
    assert tile.captions is not None
    assert tile.captions.tolist() == list(range(50, 50 + size))[cols]
    assert tile.targets is not None
    assert torch.equal(tile.targets, whole.targets[rows, cols])
    assert (tile.batch, tile.columns, tile.pairs) == (size, size, size * size)
    assert int(tile.positives) == int(whole.positives)
    assert tile.matches.tolist() == [image_ids.count(own) for own in image_ids[rows]]
    assert tile.rows(slice(1, None)).matches.tolist() == tile.matches.tolist()[1:]
    strict = tile.diagonal()
    assert strict.relevance.tolist() == torch.eye(size, dtype=torch.bool)[rows, cols].tolist()
    assert set(strict.matches.tolist()) <= {1}
    assert int(strict.positives) == size


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_single_pairs_have_the_draws_of_their_place(pairs: list[tuple[int, int]]) -> None:
    whole = batch_block(torch.arange(5), seed=3, step=4).rows(slice(1, 5)).noise
    rows, cols = (torch.tensor([pair[side] for pair in pairs], dtype=torch.int64) for side in (0, 1))
    single = AlignedNoise.of(whole, rows, cols)
    for name, lanes in (("normal", 5), ("gumbel", 2)):
        drawn = getattr(single, name)(lanes)
        assert drawn.shape == (len(pairs), lanes)
        assert torch.equal(drawn, getattr(whole, name)(lanes)[rows, cols])
