from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vacsr.data import PhotoSet, check_photos, without
from vacsr.data.photos import ArrayPhotos, Photos
from vacsr.data.sources import FilePhotos
from vacsr.errors import DataError, ShapeMismatch

WORDS = (
    "كلب يجري على الشاطئ",
    "一只狗在沙滩上奔跑",
    "👩‍👩‍👧 a family 🏖️",
    "é e\u0301 n̈ Z̸a̶l̷",
    "a\u2028b\x85c",
    "x" * 10_000,
)
"""Right to left, ideographs, joined emoji, combining marks, odd line ends, very long."""


def made(photos: Photos, ids: tuple[str, ...]) -> PhotoSet:
    """Two captions for each photo but the last, which has one."""
    rows = [row for row in range(len(ids)) for _ in range(2)][:-1]
    return PhotoSet(
        photos=photos,
        image_ids=ids,
        captions=tuple(f"caption {number}" for number in range(len(rows))),
        caption_ids=tuple(f"c{number}" for number in range(len(rows))),
        caption_image=torch.tensor(rows),
        split="train",
    )


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """Five photos; b is cut short, d is a text."""
    for name in "abcde":
        draw(tmp_path / f"{name}.jpg", size=(64, 48))
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:-80])
    (tmp_path / "d.jpg").write_text("no photo")
    return tmp_path


@pytest.fixture
def pairs(folder: Path) -> PhotoSet:
    return made(FilePhotos(folder, tuple(f"{name}.jpg" for name in "abcde")), tuple("abcde"))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_photos_that_cannot_be_read_are_found(pairs: PhotoSet, workers: int) -> None:
    told: list[tuple[int, int]] = []
    bad = check_photos(pairs, workers=workers, progress=lambda done, of: told.append((done, of)))
    assert [row for row, _ in bad] == [1, 3]
    assert "b.jpg" in bad[0][1]
    assert "truncated" in bad[0][1].lower()
    assert "d.jpg" in bad[1][1]
    assert "no known image format" in bad[1][1]
    assert told[-1] == (5, 5)


def test_without_them(pairs: PhotoSet) -> None:
    with pytest.warns(UserWarning, match=r"train: 2 left out: b: .*b\.jpg.*; d: "):
        rest = without(replace(pairs, skipped=("earlier",)), check_photos(pairs))
    assert rest.image_ids == ("a", "c", "e")
    assert rest.caption_ids == ("c0", "c1", "c4", "c5", "c8")
    assert rest.caption_image.tolist() == [0, 0, 1, 1, 2]
    assert [line.partition(" ")[0] for line in rest.skipped] == ["earlier", "b:", "d:"]
    assert check_photos(rest) == []
    assert without(rest, []) is rest
    assert rest.describe() == "train: 3 photos, 5 captions, 1–2 per photo, 3 left out"


def test_a_long_list_is_named_in_part(pairs: PhotoSet) -> None:
    with pytest.warns(UserWarning, match=r"4 left out: a: x; b: x; c: x …") as caught:
        without(pairs, [(row, "x") for row in range(4)])
    assert len(caught) == 1


def test_nothing_left(pairs: PhotoSet) -> None:
    with pytest.raises(DataError, match="none of the 5 photos"):
        without(pairs, [(row, "x") for row in range(5)])


def test_other_errors_are_not_swallowed(pairs: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(FilePhotos, "open", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        check_photos(pairs)


def test_photos_in_memory() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 5, 3), dtype=np.uint8)
    photos = ArrayPhotos(pixels, ("a", "b", "c"))
    assert np.array_equal(photos.open(1, side=2), pixels[1])
    taken = photos.take([2, 0])
    assert (taken.name(0), len(taken)) == ("c", 2)
    assert np.array_equal(taken.open(0), pixels[2])
    assert photos.digest() != taken.digest()
    with pytest.raises(ShapeMismatch, match="one name per photo"):
        ArrayPhotos(pixels, ("a",))
    with pytest.raises(ShapeMismatch, match="uint8"):
        ArrayPhotos(pixels[0], ("a",))


def test_a_subset_takes_its_photos(pairs: PhotoSet) -> None:
    some = pairs.subset([4, 0])
    assert [Path(some.photos.name(row)).name for row in range(2)] == ["e.jpg", "a.jpg"]
    assert some.captions == ("caption 0", "caption 1", "caption 8")
    assert some.caption_image.tolist() == [1, 1, 0]


def test_the_digest_tells_every_part(pairs: PhotoSet) -> None:
    others = [
        pairs,
        pairs.subset([1, 0, 2, 3, 4]),
        replace(pairs, captions=("other", *pairs.captions[1:])),
        replace(pairs, caption_ids=("other", *pairs.caption_ids[1:])),
        pairs.with_caption_image(pairs.caption_image.flip(0)),
    ]
    assert len({other.digest() for other in others}) == len(others)
    assert replace(pairs).digest() == pairs.digest()


def test_captions_of_all_scripts_stay_as_they_are(pairs: PhotoSet) -> None:
    words = (*WORDS, "seven", "eight", "nine")
    assert replace(pairs, captions=words).subset(range(5)).captions == words
