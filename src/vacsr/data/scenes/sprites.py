"""One thing as a cut-out with a white rim and a soft shadow, ready to be laid on a background.

The ten shapes are polygons, back to front, in a box from -1 to 1 with y pointing down.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, int, int]
Array = npt.NDArray[np.float64]
Points = Array  # [P, 2], the corners of a closed polygon

PALETTE: Mapping[str, Colour] = {
    "red": (226, 56, 62),
    "orange": (247, 140, 38),
    "yellow": (252, 208, 52),
    "green": (64, 172, 86),
    "blue": (52, 124, 224),
    "purple": (134, 78, 190),
    "pink": (250, 134, 198),
}
_PAINTS: Mapping[str, tuple[Colour, float]] = {
    "body": ((0, 0, 0), 0),
    "shade": ((40, 20, 60), 0.18),
    "dark": ((40, 20, 60), 0.28),
    "light": ((255, 255, 255), 0.2),
    "pale": ((255, 255, 255), 0.88),
    "shine": ((255, 255, 255), 0.62),
    "wood": ((122, 84, 58), 1),
    "ink": ((40, 36, 52), 1),
    "cream": ((252, 240, 216), 1),
    "glow": ((255, 240, 176), 1),
    "white": ((255, 255, 255), 1),
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
    image = Image.new("RGB", (2 * half, 2 * half), (255, 255, 255))
    outline = Image.new("L", image.size)
    inside, all_of_it = ImageDraw.Draw(image), ImageDraw.Draw(outline)
    for points, paint in _SHAPES[shape]:
        corners = [(float(x), float(y)) for x, y in half + _turned(points, tilt, mirrored) * radius * canvas]
        inside.polygon(corners, fill=_paint(paint, colour))
        all_of_it.polygon(corners, fill=255)
    return _assemble(_lit(image, radius * canvas), _grown(outline, by=_RIM * canvas), canvas=canvas)


def _grown(outline: Image.Image, *, by: float) -> Image.Image:
    """A mask grown by some pixels, its corners rounded: blurred by as much, an edge keeps 16% that far out."""
    heights = [(level - 0.16 * 255) / 12 for level in range(256)]
    ramp = [round(255 * min(1.0, max(0.0, (height + 1) / 2))) for height in heights]
    return outline.filter(ImageFilter.GaussianBlur(by)).point(ramp)


def _turned(points: Points, tilt: int, mirrored: bool) -> Points:
    angle = math.radians(tilt)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    turned: Points = (points * (-1, 1) if mirrored else points) @ turn
    return turned


def _paint(paint: str, colour: Colour) -> Colour:
    other, share = _PAINTS[paint]
    red, green, blue = (round((1 - share) * base + share * mixed) for base, mixed in zip(colour, other, strict=True))
    return red, green, blue


def _lit(image: Image.Image, radius: float) -> Image.Image:
    """Brighter above, darker below; the white around stays white as far as it can."""
    height = np.clip((np.arange(image.height) - image.height / 2) / (2 * radius) + 0.5, 0, 1)
    top, bottom = _LIGHT_FROM_ABOVE
    light = top + (bottom - top) * height
    pixels = np.asarray(image, dtype=np.float32)
    white = (pixels == 255).all(axis=2, keepdims=True)
    lit = np.where(white, pixels, pixels * light[:, None, None].astype(np.float32))
    return Image.fromarray(np.clip(lit, 0, 255).astype(np.uint8))


def _assemble(image: Image.Image, rim: Image.Image, *, canvas: int) -> Image.Image:
    """The cut-out over its shadow, which lies a little lower."""
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


def _polygon(*corners: tuple[float, float]) -> Points:
    return np.array(corners, dtype=np.float64)


def _curve(x: Array, y: Array) -> Points:
    return np.stack([x, y], axis=1)


def _ellipse(x: float, y: float, width: float, height: float | None = None, *, turn: float = 0.0) -> Points:
    """Half axes ``width`` and ``height``, turned by ``turn`` degrees."""
    angle, lean = np.linspace(0, 2 * math.pi, 48, endpoint=False), math.radians(turn)
    across, down = width * np.cos(angle), (width if height is None else height) * np.sin(angle)
    cos, sin = math.cos(lean), math.sin(lean)
    return _curve(x + across * cos - down * sin, y + across * sin + down * cos)


def _soft(points: Points, *, cut: float = 0.2) -> Points:
    """Round the corners: each of three rounds cuts every corner off."""
    for _ in range(3):
        after, before = np.roll(points, -1, axis=0), np.roll(points, 1, axis=0)
        ends = [points + cut * (before - points), points + cut * (after - points)]
        points, cut = np.stack(ends, axis=1).reshape(-1, 2), 0.25
    return points


def _lens(left: float, right: float) -> Points:
    """A band of a ball, between two meridians given by where they cross the middle."""
    angle = np.linspace(-math.pi / 2, math.pi / 2, 24)
    sides = [_curve(at * np.cos(angle), 0.92 * np.sin(angle)) for at in (left, right)]
    return np.concatenate([sides[0], sides[1][::-1]])


def _bowl(radius: float, start: float, end: float, *, lift: float) -> Points:
    """Between an arc of a circle from ``start`` to ``end`` degrees and the same arc, its middle moved by ``lift``."""
    angle, bow = np.radians(np.linspace(start, end, 32)), np.sin(np.linspace(0, math.pi, 32))
    arcs = [_curve(radius * np.cos(angle), radius * np.sin(angle) + by * bow) for by in (0.0, lift)]
    return np.concatenate([arcs[0], arcs[1][::-1]])


def _star(outer: float, inner: float) -> Points:
    angle = np.radians(np.arange(10) * 36 - 90)
    radius = np.where(np.arange(10) % 2 == 0, outer, inner)
    return _curve(radius * np.cos(angle), radius * np.sin(angle) + 0.06)


def _heart() -> Points:
    angle = np.linspace(0, 2 * math.pi, 72, endpoint=False)
    x = 16 * np.sin(angle) ** 3
    y = -(13 * np.cos(angle) - 5 * np.cos(2 * angle) - 2 * np.cos(3 * angle) - np.cos(4 * angle))
    return _curve(x / 17, y / 16.5 - 0.06)


def _crescent() -> Points:
    """Thick enough to cover the middle of its box."""
    outer, inner = np.radians(np.linspace(48, 312, 60)), np.linspace(-math.pi / 2, math.pi / 2, 48)
    tip, edge = 0.95 * math.sin(math.radians(48)), 0.18 + 0.95 * math.cos(math.radians(48))
    sides = [(0.18 + 0.95 * np.cos(outer), 0.95 * np.sin(outer)), (edge - 0.68 * np.cos(inner), tip * np.sin(inner))]
    return np.concatenate([_curve(*side) for side in sides])


def _dome() -> Points:
    angle = np.linspace(math.pi, 2 * math.pi, 40)
    return _curve(0.96 * np.cos(angle), 0.24 + 1.14 * np.sin(angle))


def _tier(foot: float, half: float, top: float) -> Points:
    return _soft(_polygon((0, top), (half, foot), (0, foot + 0.1), (-half, foot)), cut=0.08)


# Polygons and how each is painted: in a tone of the thing's own colour, or in a colour of its own.
_SHAPES: Mapping[str, Sequence[tuple[Points, str]]] = {
    "ball": [
        (_ellipse(0, 0, 0.92), "body"),
        (_lens(-0.56, -0.22), "pale"),
        (_lens(0.22, 0.56), "pale"),
        (_bowl(0.92, 20, 160, lift=-0.3), "shade"),
        (_ellipse(-0.34, -0.46, 0.2, 0.12, turn=-40), "shine"),
    ],
    "gift": [
        (_ellipse(-0.3, -0.72, 0.32, 0.19, turn=25), "dark"),
        (_ellipse(0.3, -0.72, 0.32, 0.19, turn=-25), "dark"),
        (_soft(_polygon((-0.74, -0.3), (0.74, -0.3), (0.74, 0.88), (-0.74, 0.88)), cut=0.07), "body"),
        (_polygon((-0.74, -0.1), (0.74, -0.1), (0.74, 0.02), (-0.74, 0.02)), "shade"),
        (_soft(_polygon((-0.86, -0.54), (0.86, -0.54), (0.86, -0.08), (-0.86, -0.08)), cut=0.1), "light"),
        (_polygon((-0.17, -0.54), (0.17, -0.54), (0.17, 0.88), (-0.17, 0.88)), "pale"),
        (_ellipse(0, -0.62, 0.15), "body"),
    ],
    "star": [(_soft(_star(1.06, 0.5), cut=0.16), "body"), (_soft(_star(0.62, 0.3), cut=0.16), "light")],
    "heart": [(_heart(), "body"), (_ellipse(-0.46, -0.42, 0.22, 0.13, turn=-42), "shine")],
    "moon": [
        (_crescent(), "body"),
        (_ellipse(-0.42, -0.3, 0.15), "shade"),
        (_ellipse(-0.5, 0.26, 0.1), "shade"),
        (_ellipse(-0.1, 0.62, 0.09), "shade"),
    ],
    "house": [
        (_polygon((0.3, -0.9), (0.56, -0.9), (0.56, -0.3), (0.3, -0.3)), "dark"),
        (_polygon((-0.72, -0.15), (0.72, -0.15), (0.72, 0.88), (-0.72, 0.88)), "body"),
        (_polygon((-0.72, -0.1), (0.72, -0.1), (0.72, 0.06), (-0.72, 0.06)), "shade"),
        (_soft(_polygon((0, -0.95), (1.0, -0.02), (-1.0, -0.02)), cut=0.06), "dark"),
        (_soft(_polygon((-0.46, 0.28), (-0.02, 0.28), (-0.02, 0.88), (-0.46, 0.88)), cut=0.05), "wood"),
        (_polygon((0.16, 0.24), (0.56, 0.24), (0.56, 0.62), (0.16, 0.62)), "glow"),
    ],
    "tree": [
        (_polygon((-0.15, 0.6), (0.15, 0.6), (0.17, 0.98), (-0.17, 0.98)), "wood"),
        (_tier(0.7, 0.8, 0.02), "dark"),
        (_tier(0.3, 0.66, -0.36), "body"),
        (_tier(-0.12, 0.5, -0.98), "light"),
    ],
    "fish": [
        (_soft(_polygon((0.42, 0.0), (0.98, -0.5), (0.88, 0.0), (0.98, 0.5)), cut=0.14), "dark"),
        (_soft(_polygon((-0.32, -0.42), (0.1, -0.78), (0.36, -0.36)), cut=0.14), "dark"),
        (_ellipse(-0.18, 0.02, 0.78, 0.53), "body"),
        (_bowl(0.5, 25, 155, lift=-0.2) * (1.5, 1.0) + (-0.18, 0.02), "light"),
        (_soft(_polygon((-0.1, 0.02), (0.3, -0.14), (0.3, 0.3)), cut=0.15), "dark"),
        (_ellipse(-0.58, -0.12, 0.15), "white"),
        (_ellipse(-0.6, -0.12, 0.08), "ink"),
    ],
    "boat": [
        (_polygon((-0.05, -0.96), (0.05, -0.96), (0.05, 0.4), (-0.05, 0.4)), "wood"),
        (_soft(_polygon((0.1, -0.9), (0.82, 0.24), (0.1, 0.24)), cut=0.05), "light"),
        (_soft(_polygon((-0.1, -0.66), (-0.1, 0.24), (-0.7, 0.24)), cut=0.05), "pale"),
        (_soft(_polygon((-0.96, 0.34), (0.96, 0.34), (0.62, 0.92), (-0.6, 0.92)), cut=0.08), "body"),
        (_polygon((-0.9, 0.46), (0.9, 0.46), (0.83, 0.57), (-0.83, 0.57)), "pale"),
    ],
    "mushroom": [
        (_soft(_polygon((-0.28, 0.0), (0.28, 0.0), (0.36, 0.92), (-0.36, 0.92)), cut=0.12), "cream"),
        (_dome(), "body"),
        (_ellipse(0, 0.24, 0.96, 0.16), "body"),
        (_ellipse(0, 0.31, 0.62, 0.07), "shade"),
        (_ellipse(-0.04, -0.5, 0.2, 0.17), "white"),
        (_ellipse(-0.56, -0.06, 0.16, 0.15), "white"),
        (_ellipse(0.5, -0.14, 0.18, 0.17), "white"),
    ],
}
