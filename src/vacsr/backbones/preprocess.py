"""From a decoded photo to the square a tower sees, with PIL and torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.resample import Resample
from vacsr.errors import DataError, UsageError

Triple = tuple[float, float, float]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_REACH = 2  # pixels to each side that the wider filter looks at, times the reduction
_ROOM = 2**24  # pixels between source and square, per photo; several threads work at once


@dataclass(frozen=True)
class PhotoTransform:
    """How a tower wants its photos."""

    size: int
    """S, the side of the square."""
    mean: Triple = IMAGENET_MEAN
    """Per channel, of pixels in 0-1."""
    std: Triple = IMAGENET_STD
    resample: Resample = "bicubic"
    resize: Literal["whole", "center"] = "whole"
    """The whole photo squeezed into the square, or its centre."""
    short: int = 0
    """With `center`: the shorter side before the square is cut; 0 means S."""

    def __post_init__(self) -> None:
        if self.size < 1 or (self.short and self.short < self.size):
            raise UsageError(f"a square of {self.size} cut from a shorter side of {self.short} — give 1 ≤ size ≤ short")

    def pixels(self, photo: Image.Image, *, size: int = 0) -> Tensor:
        """The square as bytes; ``size`` asks for another side, as training does to crop from it. -> uint8 [3, S, S]"""
        side = size or self.size
        try:
            if 0 in photo.size:
                raise ValueError("it is empty")
            rgb = photo if photo.mode == "RGB" else photo.convert("RGB")
            square = self._whole(rgb, side) if self.resize == "whole" else self._centre(rgb, side)
        except (ArithmeticError, MemoryError, ValueError) as error:
            width, height = photo.size
            raise DataError(
                f"a photo of {width:,} × {height:,} pixels cannot be made a square of {side} "
                f"({str(error) or type(error).__name__}) — cut it to an ordinary shape, or leave it out"
            ) from error
        return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()

    def shorter_side(self, *, size: int = 0) -> int:
        """What a photo needs on its shorter side for nothing to be enlarged; ``size`` as for :meth:`pixels`.

        >>> PhotoTransform(224).shorter_side(), PhotoTransform(224, resize="center", short=256).shorter_side()
        (224, 256)
        """
        side = size or self.size
        return side if self.resize == "whole" else max(side, round(side * self.short / self.size))

    def _whole(self, photo: Image.Image, side: int) -> Image.Image:
        if photo.width < side and side * photo.height > _ROOM:  # Pillow would widen every row before it drops most
            photo = photo.resize((photo.width, side), _FILTERS[self.resample])
        return photo.resize((side, side), _FILTERS[self.resample])

    def _centre(self, photo: Image.Image, side: int) -> Image.Image:
        """As the public processors do: the shorter side to ``short``, the longer rounded down, whole offsets."""
        short = self.shorter_side(size=side)
        width, height = photo.size
        scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        left, top = (scaled[0] - side) // 2, (scaled[1] - side) // 2
        if scaled[0] * scaled[1] > _ROOM:
            return self._cut_first(photo, side, scaled=scaled, corner=(left, top))
        return photo.resize(scaled, _FILTERS[self.resample]).crop((left, top, left + side, top + side))

    def _cut_first(
        self, photo: Image.Image, side: int, *, scaled: tuple[int, int], corner: tuple[int, int]
    ) -> Image.Image:
        """The same square, of which only the part of the photo that it shows is resized.

        Pillow keeps the edges of a box as 32-bit floats, so that a pixel may differ by a level or two: ordinary photos
        go the other way. What the filter cannot reach is cut off before, which keeps these numbers small.
        """
        cut, box = [], []
        for source, whole, start in zip(photo.size, scaled, corner, strict=True):
            scale = source / whole
            margin = _REACH * max(scale, 1.0) + 1
            first, last = start * scale, (start + side) * scale
            low, high = max(0, floor(first - margin)), min(source, ceil(last + margin))
            cut.append((low, high))
            box.append((first - low, min(last - low, high - low)))
        (x0, x1), (y0, y1) = cut
        (left, right), (top, bottom) = box
        part = photo.crop((x0, y0, x1, y1))
        return part.resize((side, side), _FILTERS[self.resample], box=(left, top, right, bottom))

    def normalize(self, pixels: Tensor) -> Tensor:
        """Bytes (or floats in 0-255) to what the tower was trained on. [B, 3, S, S] -> float32 [B, 3, S, S]"""
        channels = zip(pixels.unbind(1), self.mean, self.std, strict=True)
        # Plain numbers, not a tensor of them: copying one to a GPU would wait for it, and break a captured graph.
        return torch.stack([(x.float() - 255.0 * mean) / (255.0 * std) for x, mean, std in channels], dim=1)

    def describe(self) -> str:
        """One line that changes when the pixels do.

        >>> PhotoTransform(224).describe()
        '224 whole bicubic, mean 0.4850 0.4560 0.4060, std 0.2290 0.2240 0.2250'
        """
        cut = f"center of {self.short or self.size}" if self.resize == "center" else "whole"
        mean, std = (" ".join(f"{x:.4f}" for x in triple) for triple in (self.mean, self.std))
        return f"{self.size} {cut} {self.resample}, mean {mean}, std {std}"
