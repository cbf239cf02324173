from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.fewshot import FewshotSource, LabelledPhotos, base_and_new
from vacsr.data.sources import FilePhotos
from vacsr.errors import DataError, ShapeMismatch, UsageError


def photos(labels: list[int], classes: tuple[str, ...] = ("ant", "bee", "cat")) -> LabelledPhotos:
    paths = tuple(f"{number}.jpg" for number in range(len(labels)))
    return LabelledPhotos(
        FilePhotos(Path("here"), paths), torch.tensor(labels, dtype=torch.int64), classes, "pets/test"
    )


def test_take_keeps_the_classes_and_the_order_given() -> None:
    taken = photos([0, 1, 2, 1]).take([3, 0])
    assert taken.ids() == ["3.jpg", "0.jpg"]
    assert taken.labels.tolist() == [1, 0]
    assert taken.classes == ("ant", "bee", "cat")
    assert photos([0, 1, 2]).take(torch.tensor([True, False, True])).ids() == ["0.jpg", "2.jpg"]
    assert len(photos([0, 1]).take([])) == 0


def test_only_relabels_in_the_order_given() -> None:
    kept = photos([0, 1, 2, 1, 0]).only([2, 0])
    assert kept.ids() == ["0.jpg", "2.jpg", "4.jpg"]
    assert kept.labels.tolist() == [1, 0, 1]
    assert kept.classes == ("cat", "ant")
    assert "2 of 3" in kept.name
    assert photos([0, 1]).only([2]).labels.tolist() == []


@pytest.mark.parametrize("classes", [[3], [-1], [0, 0]])
def test_only_refuses_classes_that_are_not(classes: list[int]) -> None:
    with pytest.raises(UsageError, match=r"pets/test.* — "):
        photos([0, 1]).only(classes)


@pytest.mark.parametrize("label", [3, -1])
def test_label_out_of_range_names_the_photo(label: int) -> None:
    with pytest.raises(DataError, match=rf"label {label} of here/1.jpg is out of range.*0 to 2"):
        photos([0, label])


def test_other_refusals() -> None:
    files = FilePhotos(Path(), ("a.jpg",))
    with pytest.raises(ShapeMismatch, match="one label per photo"):
        LabelledPhotos(files, torch.tensor([0, 1]), ("a", "b"), "x")
    with pytest.raises(DataError, match="int64"):
        LabelledPhotos(files, torch.tensor([0.0]), ("a", "b"), "x")
    with pytest.raises(DataError, match="class 1 has no name"):
        LabelledPhotos(files, torch.tensor([0]), ("a", " "), "x")


def test_digest_sees_labels_names_and_photos_and_not_the_place(tmp_path: Path) -> None:
    def digest(root: str, labels: list[int], classes: tuple[str, ...] = ("a", "b"), size: int = 1) -> str:
        (tmp_path / root).mkdir(exist_ok=True)
        (tmp_path / root / "x.jpg").write_bytes(b"." * size)
        (tmp_path / root / "y.jpg").write_bytes(b"..")
        files = FilePhotos(tmp_path / root, ("x.jpg", "y.jpg"))
        return LabelledPhotos(files, torch.tensor(labels), classes, root).digest()

    first = digest("one", [0, 1])
    assert first == digest("two", [0, 1])
    assert len({first, digest("one", [1, 0]), digest("one", [0, 1], ("a", "c")), digest("one", [0, 1], size=3)}) == 4


@given(st.integers(2, 2_000))
def test_base_and_new_halve_the_sorted_labels(classes: int) -> None:
    base, new = base_and_new(classes)
    assert [*base, *new] == list(range(classes))
    assert len(base) - len(new) == classes % 2


@pytest.mark.parametrize("classes", [1, 0, -3])
def test_one_class_cannot_be_halved(classes: int) -> None:
    with pytest.raises(UsageError, match="halved"):
        base_and_new(classes)


@settings(max_examples=30)
@given(counts=st.lists(st.integers(0, 4), min_size=2, max_size=7))
def test_halves_part_the_photos(made: Callable[..., FewshotSource], counts: list[int]) -> None:
    whole: Any = made(counts).train
    base, new = base_and_new(len(counts))
    ids, seen = whole.ids(), {}
    for half in (base, new):
        part = whole.only(half)
        for path, label in zip(part.ids(), part.labels.tolist(), strict=True):
            assert path not in seen
            seen[path] = half[label]
    assert seen == dict(zip(ids, whole.labels.tolist(), strict=True))
