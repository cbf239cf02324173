"""Images that strangers send, and photos that are shown to them."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence

from PIL import Image

from vacsr.backbones.images import PhotoTransform
from vacsr.data import PhotoSet
from vacsr.data.decode import decode_photo
from vacsr.data.photos import Photos
from vacsr.errors import DataError
from vacsr.search.engine import Searcher
from vacsr.search.service.problems import Problem, busy

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")
"""That are taken from strangers: fewer than a person's own files may have."""
MAX_SCANS = 100
"""Of a JPEG. Cameras and programs write about ten; each goes through all pixels again, and may take fifty bytes."""
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])")  # of a JPEG, less those that nothing follows
_QUALITY = 85
_ROOM = 2**24  # pixels; a transform goes another way beyond it


def decode_upload(data: bytes, *, max_pixels: int) -> Image.Image:
    """An image from bytes of unknown kind: RGB and upright, or a :class:`Problem`.

    Its size is read from the header first, so that a small file that unfolds into gigabytes is not unfolded.
    """
    width, height = _header_size(data, max_pixels=max_pixels)
    if width * height > max_pixels:
        raise _too_many(max_pixels)
    if _scans(data) > MAX_SCANS:
        raise Problem(422, "too_many_scans", f"a JPEG may have {MAX_SCANS} scans — write it anew")
    try:
        return decode_photo(data, name="the image")
    except (DataError, MemoryError) as error:
        raise _unreadable() from error


def as_seen(photo: Image.Image, transform: PhotoTransform) -> Image.Image:
    """A copy that is small, and of which a tower sees the same pixels: what waits for the model takes little memory.

    The square itself, which a transform leaves as it is; or, where it cuts the centre from a larger one, the whole at
    the size from which it is cut.
    """
    try:
        short = transform.shorter_side()
        if transform.resize == "whole" or short == transform.size:
            return Image.fromarray(transform.pixels(photo).permute(1, 2, 0).numpy())
        width, height = photo.size
        scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        if scaled[0] * scaled[1] > _ROOM:
            raise DataError("too long and narrow")
        return photo.resize(scaled, Image.Resampling[transform.resample.upper()])
    except (DataError, ArithmeticError, MemoryError, ValueError) as error:
        raise Problem(422, "bad_image", "the image is of a shape that cannot be used") from error


def from_base64(text: str) -> bytes:
    """Of an image in JSON."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem(422, "bad_base64", "an image in JSON is base64 without line breaks") from error


def _header_size(data: bytes, *, max_pixels: int) -> tuple[int, int]:
    """Width and height, without decoding. Pillow's own warning of large images may be an error, by filter."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many(max_pixels) from error
    except Exception as error:  # decoders meet broken bytes with errors of any kind
        raise _unreadable() from error


def _scans(data: bytes) -> int:
    """Of a JPEG, counted by its markers up to its end, and to one more than are allowed; 0 of anything else.

    Bytes alone would not do: what phones hang behind the photo, such as a video, holds the same ones by chance.
    """
    place, found = 2, 0
    while data.startswith(b"\xff\xd8") and found <= MAX_SCANS:
        marker = _MARKER.search(data, place)
        if marker is None or marker[1] == b"\xd9":
            break
        found += marker[1] == b"\xda"
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return found


def _too_many(max_pixels: int) -> Problem:
    return Problem(413, "too_many_pixels", f"an image may have {max_pixels:,} pixels — make it smaller")


def _unreadable() -> Problem:
    known = ", ".join(FORMATS)
    return Problem(422, "bad_image", f"the image cannot be read; the formats that are taken are {known}")


class PhotoShelf:
    """Photos by the id that they have in the index. The data layer opened them at start; a request only picks one."""

    def __init__(self, photos: Sequence[PhotoSet], searcher: Searcher, *, side: int) -> None:
        self._searcher, self._side = searcher, side
        self._kept: dict[str, tuple[Photos, int]] = {}
        for one in photos:
            for row, name in enumerate(one.image_ids):
                self._kept.setdefault(name, (one.photos, row))

    def has(self, identity: str) -> bool:
        """Is there a photo of this id, whether or not the index holds it?"""
        return identity in self._kept

    def image(self, identity: str, *, side: int = 0) -> Image.Image:
        """The photo of an id that the index holds; ``side`` says how many pixels of it are enough, 0 for all."""
        kept = self._kept.get(identity)
        if kept is None or not self._searcher.index.known([identity])[0]:
            raise Problem(404, "no_such_id", "the index holds no photo of this id")
        source, row = kept
        try:
            return source.open(row, side=side)
        except DataError as error:
            raise Problem(404, "photo_unreadable", "the photo of this id cannot be read") from error
        except MemoryError as error:
            raise busy("there is no memory left for this photo", status=503, code="no_memory") from error

    def jpeg(self, identity: str) -> bytes:
        """Small enough to show; written anew, so without the place and camera that a photo's file may name."""
        image = self.image(identity, side=self._side)
        image.thumbnail((self._side, self._side))
        kept = io.BytesIO()
        image.info = {}  # Pillow would write some of it again
        image.save(kept, "JPEG", quality=_QUALITY)
        return kept.getvalue()
