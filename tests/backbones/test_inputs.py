"""Photos as squares of bytes: in order, the same from memory and from files, and never more at work than asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.backbones.images import DecodedPhotos, PhotoReader, PhotoTransform, tower_inputs
from vacsr.config import BackboneConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.photos import ArrayPhotos
from vacsr.data.sources import FilePhotos
from vacsr.errors import DataError

TRANSFORM = PhotoTransform(16)


def array_photos(count: int, side: int = 20) -> ArrayPhotos:
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return ArrayPhotos(pixels, tuple(str(row) for row in range(count)))


class Slow:
    """Photos whose first rows take longest, and which count what is going on."""

    def __init__(self, count: int, *, broken: int | None = None) -> None:
        self.inner, self.broken = array_photos(count), broken
        self.opened: list[int] = []

    def __len__(self) -> int:
        return len(self.inner)

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        self.opened.append(row)
        time.sleep(0.003 * (row % 4 == 0))
        if row == self.broken:
            raise DataError(f"photo {row} cannot be read")
        return self.inner.open(row, side=side)

    def name(self, row: int) -> str:
        return str(row)

    def take(self, rows: Sequence[int]) -> Any:
        raise NotImplementedError

    def digest(self) -> str:
        return ""


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("photos")]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_batches_come_in_order(workers: int, ahead: int) -> None:
    photos = Slow(12)
    reader = PhotoReader(photos, TRANSFORM, workers=workers)
    batches = [[3, 1, 3], [0], [11, 10, 9, 8], [4]]
    expected = [[TRANSFORM.pixels(photos.inner.open(row)) for row in rows] for rows in batches]
    streamed = list(reader.stream(batches, ahead=ahead))
    assert len(streamed) == 4
    for batch, wanted in zip(streamed, expected, strict=True):
        assert torch.equal(batch, torch.stack(wanted))
    assert readers() == []


def test_no_batches_at_all() -> None:
    assert list(PhotoReader(array_photos(3), TRANSFORM).stream([])) == []


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_it_reads_ahead_and_no_further(ahead: int) -> None:
    """While one batch is used, ``ahead`` more are asked for; memory stays bounded whatever the epoch."""
    taken: list[int] = []

    def endless() -> Iterator[list[int]]:
        for row in range(40):
            taken.append(row)
            yield [row % 12]

    stream = PhotoReader(Slow(12), TRANSFORM, workers=2).stream(endless(), ahead=ahead)
    assert taken == []
    for number in range(3):
        next(stream)
        assert len(taken) == number + 2 + ahead
    stream.close()  # type: ignore[attr-defined]
    assert readers() == []


def test_a_broken_photo_ends_the_stream_where_it_lies() -> None:
    stream = PhotoReader(Slow(12, broken=5), TRANSFORM, workers=3).stream([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert [len(next(stream)) for _ in range(2)] == [2, 2]
    with pytest.raises(DataError, match="photo 5"):
        next(stream)
    assert readers() == []


@pytest.mark.parametrize("count", [1, 255, 256, 300])
def test_all_photos_with_progress(count: int) -> None:
    photos, reports = array_photos(count, side=4), []
    reader = PhotoReader(photos, PhotoTransform(4), workers=2)
    whole = reader.read_all(lambda done, of: reports.append((done, of)))
    assert torch.equal(whole, torch.from_numpy(photos.pixels).permute(0, 3, 1, 2))
    assert reports == [(stop, count) for stop in dict.fromkeys((min(256, count), count))]
    assert (len(reader), reader.side, reader.bytes) == (count, 4, count * 48)


def test_another_side_is_the_photo_and_not_the_square_resized() -> None:
    photos = array_photos(2, side=50)
    reader = PhotoReader(photos, TRANSFORM, size=40)
    assert reader.bytes == 2 * 3 * 40 * 40
    assert torch.equal(reader.one(1), TRANSFORM.pixels(photos.open(1), size=40))


SIZES = [(640, 480), (1000, 1400), (250, 250), (300, 2000), (645, 483)]
SQUEEZED = PhotoTransform(224)
CENTRE = PhotoTransform(224, resize="center", short=256)


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Smooth at large, with some detail, as photos are."""
    folder, random = tmp_path_factory.mktemp("jpegs"), np.random.default_rng(0)
    paths = []
    for width, height in SIZES:
        coarse = random.integers(30, 226, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=float)
        photo = (smooth + random.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)
        paths.append(folder / f"{width}x{height}.jpg")
        Image.fromarray(photo).save(paths[-1], quality=92)
    return paths


class Noting:
    """Photos that note how large they came."""

    def __init__(self, paths: list[Path]) -> None:
        self.inner = FilePhotos(paths[0].parent, tuple(path.name for path in paths))
        self.sizes: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.inner)

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        photo = self.inner.open(row, side=side)
        self.sizes[row] = photo.size
        return photo

    def name(self, row: int) -> str:
        return self.inner.name(row)

    def take(self, rows: Sequence[int]) -> Any:
        raise NotImplementedError

    def digest(self) -> str:
        return ""


@pytest.mark.parametrize("transform", [SQUEEZED, CENTRE])
@pytest.mark.parametrize("size", [0, 112])
def test_jpegs_are_decoded_in_full_unless_asked_otherwise(
    jpegs: list[Path], transform: PhotoTransform, size: int
) -> None:
    (found,) = PhotoReader(Noting(jpegs), transform, size=size).stream([range(len(jpegs))])
    for path, pixels in zip(jpegs, found, strict=True):
        with Image.open(path) as photo:
            assert torch.equal(pixels, transform.pixels(photo.convert("RGB"), size=size))


@pytest.mark.parametrize(("transform", "size", "enough"), [(SQUEEZED, 0, 224), (CENTRE, 0, 256), (CENTRE, 112, 128)])
def test_a_draft_is_close_and_never_enlarged(
    jpegs: list[Path], transform: PhotoTransform, size: int, enough: int
) -> None:
    """Two levels on average, of 256: the decoder's reduction is a box, blurred again by the resize."""
    photos = Noting(jpegs)
    full = PhotoReader(photos, transform, size=size).read_all()
    assert [photos.sizes[row] for row in range(len(SIZES))] == SIZES
    draft = PhotoReader(photos, transform, size=size, draft=True).read_all()
    assert (full.float() - draft.float()).abs().mean((1, 2, 3)).max() < 2
    for row, (width, height) in enumerate(SIZES):
        assert min(photos.sizes[row]) >= min(enough, width, height), "the decoder made it too small"
        reduced = min(width, height) >= 2 * enough
        assert (photos.sizes[row] != (width, height)) == reduced
        assert reduced or torch.equal(full[row], draft[row])


def test_decoded_photos_are_looked_up() -> None:
    pixels = torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 2, 2)
    found = list(DecodedPhotos(pixels).stream([[4, 0, 0], range(2, 4)]))
    assert torch.equal(found[0], pixels[[4, 0, 0]])
    assert torch.equal(found[1], pixels[2:4])


def test_a_data_set_decoded_at_once_or_batch_by_batch() -> None:
    pairs = load_pairs("scenes:images=5,held_out=2,per_image=2,size=40", split="train")
    assert isinstance(pairs, PhotoSet)
    backbone = load_backbone(BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32"))
    assert isinstance(backbone, TowerBackbone)
    backbone.fit(pairs)
    kept, read = (tower_inputs(backbone, pairs, cache_gb=cache) for cache in (1.0, 0.0))
    assert isinstance(kept.images, DecodedPhotos)
    assert isinstance(read.images, PhotoReader)
    assert torch.equal(kept.texts, read.texts)
    assert torch.equal(kept.texts, backbone.tokenize(pairs.captions))
    assert read.images.draft is False, "what is measured is decoded in full"
    (whole,) = read.images.stream([range(5)])
    assert torch.equal(kept.images.pixels, whole)
