"""Photos as squares: PIL's own pixels, the processors' settings; streamed in order and never too far ahead."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.backbones.hub import transform_from
from vacsr.backbones.images import (
    CLIP_MEAN,
    CLIP_STD,
    Boxes,
    PhotoReader,
    PhotoTransform,
    resize,
    tower_inputs,
)
from vacsr.config import BackboneConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.archives import file_photos
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import DataError

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
USUAL = PhotoTransform(224, CLIP_MEAN, CLIP_STD)
TRANSFORM = PhotoTransform(16)


def photo(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def pixels_of(image: Image.Image) -> torch.Tensor:
    """[3, H, W]"""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("width", "height", "short"), [(50, 40, 32), (40, 57, 32), (33, 33, 32), (20, 31, 32), (300, 101, 32), (61, 50, 40)]
)
def test_center_is_clips_own_processor(width: int, height: int, short: int) -> None:
    """Which may cut the square from a larger shorter side."""
    processors = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    settings = {"size": {"shortest_edge": short}, "crop_size": {"height": 32, "width": 32}}
    processor = processors.CLIPImageProcessorPil(**settings)
    expected = processor(photo(width, height), return_tensors="pt")["pixel_values"]
    transform = PhotoTransform(32, CLIP_MEAN, CLIP_STD, "bicubic", "center", short)
    pixels = transform.normalize(transform.pixels(photo(width, height)).unsqueeze(0))
    torch.testing.assert_close(pixels, expected, atol=2e-3, rtol=0)
    assert transform.with_size(64).pixels(photo(width, height)).shape == (3, 64, 64)


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize("side", [24, 30])
def test_whole_is_pils_resize(resample: str, side: int) -> None:
    transform = PhotoTransform(24, resample=resample)  # type: ignore[arg-type]
    pixels = transform.with_size(side).pixels(photo(70, 41))
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert torch.equal(pixels, pixels_of(photo(70, 41).resize((side, side), FILTERS[resample])))


@pytest.mark.parametrize("resize", ["whole", "center"])
@pytest.mark.parametrize("size", [(0, 5), (1, 10_000_000)])
def test_a_photo_that_no_square_can_be_made_of(resize: str, size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="crop it"):
        PhotoTransform(8, resize=resize).pixels(Image.new("L", size))  # type: ignore[arg-type]


def test_normalize_is_the_formula() -> None:
    transform = PhotoTransform(4, (0.1, 0.2, 0.3), (0.5, 0.25, 2.0))
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    normal = transform.normalize(pixels)
    for channel, (mean, std) in enumerate(zip(transform.mean, transform.std, strict=True)):
        torch.testing.assert_close(normal[:, channel], (pixels[:, channel] / 255 - mean) / std)
    assert torch.equal(transform.normalize(pixels.float()), normal)
    for mode in ("L", "RGBA", "P", "1"):
        assert transform.pixels(photo(10, 12).convert(mode)).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({}, {}, USUAL),
        ({}, {"image_size": 96, "pixel_stats": "imagenet"}, PhotoTransform(96)),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "resample": 2},
            {"resize": "center", "image_size": 112},
            PhotoTransform(112, CLIP_MEAN, CLIP_STD, "bilinear", "center", 128),
        ),
        (
            {"size": 384, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3},
            {},
            PhotoTransform(384, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ),
        ({"size": {"height": 64, "width": 64}, "image_mean": None}, {}, PhotoTransform(64, CLIP_MEAN, CLIP_STD)),
    ],
)
def test_settings_of_a_processor(settings: dict[str, Any], config: dict[str, Any], expected: PhotoTransform) -> None:
    assert transform_from(settings, BackboneConfig.model_validate(config), usual=USUAL) == expected


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [48, 20, 7])
def test_a_box_is_pils_crop_and_resize(resample: str, size: int) -> None:
    boxes = [(0, 0, 30, 40), (3, 5, 20, 24), (29, 39, 1, 1), (0, 1, 17, 39)]  # top, left, height, width
    source, flip = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)), [0, 1, 0, 1]
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*boxes, strict=True)]
    images = pixels_of(source).expand(4, -1, -1, -1)
    squares = resize(images, Boxes(*columns, torch.tensor(flip).bool()), size=size, resample=resample)  # type: ignore[arg-type]
    for (top, left, height, width), mirrored, out in zip(boxes, flip, squares, strict=True):
        cut = source.crop((left, top, left + width, top + height)).resize((size, size), FILTERS[resample])
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut
        # PIL rounds to bytes between its two passes and after them.
        assert (out - pixels_of(cut).float()).abs().max() <= 1.51


def test_cubic_overshoot_stays_within_bytes_and_autocast_changes_nothing() -> None:
    edges = (pixels_of(photo(12, 12)) > 127).to(torch.uint8).unsqueeze(0) * 255
    squares = resize(edges, size=40, resample="bicubic")
    assert (squares.min(), squares.max()) == (0, 255)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resize(edges, size=40, resample="bicubic"), squares)
    torch.testing.assert_close(resize(edges, size=12, resample="bicubic"), edges.float())


def array_photos(count: int, side: int = 20) -> ArrayPhotos:
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return ArrayPhotos(pixels, tuple(str(row) for row in range(count)))


class Slow(ArrayPhotos):
    """Photos of which some take longer and number 5 is broken."""

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        time.sleep(0.003 * (row % 4 == 0))
        if row == 5:
            raise DataError(f"photo {row} cannot be read")
        return super().open(row, side=side)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("photos")]


@pytest.mark.parametrize("workers", [1, 5])
def test_batches_come_in_order_and_a_broken_photo_ends_them(workers: int) -> None:
    photos = Slow(*vars(array_photos(12)).values())
    reader = PhotoReader(photos, TRANSFORM, workers=workers)
    batches = [[3, 1, 3], [0], [11, 10, 9, 8], [4]]
    expected = [[TRANSFORM.pixels(photos.open(row)) for row in rows] for rows in batches]
    stream = reader.stream([*batches, [6, 5], [7]])
    for rows in expected:
        assert torch.equal(next(stream), torch.stack(rows))
    with pytest.raises(DataError, match="photo 5"):
        next(stream)
    assert list(reader.stream([])) == []
    assert readers() == []


def test_it_reads_ahead_and_no_further() -> None:
    """While one batch is used, two more are asked for; memory stays bounded whatever the epoch."""
    taken: list[int] = []

    def endless() -> Iterator[list[int]]:
        for row in range(40):
            taken.append(row)
            yield [row % 5]

    stream = PhotoReader(array_photos(5), TRANSFORM, workers=2).stream(endless())
    assert taken == []
    for number in range(3):
        next(stream)
        assert len(taken) == number + 4
    stream.close()  # type: ignore[attr-defined]
    assert readers() == []


@pytest.mark.parametrize("count", [1, 256, 300])
def test_all_photos_with_progress(count: int) -> None:
    photos, reports = array_photos(count, side=4), []
    reader = PhotoReader(photos, PhotoTransform(4), workers=2)
    pixels = reader.read_all(lambda done, of: reports.append((done, of)))
    assert torch.equal(pixels, torch.from_numpy(photos.pixels).permute(0, 3, 1, 2))
    assert reports == [(stop, count) for stop in dict.fromkeys((min(256, count), count))]


SIZES = [(640, 480), (1000, 1400), (250, 250), (300, 2000), (645, 483)]
SQUEEZED, CENTRE = PhotoTransform(224), PhotoTransform(224, resize="center", short=256)


@pytest.mark.parametrize(("transform", "enough"), [(SQUEEZED, 224), (CENTRE, 256), (CENTRE.with_size(112), 128)])
def test_a_draft_is_close_and_never_enlarged(tmp_path: Path, transform: PhotoTransform, enough: int) -> None:
    """Two levels on average, of 256: the decoder's reduction is a box, blurred again by the resize."""
    random, names = np.random.default_rng(0), [f"{width}x{height}.jpg" for width, height in SIZES]
    for name, (width, height) in zip(names, SIZES, strict=True):  # smooth at large, with some detail, as photos are
        coarse = Image.fromarray(random.integers(30, 226, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float)
        detailed = (smooth + random.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(detailed).save(tmp_path / name, quality=92)
    photos = file_photos(tmp_path, names)
    full, draft = (PhotoReader(photos, transform, draft=draft).read_all() for draft in (False, True))
    with Image.open(tmp_path / names[0]) as first:
        assert torch.equal(full[0], transform.pixels(first.convert("RGB"))), "in full unless asked otherwise"
    assert (full.float() - draft.float()).abs().mean((1, 2, 3)).max() < 2
    assert transform.shorter_side() == enough
    for row, (width, height) in enumerate(SIZES):
        decoded, reduced = photos.open(row, side=enough).size, min(width, height) >= 2 * enough
        assert min(decoded) >= min(enough, width, height), "the decoder made it too small"
        assert (decoded != (width, height)) == reduced
        assert reduced or torch.equal(full[row], draft[row])


def test_a_data_set_decoded_at_once_or_batch_by_batch() -> None:
    pairs = load_pairs("scenes:images=5,held_out=2,per_image=2,size=40", split="train")
    assert isinstance(pairs, PhotoSet)
    backbone = load_backbone(BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32"))
    assert isinstance(backbone, TowerBackbone)
    backbone.fit(pairs)
    held, read = (tower_inputs(backbone, pairs, cache_gb=cache) for cache in (1.0, 0.0))
    assert held.images.decoded is not None
    assert read.images.decoded is None
    assert torch.equal(held.texts, read.texts)
    assert torch.equal(held.texts, backbone.tokenize(pairs.captions))
    assert read.images.draft is False, "what is measured is decoded in full"
    for one, other in zip(*(x.images.stream([[4, 0, 0], range(2, 4)]) for x in (held, read)), strict=True):
        assert torch.equal(one, other)
