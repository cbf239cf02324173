"""From an encoded photo to upright RGB pixels. Whatever the file holds, the result is a photo or a DataError.

A small prepared JPEG can keep Pillow busy for minutes, by nested EXIF blocks or thousands of scans. So Pillow is given
only the segments of a JPEG that its pixels need, and the orientation is read from the first EXIF directory alone. What
Pillow parses in Python byte by byte is refused: a PNG of very many chunks, and a BMP with run-length encoding.
"""

import io
import os
import re
import warnings
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from vacsr.errors import DataError

MAX_PIXELS = 178_956_970  # Pillow's own limit
PHOTO_BYTES = 3 * MAX_PIXELS  # the largest file of a photo: every pixel of the largest photo, uncompressed
MAX_SEGMENTS = 4096  # of a JPEG before its first scan, and chunks of a PNG besides its pixels
MAX_SCANS = 100  # passes of a progressive JPEG over the whole picture; encoders write about ten
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")
# Formats of photos. Pillow knows others, of which some start programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])")  # of a JPEG, less those without a length
_PIXEL_SEGMENTS = {0xE0, 0xEE, *range(0xC0, 0xE0)}  # JFIF and Adobe (colour), tables and frames
_ORIENTATION = 0x0112  # the EXIF tag
_MAX_TAGS = 4096  # of an EXIF directory that are looked at
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit is enough


class TooManyPixels(DataError):
    """A photo with more pixels than allowed, by its header."""


def decode_photo(
    data: bytes, *, name: str, side: int = 0, formats: tuple[str, ...] = _FORMATS, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Decode an encoded photo into RGB, upright by its EXIF orientation, transparent pixels over white.

    ``side``: the caller needs no more than this many pixels on the shorter side. JPEG is then decoded at a half, a
    quarter or an eighth of its size if both sides keep at least ``side`` pixels, which changes pixels a little even
    after a resize; other formats ignore it, and 0 decodes in full. Other ``formats``, and more than ``max_pixels``, are
    refused before any pixel is decoded. ``name`` is for messages. Threads may decode in parallel.
    """

    def refusal(reason: str, action: str = "copy it again") -> str:
        return f"{name} cannot be read as a photo ({reason}) — {action}"

    try:
        needed, turn = _needed(data)
        image = Image.open(io.BytesIO(needed), formats=_known_formats(formats))
        if image.format == "BMP" and image.info.get("compression") in (1, 2):
            raise _TooComplex("a BMP with run-length encoding")
        if image.width * image.height > max_pixels:
            raise Image.DecompressionBombError
        if side > 0:
            image.draft(None, (side, side))
        image.load()
        exif = image.info.get("exif")  # a text in some PNG
        return _turned(_as_rgb(image), turn or _exif_orientation(exif if isinstance(exif, bytes) else b""))
    except Image.DecompressionBombError as error:
        raise TooManyPixels(refusal(f"more than {max_pixels:,} pixels", "make it smaller")) from error
    except _TooComplex as error:
        raise DataError(refusal(str(error), "make it smaller or save it again")) from error
    except UnidentifiedImageError as error:
        kind = os.path.splitext(name)[1].lower()
        action = "copy it again" if kind in ("", *PHOTO_SUFFIXES) else "give a photo, such as a JPEG or PNG"
        raise DataError(refusal("no known image format" if data else "empty file", action)) from error
    except MemoryError:
        raise
    except Exception as error:  # decoders meet broken bytes with errors of any kind
        raise DataError(refusal(str(error) or type(error).__name__)) from error


def upright(image: Image.Image) -> Image.Image:
    """An image that the caller loaded as RGB, upright by its EXIF orientation, transparent pixels over white."""
    try:
        turn = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # broken metadata leave the photo as it is
        turn = 1
    return _turned(_as_rgb(image), turn)


class _TooComplex(Exception):
    """The file would take too long to decode."""


@cache
def _known_formats(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    built = set(Image.registered_extensions().values())
    return tuple(name for name in formats if name in built)


def _needed(data: bytes) -> tuple[bytes, int]:
    """What Pillow needs of a file to decode it in bounded time, and the orientation of a JPEG, 0 for other formats."""
    if data.startswith(b"\x89PNG"):
        _check_chunks(data)
    return _needed_of_jpeg(data) if data.startswith(b"\xff\xd8") else (data, 0)


def _needed_of_jpeg(data: bytes) -> tuple[bytes, int]:
    """The segments that pixels need, and the orientation of the first EXIF segment."""
    parts, orientation, at = [data[:2]], 0, 2
    for _ in range(MAX_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None:
            return data, orientation or 1
        code, start = marker[1][0], marker.end()
        if code in (0xDA, 0xD9):  # a scan, or the end
            if data.count(b"\xff\xda", start) >= MAX_SCANS and _count_scans(data, marker.start()) > MAX_SCANS:
                raise _TooComplex(f"more than {MAX_SCANS} scans")
            return b"".join((*parts, data[marker.start() :])), orientation or 1
        at = start + max(2, int.from_bytes(data[start : start + 2], "big"))
        if code in _PIXEL_SEGMENTS:
            parts.append(b"\xff" + data[start - 1 : at])
        elif code == 0xE1 and not orientation and data[start + 2 : start + 8] == b"Exif\0\0":
            orientation = _exif_orientation(data[start + 8 : at])
    raise _TooComplex(f"more than {MAX_SEGMENTS:,} segments")


def _count_scans(data: bytes, at: int) -> int:
    """Scans up to the end of the photo: a video that a phone appended may hold the same bytes by chance."""
    scans = 0
    while scans <= MAX_SCANS and (marker := _MARKER.search(data, at)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _check_chunks(data: bytes) -> None:
    """Refuse a PNG of too many chunks, those of its pixels not counted."""
    chunks, at = 0, 8
    while chunks <= MAX_SEGMENTS and at < len(data):
        chunks += data[at + 4 : at + 8] not in (b"IDAT", b"fdAT")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    if chunks > MAX_SEGMENTS:
        raise _TooComplex(f"more than {MAX_SEGMENTS:,} chunks")


def _exif_orientation(exif: bytes) -> int:
    """1 to 8 by the first directory of a TIFF header; 1 where it says nothing."""
    exif = exif.removeprefix(b"Exif\0\0")
    order: Literal["little", "big"] = "little" if exif.startswith(b"II") else "big"

    def number(start: int, size: int = 2) -> int:
        return int.from_bytes(exif[start : start + size], order)

    first = number(4, 4)
    for entry in range(first + 2, first + 2 + 12 * min(number(first), _MAX_TAGS), 12):
        if number(entry) == _ORIENTATION:
            return number(entry + 8, 4 if number(entry + 2) == 4 else 2)
    return 1


def _turned(photo: Image.Image, orientation: int) -> Image.Image:
    return photo.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else photo


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Grey of 16 bits (0 to 65535) or floats (0 to 1, or 0 to 255) as [H, W]; Pillow's own conversion would clip it."""
    values = np.nan_to_num(np.array(image, dtype=np.float64), copy=False)
    if image.mode.startswith("I"):
        values /= 257
    elif values.max(initial=0) <= 1:
        values *= 255
    return np.rint(values.clip(0, 255, out=values), out=values).astype(np.uint8)
