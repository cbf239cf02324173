from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones.hub import transform_from
from vacsr.backbones.images import CLIP_MEAN, CLIP_STD, PhotoTransform
from vacsr.config import BackboneConfig
from vacsr.errors import DataError

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def photo(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def clip_processor(**settings: object) -> Any:
    for name in ("CLIPImageProcessorPil", "CLIPImageProcessor"):
        try:
            import transformers

            return getattr(transformers, name)(**settings)
        except (ImportError, AttributeError):
            continue
    return pytest.skip("this transformers has no CLIP image processor that works without torchvision")


@pytest.mark.parametrize(("width", "height"), [(50, 40), (40, 57), (33, 33), (20, 31), (300, 101)])
def test_center_is_clips_own_processor(width: int, height: int) -> None:
    processor = clip_processor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    expected = processor(photo(width, height), return_tensors="pt")["pixel_values"]
    transform = PhotoTransform(32, CLIP_MEAN, CLIP_STD, "bicubic", "center")
    got = transform.normalize(transform.pixels(photo(width, height)).unsqueeze(0))
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)


def test_center_cuts_from_a_larger_shorter_side_where_the_processor_does() -> None:
    processor = clip_processor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    transform = PhotoTransform(32, CLIP_MEAN, CLIP_STD, "bicubic", "center", 40)
    got = transform.normalize(transform.pixels(photo(61, 50)).unsqueeze(0))
    torch.testing.assert_close(got, processor(photo(61, 50), return_tensors="pt")["pixel_values"], atol=2e-3, rtol=0)
    assert transform.pixels(photo(61, 50), size=64).shape == (3, 64, 64)


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [0, 30])
def test_whole_is_pils_resize(resample: str, size: int) -> None:
    transform = PhotoTransform(24, resample=resample)  # type: ignore[arg-type]
    side = size or 24
    expected = np.asarray(photo(70, 41).resize((side, side), FILTERS[resample]))
    got = transform.pixels(photo(70, 41), size=size)
    assert got.dtype == torch.uint8
    assert got.is_contiguous()
    assert np.array_equal(got.permute(1, 2, 0).numpy(), expected)


def resized_and_cut(source: Image.Image, side: int, *, short: int, resample: str) -> torch.Tensor:
    """The whole photo enlarged or reduced, then its centre: what takes too much memory for long strips."""
    factor = short / min(source.size)
    scaled = [short if length == min(source.size) else int(short * length / min(source.size)) for length in source.size]
    assert all(abs(length * factor - found) <= 1 for length, found in zip(source.size, scaled, strict=True))
    left, top = ((length - side) // 2 for length in scaled)
    square = source.resize((scaled[0], scaled[1]), FILTERS[resample]).crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


ORDINARY = [(64, 48), (49, 65), (33, 33), (20, 31), (301, 101), (400, 3), (3, 400), (32, 47), (1, 1), (1, 2)]


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize("short", [32, 37, 40])
@pytest.mark.parametrize(("width", "height"), ORDINARY)
def test_center_resizes_and_cuts(width: int, height: int, short: int, resample: str) -> None:
    transform = PhotoTransform(32, resample=resample, resize="center", short=short)  # type: ignore[arg-type]
    source = photo(width, height)
    expected = resized_and_cut(source, 32, short=short, resample=resample)
    assert torch.equal(transform.pixels(source), expected)


@pytest.mark.parametrize("resize", ["whole", "center"])
@pytest.mark.parametrize("size", [(0, 5), (1, 10_000_000)])
def test_a_photo_that_no_square_can_be_made_of(resize: str, size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=r"square of 8 — cut it"):
        PhotoTransform(8, resize=resize).pixels(Image.new("L", size))  # type: ignore[arg-type]


def test_normalize_is_the_formula() -> None:
    transform = PhotoTransform(4, (0.1, 0.2, 0.3), (0.5, 0.25, 2.0))
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = transform.normalize(pixels)
    for channel, (mean, std) in enumerate(zip(transform.mean, transform.std, strict=True)):
        torch.testing.assert_close(got[:, channel], (pixels[:, channel] / 255 - mean) / std)
    assert torch.equal(transform.normalize(pixels.float()), got)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_photos_of_other_modes_become_rgb(mode: str) -> None:
    assert PhotoTransform(8).pixels(photo(10, 12).convert(mode)).shape == (3, 8, 8)


USUAL = PhotoTransform(224, CLIP_MEAN, CLIP_STD)


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
