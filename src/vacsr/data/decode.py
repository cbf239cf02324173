"""From an encoded photo to upright RGB pixels. Whatever the file holds, the answer is a photo or a DataError."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import partial

import numpy as np
from PIL import Image, ImageFile

from vacsr.errors import DataError

MAX_PIXELS = 178_956_970
"""Pillow's own limit for an error; a header may promise more than the memory holds."""
# Formats of photos. Pillow knows others, of which some start programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_STRIP = 2**18  # pixels
_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_photo(data: bytes, *, name: str, side: int = 0, otherwise: str = "") -> Image.Image:
    """Decode an encoded photo into RGB, upright by its EXIF orientation, what is transparent over white.

    ``side``: the caller needs no more than this many pixels on the shorter side. JPEG is then decoded at a half, a
    quarter or an eighth where that leaves at least ``side`` on both sides, which changes pixels a little even after a
    resize; other formats ignore it, and 0 decodes in full. Nothing of Pillow's global state is used or changed, so that
    several threads may decode at once. ``name`` is for messages, and so is ``otherwise``: what can be done but to mend
    the photo, which only the caller knows.
    """
    refusal = partial(_refusal, name, otherwise=otherwise)
    try:
        image = _open(data)
        if image is None:
            raise DataError(refusal("empty file" if not data else "no known image format"))
        if image.width * image.height > MAX_PIXELS:
            size = f"its header says {image.width:,} × {image.height:,} pixels, {MAX_PIXELS:,} in all are the limit"
            raise DataError(refusal(size, act="make it smaller"))
        if side > 0:
            image.draft(None, (side, side))
        image.load()
        return upright(image)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # decoders meet broken bytes with errors of any kind
        raise DataError(refusal(str(error) or type(error).__name__)) from error


def upright(image: Image.Image) -> Image.Image:
    """A loaded image as RGB, turned as its EXIF orientation says, what is transparent over white."""
    turn, photo = _UPRIGHT.get(_orientation(image)), _as_rgb(image)
    return photo if turn is None else photo.transpose(turn)


def encoded_format(data: bytes) -> str | None:
    """``jpg``, ``png`` or ``webp`` by the first bytes, None for anything else.

    >>> encoded_format(bytes([0xFF, 0xD8, 0xFF, 0xE0])), encoded_format(b"GIF89a")
    ('jpg', None)
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _refusal(name: str, reason: str, *, otherwise: str, act: str = "copy it again") -> str:
    return f"{name} cannot be read as a photo ({reason}) — {act}" + (f", or {otherwise}" if otherwise else "")


def _open(data: bytes) -> ImageFile.ImageFile | None:
    """Read the header. ``Image.open`` would do, but warns of large photos by way of global warning filters."""
    Image.init()
    file = io.BytesIO(data)
    for kind in _FORMATS:
        if kind not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[kind]
        try:
            mine = accept is None or accept(data[:16])
            if mine and not isinstance(mine, str):  # a text says that this Pillow was built without the format
                file.seek(0)
                return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # how plugins say "not mine"
            continue
    return None


def _orientation(image: Image.Image) -> int:
    """By EXIF; broken metadata leaves the photo as it lies."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _as_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB."""
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Grey of 16 bits (0 to 65535) or floats (0 to 1, or 0 to 255) as [H, W] uint8; Pillow's own way would clip it."""
    if image.mode.startswith("I"):
        scale = 1 / 257
    else:
        scale = 255.0 if max((strip.max() for _, strip in _strips(image)), default=0.0) <= 1 else 1.0
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top, strip in _strips(image):
        grey[top : top + len(strip)] = np.clip(np.rint(strip * scale), 0, 255)
    return grey


def _strips(image: Image.Image) -> Iterator[tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]]:
    """First row and values of a few rows at a time: as float64 a whole photo takes many times its own memory."""
    rows = max(1, _STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        yield top, np.nan_to_num(np.asarray(part, dtype=np.float64))
