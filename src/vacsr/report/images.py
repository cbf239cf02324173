"""Pictures inside a page, as data URIs."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image, features

_QUALITY = 82  # of WebP: a tenth of PNG's size, and no fault that a person would see


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """A picture [H, W, 3] as WebP where Pillow has it, and as PNG elsewhere.

    >>> data_uri(np.zeros((4, 4, 3), dtype=np.uint8))[:11]
    'data:image/'
    """
    kind = "webp" if features.check("webp") else "png"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=_QUALITY, method=6, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def photo_uri(photo: Image.Image, *, side: int) -> str:
    """The whole photo, its longer side as long as this: small enough for a page, which shows it within a square."""
    shown = [max(1, round(length * side / max(photo.size))) for length in photo.size]
    return data_uri(np.asarray(photo.convert("RGB").resize(shown, Image.Resampling.LANCZOS)))
