"""Photos with labels: chosen, relabelled, halved."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data.archives import file_photos
from vacsr.data.fewshot import LabelledPhotos, base_and_new
from vacsr.errors import DataError, ShapeMismatch


def photos(labels: list[int], classes: tuple[str, ...] = ("ant", "bee", "cat")) -> LabelledPhotos:
    files = file_photos(Path("here"), [f"{number}.jpg" for number in range(len(labels))])
    return LabelledPhotos(files, torch.tensor(labels, dtype=torch.int64), classes, "pets/test")


def test_take_keeps_the_classes_and_the_order_given() -> None:
    taken = photos([0, 1, 2, 1]).take([3, 0])
    assert (taken.ids(), taken.labels.tolist(), taken.classes) == (["3.jpg", "0.jpg"], [1, 0], ("ant", "bee", "cat"))
    assert photos([0, 1, 2]).take(torch.tensor([True, False, True])).ids() == ["0.jpg", "2.jpg"]


def test_only_relabels_in_the_order_given() -> None:
    cats_and_ants = photos([0, 1, 2, 1, 0]).only([2, 0])
    assert (cats_and_ants.ids(), cats_and_ants.labels.tolist()) == (["0.jpg", "2.jpg", "4.jpg"], [1, 0, 1])
    assert (cats_and_ants.classes, "2 of 3" in cats_and_ants.name) == (("cat", "ant"), True)
    assert photos([0, 1]).only([2]).labels.tolist() == []


@pytest.mark.parametrize(
    ("labels", "classes", "error", "words"),
    [
        (torch.tensor([0, 3]), ("a", "b", "c"), DataError, r"label 3 of here/1.jpg is out of range.*0 to 2"),
        (torch.tensor([0, -1]), ("a", "b", "c"), DataError, "label -1 of here/1.jpg"),
        (torch.tensor([0]), ("a", "b"), ShapeMismatch, "one int64 label per photo"),
        (torch.tensor([0.0, 1.0]), ("a", "b"), ShapeMismatch, "float32"),
        (torch.tensor([0, 0]), ("a", " "), DataError, "class 1 has no name"),
    ],
)
def test_labels_that_do_not_fit(
    labels: torch.Tensor, classes: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LabelledPhotos(photos([0, 1]).photos, labels, classes, "pets/test")


def test_digest_depends_on_labels_names_and_photos_and_not_on_the_folder(tmp_path: Path) -> None:
    def digest(root: str, labels: list[int], classes: tuple[str, ...] = ("a", "b"), size: int = 1) -> str:
        (tmp_path / root).mkdir(exist_ok=True)
        (tmp_path / root / "x.jpg").write_bytes(b"." * size)
        (tmp_path / root / "y.jpg").write_bytes(b"..")
        files = file_photos(tmp_path / root, ["x.jpg", "y.jpg"])
        return LabelledPhotos(files, torch.tensor(labels), classes, root).digest()

    first = digest("one", [0, 1])
    assert first == digest("two", [0, 1])
    assert len({first, digest("one", [1, 0]), digest("one", [0, 1], ("a", "c")), digest("one", [0, 1], size=3)}) == 4


@given(st.integers(2, 2_000), st.lists(st.integers(0, 6)))
def test_base_and_new_halve_the_labels_and_their_photos(classes: int, labels: list[int]) -> None:
    base, new = base_and_new(classes)
    assert [*base, *new] == list(range(classes))
    assert len(base) - len(new) == classes % 2
    whole = photos(labels, classes=tuple("abcdefg"))
    halves = [whole.only(half) for half in base_and_new(7)]
    assert sum(map(len, halves)) == len(labels)
    assert [halves[0].classes, halves[1].classes] == [tuple("abcd"), tuple("efg")]
