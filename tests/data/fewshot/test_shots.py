from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.fewshot import FewshotSource, Shots, draw_shots, take_shots
from vacsr.errors import UsageError

Made = Callable[..., FewshotSource]
COUNTS = st.lists(st.integers(1, 9), min_size=2, max_size=5)


def drawn(source: FewshotSource, shots: int, seed: int) -> tuple[list[str], list[str]]:
    taken = take_shots(source, draw_shots(source, shots=shots, seed=seed))
    return taken.train.ids(), taken.val.ids()


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, shots=st.integers(1, 12), seed=st.integers(-3, 2**40), data=st.data())
def test_counts_labels_and_no_photo_twice(made: Made, counts: list[int], shots: int, seed: int, data: Any) -> None:
    kept = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=len(counts), max_size=len(counts)))
    source = made(counts, val=kept)
    draw = draw_shots(source, shots=shots, seed=seed)
    train, val = take_shots(source, draw)
    assert train.labels.tolist() == [label for label, count in enumerate(counts) for _ in range(min(count, shots))]
    left = kept if kept and sum(kept) else [max(count - shots, 0) for count in counts]
    wanted = [label for label, count in enumerate(left) for _ in range(min(count, shots, 4))]
    assert val.labels.tolist() == wanted
    assert len({*train.ids(), *val.ids()}) == len(train) + len(val)
    assert draw.train.dtype == draw.val.dtype == torch.int64


@settings(max_examples=30, deadline=None)
@given(counts=COUNTS, order=st.integers(0, 99), seed=st.integers(0, 99), val=st.booleans())
def test_the_order_of_files_does_not_matter(made: Made, counts: list[int], order: int, seed: int, val: bool) -> None:
    held = [3] * len(counts) if val else None
    one, other = made(counts, val=held), made(counts, val=held, order=order)
    assert drawn(one, 3, seed) == drawn(other, 3, seed)
    assert draw_shots(one, shots=3, seed=seed).hash == draw_shots(other, shots=3, seed=seed).hash


def test_draw_is_the_order_of_hashes(made: Made) -> None:
    source = made([9, 7], val=[6, 6])

    def expected(split: str, label: int, count: int, take: int) -> list[str]:
        ids = [f"{split}/{label}/{number}.jpg" for number in range(count)]
        marks = {one: hashlib.sha256(f"5\0{split}\0class {label}\0{one}".encode()).hexdigest() for one in ids}
        return sorted(ids, key=marks.__getitem__)[:take]

    train, val = drawn(source, 5, 5)
    assert train == expected("train", 0, 9, 5) + expected("train", 1, 7, 5)
    assert val == expected("val", 0, 6, 4) + expected("val", 1, 6, 4)


def test_fewer_shots_are_the_start_of_more(made: Made) -> None:
    source = made([30, 30])
    few, many = drawn(source, 4, 1)[0], drawn(source, 16, 1)[0]
    assert few[:4] == many[:4]
    assert few[4:] == many[16:20]


def test_seeds_differ_and_draw_evenly(made: Made) -> None:
    source = made([10, 10])
    times: Counter[str] = Counter()
    for seed in range(400):
        times.update(drawn(source, 3, seed)[0])
    assert len({draw_shots(source, shots=3, seed=seed).hash for seed in range(50)}) == 50
    assert len(times) == 20
    assert all(80 < count < 160 for count in times.values()), times  # 120 expected, deviation 9


def test_hash_sees_names_and_labels(made: Made) -> None:
    source = made([3, 3], val=[1, 1])
    draw = draw_shots(source, shots=16, seed=1)
    assert source.val is not None
    names = ("class 0", "other")
    renamed = source._replace(train=replace(source.train, classes=names), val=replace(source.val, classes=names))
    fewer = draw_shots(source, shots=2, seed=1)
    assert len({draw.hash, draw_shots(renamed, shots=16, seed=1).hash, fewer.hash}) == 3
    assert isinstance(draw, Shots)


@pytest.mark.parametrize("shots", [0, -1])
def test_no_shots_are_refused(made: Made, shots: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        draw_shots(made([3, 3]), shots=shots, seed=1)
