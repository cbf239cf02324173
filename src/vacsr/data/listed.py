"""Photos that a program has at hand: paths and PIL images in a list."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from PIL import Image

from vacsr.data.decode import decode_photo, upright
from vacsr.errors import DataError, UsageError

Picture = str | Path | Image.Image
"""A path, or an image already open."""

_LOADING = Lock()  # an opened image is decoded at its first use, and not by two threads at once


@dataclass(frozen=True, eq=False)
class ListedPhotos:
    """Satisfies :class:`vacsr.data.photos.Photos`."""

    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, given: Any) -> ListedPhotos:
        """From what a caller passed; anything but a sequence of paths and images is refused.

        >>> ListedPhotos.of("photo.jpg")
        Traceback (most recent call last):
        vacsr.errors.UsageError: images are a str, expected a list of paths or PIL images — pass ['photo.jpg']
        """
        if isinstance(given, str | Path | Image.Image) or not isinstance(given, Sequence):
            message = f"images are a {type(given).__name__}, expected a list of paths or PIL images"
            raise UsageError(f"{message} — pass ['photo.jpg']")
        wrong = next((item for item in given if not isinstance(item, str | Path | Image.Image)), None)
        if wrong is not None:
            message = f"an image is a {type(wrong).__name__}, expected a path or a PIL image"
            raise UsageError(f"{message} — this model reads photos, not features")
        return cls(tuple(given))

    def __len__(self) -> int:
        return len(self.pictures)

    def name(self, row: int) -> str:
        """The path, or its number."""
        picture = self.pictures[row]
        return f"image {row}" if isinstance(picture, Image.Image) else str(picture)

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """As a file of it would be: upright, RGB, what is transparent over white."""
        picture = self.pictures[row]
        if not isinstance(picture, Image.Image):
            return decode_photo(_read(picture), name=str(picture), side=side)
        try:
            with _LOADING:
                picture.load()
            return upright(picture)
        except MemoryError:
            raise
        except Exception as error:  # decoders meet broken bytes with errors of any kind
            message = f"{self.name(row)} of the list cannot be read as a photo ({error})"
            raise DataError(f"{message} — open it again, or leave it out") from error

    def take(self, rows: Sequence[int]) -> ListedPhotos:
        """Some of them."""
        return ListedPhotos(tuple(self.pictures[row] for row in rows))

    def digest(self) -> str:
        """Of their names."""
        return hashlib.sha256("\0".join(self.name(row) for row in range(len(self))).encode()).hexdigest()


def _read(picture: str | Path) -> bytes:
    """The file of a path."""
    path = Path(picture).expanduser()
    if not path.is_file():
        what = "a folder, not a photo" if path.is_dir() else "not there"
        raise DataError(f"{picture} is {what} — check the path")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{picture} cannot be read ({error.strerror}) — check who may read the file") from error
