"""One thing as a cut-out with a white rim and a soft shadow, ready to be laid on a background."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from vacsr.data.scenes.shapes import Part, parts_of

Colour = tuple[int, int, int]

PALETTE: Mapping[str, Colour] = {
    "red": (226, 56, 62),
    "orange": (247, 140, 38),
    "yellow": (252, 208, 52),
    "green": (64, 172, 86),
    "blue": (52, 124, 224),
    "purple": (134, 78, 190),
    "pink": (250, 134, 198),
}
_OWN_PAINT: Mapping[str, Colour] = {
    "wood": (122, 84, 58),
    "ink": (40, 36, 52),
    "cream": (252, 240, 216),
    "glow": (255, 240, 176),
    "white": (255, 255, 255),
}
_TONES: Mapping[str, tuple[Colour, float]] = {
    "body": ((0, 0, 0), 0.0),
    "shade": ((40, 20, 60), 0.18),
    "dark": ((40, 20, 60), 0.28),
    "light": ((255, 255, 255), 0.2),
    "pale": ((255, 255, 255), 0.88),
    "shine": ((255, 255, 255), 0.62),
}
"""What is mixed into the thing's colour, and how much of it."""
_REACH = 1.42  # half the sprite's edge, in radii: room for rim, tilt and shadow
_RIM = 0.0125  # in widths of the picture
_SHADOW = (14, 14, 40)
_SHADOW_ALPHA = 0.42
_LIGHT_FROM_ABOVE = (1.1, 0.9)  # brightness at the top and at the bottom of a thing


def draw_sprite(
    shape: str, colour: Colour, *, radius: float, canvas: int, tilt: int = 0, mirrored: bool = False
) -> Image.Image:
    """RGBA cut-out of a thing around its centre; ``radius`` is in widths of the canvas, ``canvas`` in pixels."""
    half = math.ceil(radius * canvas * _REACH)
    parts = [_turned(part, tilt=tilt, mirrored=mirrored) for part in parts_of(shape)]
    polygons = [(half + part.points * radius * canvas, part.paint) for part in parts]
    image = Image.new("RGB", (2 * half, 2 * half), (255, 255, 255))
    outline = Image.new("L", image.size)
    inside, all_of_it = ImageDraw.Draw(image), ImageDraw.Draw(outline)
    for points, paint in polygons:
        corners = [(float(x), float(y)) for x, y in points]
        inside.polygon(corners, fill=_paint(paint, colour))
        all_of_it.polygon(corners, fill=255)
    return _assemble(_lit(image, radius * canvas), _grown(outline, by=_RIM * canvas), canvas=canvas)


def _grown(outline: Image.Image, *, by: float) -> Image.Image:
    """A mask grown by some pixels, its corners rounded: blurred by as much, an edge keeps 16% that far out."""
    edge = 0.16 * 255
    return outline.filter(ImageFilter.GaussianBlur(by)).point([_ramp((level - edge) / 12) for level in range(256)])


def _ramp(height: float) -> int:
    """From -1 to 1 onto the levels of a mask."""
    return round(255 * min(1.0, max(0.0, (height + 1) / 2)))


def _turned(part: Part, *, tilt: int, mirrored: bool) -> Part:
    angle = math.radians(tilt)
    points = part.points * (-1, 1) if mirrored else part.points
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    return Part(points @ turn, part.paint)


def _paint(paint: str, colour: Colour) -> Colour:
    """The colour of a part."""
    if paint in _OWN_PAINT:
        return _OWN_PAINT[paint]
    other, share = _TONES[paint]
    red, green, blue = (round((1 - share) * own + share * mixed) for own, mixed in zip(colour, other, strict=True))
    return red, green, blue


def _lit(image: Image.Image, radius: float) -> Image.Image:
    """Brighter above, darker below; the white around stays white as far as it can."""
    rows = np.arange(image.height)
    height = np.clip((rows - image.height / 2) / (2 * radius) + 0.5, 0, 1)
    top, bottom = _LIGHT_FROM_ABOVE
    light = top + (bottom - top) * height
    pixels = np.asarray(image, dtype=np.float32)
    white = (pixels == 255).all(axis=2, keepdims=True)
    lit = np.where(white, pixels, pixels * light[:, None, None].astype(np.float32))
    return Image.fromarray(np.clip(lit, 0, 255).astype(np.uint8))


def _assemble(image: Image.Image, rim: Image.Image, *, canvas: int) -> Image.Image:
    """The cut-out over its shadow, which falls a little down."""
    soft = rim.filter(ImageFilter.GaussianBlur(0.014 * canvas))
    shadow = Image.new("L", rim.size)
    shadow.paste(soft, (0, round(0.012 * canvas)))
    shadow = shadow.point([round(level * _SHADOW_ALPHA) for level in range(256)])
    sprite = Image.new("RGBA", rim.size, (*_SHADOW, 0))
    sprite.putalpha(shadow)
    image = image.convert("RGBA")
    image.putalpha(rim)
    sprite.alpha_composite(image)
    return sprite
