"""What all photos that exist as encoded bytes share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from PIL import Image

from vacsr.data.decode import decode_photo

LEAVE_OUT = "leave out what cannot be used: --skip, in a recipe data.on_error=skip"
AGAIN = f"copy it again, or {LEAVE_OUT}"
"""What to do about a photo of a data set that cannot be read."""


class StoredPhotos(ABC):
    """Photos that exist as encoded bytes. Fits :class:`vacsr.data.photos.Photos`."""

    @abstractmethod
    def __len__(self) -> int:
        """How many."""

    @abstractmethod
    def name(self, row: int) -> str:
        """The path, or the archive and the member."""

    @abstractmethod
    def has(self, row: int) -> bool:
        """Whether it is there at all; says nothing about what it holds."""

    @abstractmethod
    def encoded(self, row: int) -> bytes:
        """The file as it is."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> StoredPhotos:
        """Some of them, in this order."""

    @abstractmethod
    def digest(self) -> str:
        """Of names and sizes; where these lie and when they were written does not matter."""

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """The decoded RGB photo, upright; see :func:`vacsr.data.decode.decode_photo` for ``side``."""
        return decode_photo(self.encoded(row), name=self.name(row), side=side, otherwise=LEAVE_OUT)


def digest_of(marks: Iterable[tuple[str, int]]) -> str:
    """One hash of names and numbers."""
    data = hashlib.sha256()
    for name, number in marks:
        data.update(f"{name}\0{number}\n".encode(errors="surrogatepass"))
    return data.hexdigest()
