"""Photos and captions as they are: what towers are trained on, and where features are made from."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from vacsr.data.checks import check_assignment, check_text, check_unique
from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch
from vacsr.provenance import UNKNOWN, Provenance

_CHECKED_AT_ONCE = 256  # photos between two words of progress


class Photos(Protocol):
    """N photos, opened by their row. Several threads may open at once."""

    def __len__(self) -> int:
        """How many."""

    def name(self, row: int) -> str:
        """What a person would call it: a path, or a member of an archive."""

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """The decoded RGB photo, upright; a photo that cannot be read is a DataError that names it.

        ``side`` is a hint: at least so many pixels on both sides are enough, where the photo has them.
        """

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

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """As an image, always whole."""
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
            data.update("\0".join(words).encode(errors="surrogatepass"))
        data.update(self.caption_image.cpu().contiguous().numpy().tobytes())
        return data.hexdigest()


def check_photos(
    pairs: PhotoSet, *, workers: int = 0, progress: Callable[[int, int], None] | None = None
) -> list[tuple[int, str]]:
    """Decode every photo once; the rows that cannot be read, in order, each with the reason.

    ``workers``: threads, 0 for one per core. ``progress`` is told (done, of) in the calling thread.
    """

    def reason(row: int) -> str | None:
        try:
            pairs.photos.open(row)
        except DataError as error:
            return str(error).rpartition(" — ")[0] or str(error)  # what to do is for those who are not asked here
        return None

    count, bad = len(pairs.photos), []
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for start in range(0, count, _CHECKED_AT_ONCE):
            rows = range(start, min(start + _CHECKED_AT_ONCE, count))
            bad += [(row, found) for row, found in zip(rows, pool.map(reason, rows), strict=True) if found is not None]
            if progress is not None:
                progress(rows.stop, count)
    return bad


def without(pairs: PhotoSet, bad: Sequence[tuple[int, str]]) -> PhotoSet:
    """The pairs less these photos and their captions; ``skipped`` says why, and a warning says how many."""
    if not bad:
        return pairs
    dropped = {row for row, _ in bad}
    kept = [row for row in range(len(pairs.image_ids)) if row not in dropped]
    lines = [f"{pairs.image_ids[row]}: {why}" for row, why in bad]
    if not kept:
        raise DataError(f"none of the {len(lines):,} photos can be read, first {lines[0]} — check the files")
    warn_left_out(lines, source=pairs.split)
    return replace(pairs.subset(kept), skipped=(*pairs.skipped, *lines))


def warn_left_out(lines: Sequence[str], *, source: str) -> None:
    """One warning for all that was left out: how many, and the first three."""
    more = " …" if len(lines) > 3 else ""
    message = f"{source}: {len(lines):,} left out: {'; '.join(lines[:3])}{more}"
    warnings.warn(f"{message} — the rest is in PhotoSet.skipped", stacklevel=3)
