"""Photos and captions as they are: what towers are trained on, and where features are made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from vacsr.data.checks import check_assignment, check_text, check_unique
from vacsr.data.labelled import LabelledPairs
from vacsr.data.provenance import UNKNOWN, Provenance
from vacsr.errors import DataError, ShapeMismatch


class Photos(Protocol):
    """N photos, opened by their row. Several threads may open at once."""

    def __len__(self) -> int:
        """How many."""

    def name(self, row: int) -> str:
        """What a person would call it: a path, or a member of an archive."""

    def open(self, row: int) -> Image.Image:
        """The decoded RGB photo, upright; a photo that cannot be read is a DataError that names it."""

    def take(self, rows: Sequence[int]) -> Photos:
        """Some of them, in this order."""

    def digest(self) -> str:
        """Changes when the photos do; need not read them all."""


@dataclass(frozen=True, eq=False)
class ArrayPhotos:
    """Photos held in memory: a generated world, or a small set decoded once. [N, H, W, 3] uint8"""

    pixels: npt.NDArray[np.uint8]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = list(self.pixels.shape)
        if self.pixels.ndim != 4 or shape[3] != 3 or self.pixels.dtype != np.uint8:
            raise ShapeMismatch(f"pixels are {self.pixels.dtype} {shape}, expected uint8 [N, H, W, 3]")
        if len(self.names) != shape[0]:
            raise ShapeMismatch(f"{shape[0]:,} photos and {len(self.names):,} names — give one name per photo")

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        """Its name."""
        return self.names[row]

    def open(self, row: int) -> Image.Image:
        """As an image."""
        return Image.fromarray(self.pixels[row])

    def take(self, rows: Sequence[int]) -> ArrayPhotos:
        """Some of them."""
        return ArrayPhotos(self.pixels[list(rows)], tuple(self.names[row] for row in rows))

    def digest(self) -> str:
        """Of every pixel."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class PhotoSet(LabelledPairs):
    """N photos and M captions in words, each caption of one photo. A photo without captions is a distractor."""

    photos: Photos
    """[N]"""
    image_ids: tuple[str, ...]
    """[N], unique."""
    captions: tuple[str, ...]
    """[M] texts, none blank."""
    caption_ids: tuple[str, ...]
    """[M], unique."""
    caption_image: Tensor
    """[M] int64, the row of each caption's photo."""
    split: str = "all"
    provenance: Provenance = UNKNOWN
    """Of raw data always unknown: the towers are the model's own."""
    skipped: tuple[str, ...] = ()
    """What was left out and why, one line each; see ``on_error``."""

    def __post_init__(self) -> None:
        if not len(self.photos):
            raise DataError("no photos — give at least one")
        if len(self.photos) != len(self.image_ids):
            raise ShapeMismatch(f"{len(self.photos):,} photos and {len(self.image_ids):,} image ids — give one id each")
        check_unique(self.image_ids, kind="image")
        check_unique(self.caption_ids, kind="caption")
        check_assignment(self.caption_image, self.caption_ids, images=len(self.image_ids))
        check_text(self.captions, self.caption_ids)

    def describe(self) -> str:
        """One line: split, sizes, captions per image."""
        sizes = f"{len(self.image_ids):,} photos, {len(self):,} captions, {self.captions_per_image()} per photo"
        return f"{self.split}: {sizes}" + (f", {len(self.skipped):,} left out" if self.skipped else "")

    def taken(self, rows: Tensor, kept: Tensor) -> dict[str, Any]:
        """The chosen photos; the captions are the base's."""
        return {"photos": self.photos.take(rows.tolist())}

    def digest(self) -> str:
        """Of photos, captions and labels."""
        data = hashlib.sha256(self.photos.digest().encode())
        for words in (self.image_ids, self.caption_ids, self.captions):
            data.update("\0".join(words).encode())
        data.update(self.caption_image.cpu().contiguous().numpy().tobytes())
        return data.hexdigest()
