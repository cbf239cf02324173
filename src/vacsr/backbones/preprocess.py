"""From a decoded photo to the square a tower sees, with PIL and torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.resample import Resample
from vacsr.errors import UsageError

Triple = tuple[float, float, float]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


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
        photo = photo if photo.mode == "RGB" else photo.convert("RGB")
        if self.resize == "whole":
            photo = photo.resize((side, side), _FILTERS[self.resample])
        else:
            photo = self._centre(photo, side)
        return torch.from_numpy(np.array(photo)).permute(2, 0, 1).contiguous()

    def _centre(self, photo: Image.Image, side: int) -> Image.Image:
        short = max(side, round(side * self.short / self.size))
        width, height = photo.size
        scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        photo = photo.resize(scaled, _FILTERS[self.resample])
        left, top = (photo.width - side) // 2, (photo.height - side) // 2
        return photo.crop((left, top, left + side, top + side))

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
