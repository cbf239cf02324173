"""Draws of a few photos of each class: by seed, saved, and as others published them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.fewshot import FewshotSource, draw_shots, load_shots, save_shots, take_shots
from vacsr.errors import DataError

Made, Refuse = Callable[..., FewshotSource], Callable[..., str]
COUNTS = st.lists(st.integers(1, 9), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, shots=st.integers(1, 12), seed=st.integers(-3, 2**40), data=st.data())
def test_counts_labels_and_no_photo_twice(made: Made, counts: list[int], shots: int, seed: int, data: Any) -> None:
    some = st.lists(st.integers(0, 9), min_size=len(counts), max_size=len(counts))
    val_counts = data.draw(st.none() | st.just([0] * len(counts)) | some)
    source = made(counts, val=val_counts)
    draw = draw_shots(source, shots=shots, seed=seed)
    train, val = take_shots(source, draw)
    assert train.labels.tolist() == [label for label, count in enumerate(counts) for _ in range(min(count, shots))]
    left = val_counts if val_counts and sum(val_counts) else [max(count - shots, 0) for count in counts]
    wanted = [label for label, count in enumerate(left) for _ in range(min(count, shots, 4))]
    assert val.labels.tolist() == wanted
    assert len({*train.ids(), *val.ids()}) == len(train) + len(val)
    assert draw.train.dtype == draw.val.dtype == torch.int64


@pytest.mark.parametrize("order", [None, 3])
@pytest.mark.parametrize("val", [None, [6, 6]])
def test_draw_is_the_order_of_hashes_and_not_of_files(made: Made, order: int | None, val: list[int] | None) -> None:
    source = made([9, 7], val=val, order=order)

    def expected(split: str, label: int, count: int, take: int) -> list[str]:
        ids = [f"{split}/{label}/{number}.jpg" for number in range(count)]
        marks = {one: hashlib.sha256(f"5\0{split}\0class {label}\0{one}".encode()).hexdigest() for one in ids}
        return sorted(ids, key=marks.__getitem__)[:take]

    shots = draw_shots(source, shots=5, seed=5)
    train, held_out = (split.ids() for split in take_shots(source, shots))
    assert train == expected("train", 0, 9, 5) + expected("train", 1, 7, 5)
    if val is None:
        assert held_out == expected("train", 0, 9, 9)[5:9] + expected("train", 1, 7, 7)[5:9]
    else:
        assert held_out == expected("val", 0, 6, 4) + expected("val", 1, 6, 4)
    assert shots.hash == draw_shots(made([9, 7], val=val), shots=5, seed=5).hash


def test_hash_depends_on_names_and_labels(made: Made) -> None:
    source = made([3, 3], val=[1, 1])
    splits = {part: replace(getattr(source, part), classes=("class 0", "other")) for part in ("train", "val", "test")}
    draws = [(source, 16), (replace(source, **splits), 16), (source, 2)]
    assert len({draw_shots(some, shots=shots, seed=1).hash for some, shots in draws}) == 3


# Draws in files


@pytest.fixture
def source(made: Made) -> FewshotSource:
    return made([6, 7, 8], val=[5, 5, 5])


@pytest.fixture
def refuse(refused: Refuse, source: FewshotSource) -> Refuse:
    """(path, *words): the message of what is refused as a draw of ``source``."""
    return partial(refused, load=partial(load_shots, source=source))


def entries(split: str, labels: list[int]) -> list[list[Any]]:
    return [[f"{split}/{label}/{number}.jpg", label, f"class {label}"] for number in range(2) for label in labels]


@pytest.mark.parametrize("val", [None, [5, 5, 5]])
def test_saved_draw_comes_back_from_files_in_another_order(tmp_path: Path, made: Made, val: list[int] | None) -> None:
    one, other = made([6, 7, 8], val=val), made([6, 7, 8], val=val, order=3)
    draw = draw_shots(one, shots=3, seed=2)
    save_shots(tmp_path / "shots.json", draw, source=one)
    back = load_shots(tmp_path / "shots.json", other)
    assert back.hash == draw.hash
    assert [split.ids() for split in take_shots(other, back)] == [split.ids() for split in take_shots(one, draw)]
    assert load_shots(tmp_path / "shots.json", one).val.tolist() == draw.val.tolist()


def test_saved_draw_that_was_changed(tmp_path: Path, source: FewshotSource, refuse: Refuse) -> None:
    file = tmp_path / "shots.json"
    save_shots(file, draw_shots(source, shots=3, seed=2), source=source)
    value = json.loads(file.read_text())
    value["train"].pop()
    file.write_text(json.dumps(value))
    refuse(file, "hash", "was changed")
    del value["hash"]
    file.write_text(json.dumps(value))
    assert len(load_shots(file, source).train) == 8


def test_published_lists_keep_order_and_repeats(tmp_path: Path, source: FewshotSource) -> None:
    listed = [*entries("train", [2, 0, 1]), entries("train", [2])[0]]
    (tmp_path / "index.json").write_text(json.dumps({"train": listed, "val": entries("val", [0])}))
    train, val = take_shots(source, load_shots(tmp_path / "index.json", source))
    assert (train.ids(), val.ids()) == ([path for path, _, _ in listed], ["val/0/0.jpg", "val/0/1.jpg"])
    (tmp_path / "index.txt").write_text("/there/train/1/2.jpg\n\n./train/0/1.jpg\r\nC:\\data\\train\\2\\0.jpg\n")
    train, val = take_shots(source, load_shots(tmp_path / "index.txt", source))
    assert (train.ids(), val.ids()) == (["train/1/2.jpg", "train/0/1.jpg", "train/2/0.jpg"], [])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"train": [["train/0/9.jpg", 0, "class 0"]]}, ["made/train", "train/0/9.jpg"]),
        ({"train": [["train/0/1.jpg", 1, "class 0"]]}, ["class 1", "in the data set it is 0"]),
        ({"train": [["train/0/1.jpg", 0, "kitten"]]}, ["'kitten'", "'class 0'"]),
        ({"train": [["train/0/1.jpg"]]}, ["train, entry 0"]),
        ({"train": []}, ["no photos"]),
        ({"train": entries("train", [0]), "val": 3}, ["val is not a list"]),
        ([], ["an object"]),
    ],
)
def test_json_that_does_not_fit(tmp_path: Path, refuse: Refuse, value: Any, words: list[str]) -> None:
    (tmp_path / "index.json").write_text(json.dumps(value))
    refuse(tmp_path / "index.json", "index.json", *words)


def test_other_files_are_refused(tmp_path: Path, made: Made, refuse: Refuse) -> None:
    refuse(tmp_path / "index.npy", "give .json or .txt")
    refuse(tmp_path / "shot_16-seed_1.pkl", "convert it to JSON once", '"train": [[path, label, class name]')
    (tmp_path / "index.json").write_text(json.dumps({"train": entries("train", [0, 1]), "val": entries("train", [1])}))
    with pytest.raises(DataError, match="both trained and validated on"):
        load_shots(tmp_path / "index.json", made([3, 3]))  # where validation photos come from training
