"""Photos with captions: in memory, in lists, or in files and archives (:mod:`vacsr.data.archives`)."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from vacsr.data.decode import PHOTO_BYTES, decode_photo, upright
from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.files import reading
from vacsr.provenance import UNKNOWN, Provenance

SKIP = 'skip what cannot be used: --skip, for vacsr train --set data.on_error=skip, in Python on_error="skip"'
Picture = str | Path | Image.Image
_LOADING = Lock()  # an opened image is decoded at its first use, and not by two threads at once


class Photos(Protocol):
    """N photos, opened by their row. Several threads may open at once."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """A path, or a member of an archive, for messages."""

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """The decoded RGB photo, upright; see :func:`.decode_photo` for ``side``. An unreadable one is a DataError."""

    def take(self, rows: Sequence[int]) -> Photos:
        """Some of them, in this order."""

    def digest(self) -> str:
        """Changes when the photos do; need not read them all."""

    def fingerprint(self, row: int) -> str:
        """Changes when this photo does, so that an index embeds it again; "" where nothing is known."""


@dataclass(frozen=True, eq=False)
class ArrayPhotos:
    """Photos held in memory: a generated world, or a small set decoded once. [N, H, W, 3] uint8"""

    pixels: npt.NDArray[np.uint8]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self.names[row]

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def take(self, rows: Sequence[int]) -> ArrayPhotos:
        return ArrayPhotos(self.pixels[list(rows)], tuple(self.names[row] for row in rows))

    def digest(self) -> str:
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()

    def fingerprint(self, row: int) -> str:
        return content_fingerprint(self.pixels[row].tobytes())


@dataclass(frozen=True, eq=False)
class ListedPhotos:
    """Paths and PIL images that a program has in a list, to be opened by their row."""

    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, pictures: Any) -> ListedPhotos:
        """From a caller's argument; anything but a sequence of paths and images is refused."""
        listed = isinstance(pictures, Sequence) and not isinstance(pictures, str)
        if not listed or not all(isinstance(item, str | Path | Image.Image) for item in pictures):
            message = f"images are a {type(pictures).__name__}, expected a list of paths or PIL images"
            raise UsageError(f"{message} — pass ['photo.jpg']; features are for a model without towers")
        return cls(tuple(pictures))

    def __len__(self) -> int:
        return len(self.pictures)

    def name(self, row: int) -> str:
        picture = self.pictures[row]
        return f"image {row}" if isinstance(picture, Image.Image) else str(picture)

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        """The same pixels as from a file of it."""
        picture = self.pictures[row]
        if not isinstance(picture, Image.Image):
            path = Path(picture).expanduser()
            with reading(path, limit=PHOTO_BYTES, action="check the path and its permissions"):
                data = path.read_bytes()
            return decode_photo(data, name=str(picture), side=side)
        try:
            with _LOADING:
                picture.load()
            return upright(picture)
        except MemoryError:
            raise
        except Exception as error:  # decoders meet broken bytes with errors of any kind
            raise DataError(f"{self.name(row)} of the list cannot be decoded ({error}) — open it again") from error


@dataclass(frozen=True, eq=False, repr=False)
class PhotoSet(LabelledPairs):
    """N photos and M captions in words, each caption of one photo. A photo without captions is a distractor."""

    photos: Photos  # [N]
    image_ids: tuple[str, ...]
    captions: tuple[str, ...]
    caption_ids: tuple[str, ...]
    caption_image: Tensor
    split: str = "all"
    provenance: Provenance = UNKNOWN  # always, for photos: the model's own towers embed them
    splits: tuple[str, ...] | None = None  # [N], of each image, where the data name them
    skipped: tuple[str, ...] = ()
    """What was left out and why, one line each; see ``on_error``."""

    def __post_init__(self) -> None:
        if not len(self.photos):
            raise DataError("no photos — give at least one")
        if len(self.photos) != len(self.image_ids):
            raise ShapeMismatch(f"{len(self.photos):,} photos and {len(self.image_ids):,} image ids — give one id each")
        self.check_labels()

    def describe(self) -> str:
        sizes = f"{len(self.image_ids):,} photos, {len(self):,} captions, {self.captions_per_image()} per photo"
        return f"{self.split}: {sizes}" + (f", {len(self.skipped):,} left out" if self.skipped else "")

    def taken(self, images: Tensor, captions: Tensor) -> dict[str, Any]:
        splits = self.splits and tuple(self.splits[row] for row in images.tolist())
        return {"photos": self.photos.take(images.tolist()), "splits": splits}

    def by_id(self) -> dict[str, tuple[Photos, int]]:
        """Where the photo of each image id is."""
        return {name: (self.photos, row) for row, name in enumerate(self.image_ids)}

    def digest(self) -> str:
        data = hashlib.sha256(self.photos.digest().encode())
        for words in (self.image_ids, self.caption_ids, self.captions):
            data.update("\0".join(words).encode(errors="surrogatepass"))
        data.update(self.caption_image.cpu().contiguous().numpy().tobytes())
        return data.hexdigest()


def without_unreadable(pairs: PhotoSet, *, workers: int = 0) -> PhotoSet:
    """Decode every photo once, in ``workers`` threads (0 for one per core), and leave out those that cannot be read.

    Their captions go with them. ``skipped`` says why, and a warning says how many.
    """

    def reason(row: int) -> str:
        try:
            pairs.photos.open(row)
        except DataError as error:
            why = str(error).rpartition(" — ")[0] or str(error)  # without the action: nobody acts on it here
            named = pairs.photos.name(row).endswith(pairs.image_ids[row])
            return why if named else f"{pairs.image_ids[row]}: {why}"
        return ""

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        reasons = list(pool.map(reason, range(len(pairs.photos))))
    lines = [why for why in reasons if why]
    if len(lines) == len(reasons):
        raise DataError(f"none of the {len(lines):,} photos can be read, first {lines[0]} — check the files")
    if not lines:
        return pairs
    warn_left_out(lines, source=pairs.split)
    readable = [row for row, why in enumerate(reasons) if not why]
    return replace(pairs.subset(readable), skipped=(*pairs.skipped, *lines))


def warn_left_out(lines: Sequence[str], *, source: str) -> None:
    """One warning: how many were left out, and the first three."""
    more = " …" if len(lines) > 3 else ""
    where = "" if source == "all" else f"{source}: "
    warnings.warn(f"{where}{len(lines):,} left out: {'; '.join(lines[:3])}{more}", stacklevel=3)


def content_fingerprint(*parts: str | bytes) -> str:
    """A short hash of some texts or bytes."""
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
