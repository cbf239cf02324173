"""From a decoded photo to a square that training sees: a random crop, or RandAugment. Draws are passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from PIL import Image

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.backbones.randaugment import DRAWS, randaugment
from vacsr.backbones.resample import Resample
from vacsr.fewshot.config import FewshotTrainConfig

_TRIES = 10
_NARROW, _WIDE = 3 / 4, 4 / 3  # of a crop's width over its height


class Box(NamedTuple):
    """A part of a photo, in pixels."""

    left: int
    top: int
    width: int
    height: int


def crop_box(width: int, height: int, *, draws: Sequence[float], scale: tuple[float, float]) -> Box:
    """A box whose area is a share of the photo's from ``scale`` and whose aspect is 3/4 to 4/3, by the usual rule.

    Four draws in (0, 1) for each of ten tries: area, aspect, top, left; a try that does not fit into the photo is
    followed by the next. Where none fits, the largest box in the middle that keeps to the aspects.

    >>> crop_box(100, 50, draws=[0.5] * 40, scale=(0.5, 0.5))
    Box(left=25, top=0, width=50, height=50)
    """
    low, high = min(scale), max(scale)
    for place in range(0, 4 * _TRIES, 4):
        area, aspect, top, left = draws[place : place + 4]
        pixels = width * height * (low + (high - low) * area)
        ratio = math.exp(math.log(_NARROW) + (math.log(_WIDE) - math.log(_NARROW)) * aspect)
        wide, tall = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return Box(_place(left, width - wide), _place(top, height - tall), wide, tall)
    return _middle(width, height)


def _place(draw: float, room: int) -> int:
    """A whole number from 0 to ``room``, each as likely."""
    return min(int(draw * (room + 1)), room)


def _middle(width: int, height: int) -> Box:
    wide, tall = width, height
    if width / height < _NARROW:
        tall = round(width / _NARROW)
    elif width / height > _WIDE:
        wide = round(height * _WIDE)
    return Box((width - wide) // 2, (height - tall) // 2, wide, tall)


class View(Protocol):
    """What training makes of a photo."""

    @property
    def lanes(self) -> int:
        """Draws in (0, 1) that one photo takes."""

    def __call__(self, photo: Image.Image, draws: Sequence[float]) -> Image.Image:
        """An RGB square."""


@dataclass(frozen=True)
class CropView:
    """A random resized crop and perhaps a flip."""

    size: int
    resample: Resample
    scale: tuple[float, float]
    flip: float

    @property
    def lanes(self) -> int:
        """Four for each try, one for the flip."""
        return 4 * _TRIES + 1

    def __call__(self, photo: Image.Image, draws: Sequence[float]) -> Image.Image:
        """The crop as a square."""
        box = crop_box(photo.width, photo.height, draws=draws, scale=self.scale)
        part = photo.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        square = _square(part, self.size, self.resample)
        return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[-1] < self.flip else square


@dataclass(frozen=True)
class AugmentView:
    """The whole photo squeezed into the square, then RandAugment."""

    size: int
    resample: Resample
    operations: int
    magnitude: int

    @property
    def lanes(self) -> int:
        """So many for each operation."""
        return DRAWS * self.operations

    def __call__(self, photo: Image.Image, draws: Sequence[float]) -> Image.Image:
        """The changed square."""
        square = _square(photo, self.size, self.resample)
        return randaugment(square, draws, operations=self.operations, magnitude=self.magnitude)


def _square(photo: Image.Image, size: int, resample: Resample) -> Image.Image:
    return photo.resize((size, size), Image.Resampling[resample.upper()])


def build_view(kind: str, config: FewshotTrainConfig, *, transform: PhotoTransform) -> View:
    """The view that a recipe names, in the tower's size and with its filter (CLIP: bicubic)."""
    if kind == "crop":
        return CropView(transform.size, transform.resample, config.crop, config.flip)
    operations, magnitude = config.randaugment_operations, config.randaugment_magnitude
    return AugmentView(transform.size, transform.resample, operations, magnitude)
