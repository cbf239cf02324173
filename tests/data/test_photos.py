"""Photos in memory, in lists and in sets: opened, checked, left out."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.data import PhotoSet, without_unreadable
from vacsr.data.archives import StoredPhotos, file_photos
from vacsr.data.photos import ListedPhotos, Photos
from vacsr.errors import DataError, UsageError


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
    return made(file_photos(folder, [f"{name}.jpg" for name in "abcde"]), tuple("abcde"))


def test_photos_that_cannot_be_read_are_left_out(pairs: PhotoSet) -> None:
    with pytest.warns(UserWarning, match=r"train: 2 left out: b: .*b\.jpg.*Truncated.*; d: .*no known image format\)"):
        rest = without_unreadable(replace(pairs, skipped=("earlier",)), workers=3)
    assert rest.image_ids == ("a", "c", "e")
    assert rest.caption_ids == ("c0", "c1", "c4", "c5", "c8")
    assert rest.caption_image.tolist() == [0, 0, 1, 1, 2]
    assert [line.partition(" ")[0] for line in rest.skipped] == ["earlier", "b:", "d:"]
    assert not any(" — " in line for line in rest.skipped)  # without the action
    assert without_unreadable(rest) is rest
    assert rest.describe() == "train: 3 photos, 5 captions, 1–2 per photo, 3 left out"
    with pytest.raises(DataError, match="none of the 2 photos"):
        without_unreadable(pairs.subset([1, 3]))
    with pytest.raises(DataError, match=r"no known.* — copy it again, or skip .*--skip, .*data.on_error=skip"):
        pairs.photos.open(3)


def test_other_errors_are_not_swallowed(pairs: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(StoredPhotos, "open", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        without_unreadable(pairs)


def test_a_subset_takes_its_photos_and_the_digest_tells_every_part(pairs: PhotoSet) -> None:
    some = pairs.subset([4, 0])
    assert [Path(some.photos.name(row)).name for row in range(2)] == ["e.jpg", "a.jpg"]
    assert (some.captions, some.caption_image.tolist()) == (("caption 0", "caption 1", "caption 8"), [1, 1, 0])
    others = [
        pairs,
        pairs.subset([1, 0, 2, 3, 4]),
        replace(pairs, captions=("other", *pairs.captions[1:])),
        replace(pairs, caption_ids=("other", *pairs.caption_ids[1:])),
        replace(pairs, caption_image=pairs.caption_image.flip(0)),
    ]
    assert len({other.digest() for other in others}) == len(others)
    assert replace(pairs).digest() == pairs.digest()


def picture(mode: str = "RGB", size: tuple[int, int] = (12, 9)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(noise.view(np.uint16)[..., 0].copy())
    return Image.fromarray(noise, "RGBA").convert(mode)


@pytest.mark.parametrize(("mode", "orientation"), [("RGB", 1), ("RGBA", 3), ("LA", 6), ("P", 7), ("I;16", 8)])
def test_an_open_image_is_read_as_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, orientation: int
) -> None:
    """Upright; transparent is white, sixteen bits are scaled, not clipped."""
    monkeypatch.setenv("HOME", str(tmp_path))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(mode).save(tmp_path / "a.png", exif=exif)
    photos = ListedPhotos.of([tmp_path / "a.png", "~/a.png", Image.open(tmp_path / "a.png")])
    opened = [photos.open(row) for row in range(3)]
    assert {(photo.mode, photo.size) for photo in opened} == {("RGB", (9, 12) if orientation >= 5 else (12, 9))}
    assert all((np.asarray(photo) == np.asarray(opened[0])).all() for photo in opened)


def test_the_callers_image_is_left_as_it_is() -> None:
    mine = picture("RGB")
    ListedPhotos.of([mine]).open(0).paste((0, 0, 0), (0, 0, 5, 5))
    assert (np.asarray(mine) == np.asarray(picture("RGB"))).all()


def test_one_open_image_for_many_rows_and_threads(tmp_path: Path) -> None:
    """Decoding starts at the first use; two threads in it at once would break it."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)).save(tmp_path / "a.jpg")
    expected = np.asarray(ListedPhotos.of([tmp_path / "a.jpg"]).open(0))
    for _ in range(3):
        photos = ListedPhotos.of([Image.open(tmp_path / "a.jpg")] * 8)
        with ThreadPoolExecutor(8) as pool:
            assert all((np.asarray(photo) == expected).all() for photo in pool.map(photos.open, range(8)))


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(size=(64, 64)).save(buffer, "PNG")
    torn = Image.open(io.BytesIO(buffer.getvalue()[:200]))
    (tmp_path / "torn.png").write_bytes(buffer.getvalue()[:200])
    photos = ListedPhotos.of([torn, tmp_path / "none.jpg", tmp_path, tmp_path / "torn.png"])
    for row, name in enumerate(("image 0 of the list cannot be decoded", "none.jpg", tmp_path.name, "torn.png")):
        with pytest.raises(DataError, match=name):
            photos.open(row)


@pytest.mark.parametrize(
    "argument",
    ["photo.jpg", Path("photo.jpg"), Image.new("RGB", (1, 1)), None, torch.ones(2, 3), {"a"}, [3], [b"photo.jpg"]],
)
def test_what_is_no_list_of_photos_is_refused(argument: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of paths or PIL images — pass"):
        ListedPhotos.of(argument)
