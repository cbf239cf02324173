from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones.images import Boxes, resize, whole

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def photo(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def as_pil(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [48, 20, 7])
def test_a_box_is_pils_crop_and_resize(resample: str, size: int) -> None:
    boxes = [(0, 0, 30, 40), (3, 5, 20, 24), (29, 39, 1, 1), (0, 1, 17, 39)]  # top, left, height, width
    images = torch.stack([photo(30, 40, seed) for seed in range(len(boxes))])
    flip = [False, True, False, True]
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*boxes, strict=True)]
    got = resize(images, Boxes(*columns, torch.tensor(flip)), size=size, resample=resample)  # type: ignore[arg-type]
    for pixels, (top, left, height, width), mirrored, out in zip(images, boxes, flip, got, strict=True):
        cut = as_pil(pixels).crop((left, top, left + width, top + height)).resize((size, size), FILTERS[resample])
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut
        # PIL rounds to bytes between its two passes and after them.
        assert (out - as_tensor(cut)).abs().max() <= 1.51


def test_the_whole_photo_at_its_own_size_is_untouched() -> None:
    images = photo(16, 16).unsqueeze(0)
    for resample in ("bilinear", "bicubic"):
        got = resize(images, whole(images), size=16, resample=resample)  # type: ignore[arg-type]
        torch.testing.assert_close(got, images.float(), atol=1e-3, rtol=0)


def test_cubic_overshoot_stays_within_bytes_and_autocast_changes_nothing() -> None:
    edges = (photo(12, 12) > 127).to(torch.uint8).unsqueeze(0) * 255
    got = resize(edges, whole(edges), size=40, resample="bicubic")
    assert got.min() >= 0
    assert got.max() <= 255
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resize(edges, whole(edges), size=40, resample="bicubic"), got)
