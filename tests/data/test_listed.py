"""Photos in a list: an open image is read as its file would be, by any number of threads."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.data.listed import ListedPhotos
from vacsr.errors import DataError, UsageError


def picture(mode: str = "RGB", size: tuple[int, int] = (12, 9)) -> Image.Image:
    rng = np.random.default_rng(0)
    width, height = size
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), dtype=np.uint16))
    if mode == "P":
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).quantize(16)
    if mode == "1":
        return Image.fromarray(rng.integers(0, 2, (height, width), dtype=np.uint8) * 255).convert("1")
    channels = len(mode)
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_an_open_image_is_read_as_its_file(tmp_path: Path, mode: str) -> None:
    """Transparent is white, sixteen bits are scaled, not clipped."""
    picture(mode).save(tmp_path / "a.png")
    photos = ListedPhotos.of([tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png")])
    arrays = [np.asarray(photos.open(row)) for row in range(3)]
    assert {photos.open(row).mode for row in range(3)} == {"RGB"}
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] == arrays[2]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_open_image_is_upright_as_its_file(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(tmp_path / "a.png", exif=exif)
    photos = ListedPhotos.of([tmp_path / "a.png", Image.open(tmp_path / "a.png")])
    assert photos.open(0).size == ((9, 12) if orientation >= 5 else (12, 9))
    assert (np.asarray(photos.open(0)) == np.asarray(photos.open(1))).all()


def test_the_callers_image_is_left_as_it_is(tmp_path: Path) -> None:
    mine = picture("RGBA")
    before = np.asarray(mine).copy()
    photo = ListedPhotos.of([mine]).open(0)
    photo.paste((0, 0, 0), (0, 0, 5, 5))
    assert (np.asarray(mine) == before).all()
    assert mine.mode == "RGBA"


def test_one_open_image_for_many_rows_and_threads(tmp_path: Path) -> None:
    """Decoding starts at the first use; two threads in it at once would break it."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)).save(tmp_path / "a.jpg")
    expected = np.asarray(ListedPhotos.of([tmp_path / "a.jpg"]).open(0))
    for _ in range(3):
        photos = ListedPhotos.of([Image.open(tmp_path / "a.jpg")] * 8)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(photos.open, range(8)))
        assert all((np.asarray(photo) == expected).all() for photo in found)


def test_a_broken_image_is_named() -> None:
    buffer = io.BytesIO()
    picture(size=(64, 64)).save(buffer, "PNG")
    torn = Image.open(io.BytesIO(buffer.getvalue()[:200]))
    photos = ListedPhotos.of([picture(), torn])
    photos.open(0)
    with pytest.raises(DataError, match="image 1 of the list cannot be read as a photo"):
        photos.open(1)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    photos = ListedPhotos.of([tmp_path / "none.jpg", tmp_path])
    for row, name in enumerate(("none.jpg", tmp_path.name)):
        with pytest.raises(DataError, match=name):
            photos.open(row)


@pytest.mark.parametrize(
    "given",
    ["photo.jpg", Path("photo.jpg"), Image.new("RGB", (1, 1)), None, 3, torch.ones(2, 3), np.ones((2, 3)), {"a"}],
)
def test_what_is_no_list_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of paths or PIL images — pass"):
        ListedPhotos.of(given)


@pytest.mark.parametrize("item", [3, b"photo.jpg", np.ones((4, 4, 3)), torch.ones(3), ["photo.jpg"]])
def test_what_is_no_photo_is_refused(item: Any) -> None:
    with pytest.raises(UsageError, match="expected a path or a PIL image"):
        ListedPhotos.of([picture(), item])


def test_names_rows_and_digest(tmp_path: Path) -> None:
    photos = ListedPhotos.of((tmp_path / "a.jpg", picture(), "b.jpg"))
    assert [photos.name(row) for row in range(3)] == [str(tmp_path / "a.jpg"), "image 1", "b.jpg"]
    assert len(photos.take([2, 0])) == 2
    assert photos.take([2, 0]).name(0) == "b.jpg"
    assert photos.digest() != photos.take([2, 0]).digest()


def test_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    picture().save(tmp_path / "a.png")
    assert ListedPhotos.of(["~/a.png"]).open(0).size == (12, 9)
