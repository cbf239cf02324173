"""The ten shapes as polygons, back to front, in a box from -1 to 1 with y pointing down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
"""[P, 2], the corners of a closed polygon."""


class Part(NamedTuple):
    """One polygon, and how it is painted: in a tone of the thing's own colour, or in a colour of its own."""

    points: Points
    paint: str


def parts_of(shape: str) -> Sequence[Part]:
    """The polygons of a shape, back to front."""
    return _SHAPES[shape]()


def _polygon(*corners: tuple[float, float]) -> Points:
    return np.array(corners, dtype=np.float64)


def _ellipse(x: float, y: float, width: float, height: float | None = None, *, turn: float = 0.0) -> Points:
    """Half axes ``width`` and ``height``, turned by ``turn`` degrees."""
    angle, lean = np.linspace(0, 2 * math.pi, 48, endpoint=False), math.radians(turn)
    across, down = width * np.cos(angle), (width if height is None else height) * np.sin(angle)
    return np.stack(
        [x + across * math.cos(lean) - down * math.sin(lean), y + across * math.sin(lean) + down * math.cos(lean)],
        axis=1,
    )


def _soft(points: Points, *, cut: float = 0.2, rounds: int = 3) -> Points:
    """Round the corners: each round cuts every corner off."""
    for _ in range(rounds):
        after, before = np.roll(points, -1, axis=0), np.roll(points, 1, axis=0)
        ends = [points + cut * (before - points), points + cut * (after - points)]
        points, cut = np.stack(ends, axis=1).reshape(-1, 2), 0.25
    return points


def _ball() -> list[Part]:
    bands = [_lens(-0.56, -0.22), _lens(0.22, 0.56)]
    shade = _between(_arc(0.92, 20, 160), _arc(0.92, 20, 160, lift=-0.3))
    return [
        Part(_ellipse(0, 0, 0.92), "body"),
        *(Part(band, "pale") for band in bands),
        Part(shade, "shade"),
        Part(_ellipse(-0.34, -0.46, 0.2, 0.12, turn=-40), "shine"),
    ]


def _lens(left: float, right: float) -> Points:
    """A band of a ball, between two meridians given by where they cross the middle."""
    angle = np.linspace(-math.pi / 2, math.pi / 2, 24)
    sides = [np.stack([at * np.cos(angle), 0.92 * np.sin(angle)], axis=1) for at in (left, right)]
    return np.concatenate([sides[0], sides[1][::-1]])


def _arc(radius: float, start: float, end: float, *, lift: float = 0.0) -> Points:
    """Part of a circle from ``start`` to ``end`` degrees, its middle moved by ``lift`` and its ends left in place."""
    angle = np.radians(np.linspace(start, end, 32))
    bulge = lift * np.sin(np.linspace(0, math.pi, 32))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle) + bulge], axis=1)


def _between(one: Points, other: Points) -> Points:
    return np.concatenate([one, other[::-1]])


def _gift() -> list[Part]:
    return [
        Part(_ellipse(-0.3, -0.72, 0.32, 0.19, turn=25), "dark"),
        Part(_ellipse(0.3, -0.72, 0.32, 0.19, turn=-25), "dark"),
        Part(_soft(_polygon((-0.74, -0.3), (0.74, -0.3), (0.74, 0.88), (-0.74, 0.88)), cut=0.07), "body"),
        Part(_polygon((-0.74, -0.1), (0.74, -0.1), (0.74, 0.02), (-0.74, 0.02)), "shade"),
        Part(_soft(_polygon((-0.86, -0.54), (0.86, -0.54), (0.86, -0.08), (-0.86, -0.08)), cut=0.1), "light"),
        Part(_polygon((-0.17, -0.54), (0.17, -0.54), (0.17, 0.88), (-0.17, 0.88)), "pale"),
        Part(_ellipse(0, -0.62, 0.15), "body"),
    ]


def _star_points(outer: float, inner: float) -> Points:
    angle = np.radians(np.arange(10) * 36 - 90)
    radius = np.where(np.arange(10) % 2 == 0, outer, inner)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle) + 0.06], axis=1)


def _star() -> list[Part]:
    return [
        Part(_soft(_star_points(1.06, 0.5), cut=0.16), "body"),
        Part(_soft(_star_points(0.62, 0.3), cut=0.16), "light"),
    ]


def _heart() -> list[Part]:
    angle = np.linspace(0, 2 * math.pi, 72, endpoint=False)
    x = 16 * np.sin(angle) ** 3
    y = -(13 * np.cos(angle) - 5 * np.cos(2 * angle) - 2 * np.cos(3 * angle) - np.cos(4 * angle))
    return [
        Part(np.stack([x / 17, y / 16.5 - 0.06], axis=1), "body"),
        Part(_ellipse(-0.46, -0.42, 0.22, 0.13, turn=-42), "shine"),
    ]


def _moon() -> list[Part]:
    """A crescent, thick enough to cover the middle of its box."""
    angle = np.radians(np.linspace(48, 312, 60))
    outer = np.stack([0.18 + 0.95 * np.cos(angle), 0.95 * np.sin(angle)], axis=1)
    tip = 0.95 * math.sin(math.radians(48))
    edge = 0.18 + 0.95 * math.cos(math.radians(48))
    inner_angle = np.linspace(-math.pi / 2, math.pi / 2, 48)
    inner = np.stack([edge - 0.68 * np.cos(inner_angle), tip * np.sin(inner_angle)], axis=1)
    return [
        Part(np.concatenate([outer, inner]), "body"),
        Part(_ellipse(-0.42, -0.3, 0.15), "shade"),
        Part(_ellipse(-0.5, 0.26, 0.1), "shade"),
        Part(_ellipse(-0.1, 0.62, 0.09), "shade"),
    ]


def _house() -> list[Part]:
    return [
        Part(_polygon((0.3, -0.9), (0.56, -0.9), (0.56, -0.3), (0.3, -0.3)), "dark"),
        Part(_polygon((-0.72, -0.15), (0.72, -0.15), (0.72, 0.88), (-0.72, 0.88)), "body"),
        Part(_polygon((-0.72, -0.1), (0.72, -0.1), (0.72, 0.06), (-0.72, 0.06)), "shade"),
        Part(_soft(_polygon((0, -0.95), (1.0, -0.02), (-1.0, -0.02)), cut=0.06), "dark"),
        Part(_soft(_polygon((-0.46, 0.28), (-0.02, 0.28), (-0.02, 0.88), (-0.46, 0.88)), cut=0.05), "wood"),
        Part(_polygon((0.16, 0.24), (0.56, 0.24), (0.56, 0.62), (0.16, 0.62)), "glow"),
    ]


def _tree() -> list[Part]:
    tiers = [(0.7, 0.8, 0.02), (0.3, 0.66, -0.36), (-0.12, 0.5, -0.98)]
    parts = [Part(_polygon((-0.15, 0.6), (0.15, 0.6), (0.17, 0.98), (-0.17, 0.98)), "wood")]
    for number, (foot, half, top) in enumerate(tiers):
        corners = _polygon((0, top), (half, foot), (0, foot + 0.1), (-half, foot))
        parts.append(Part(_soft(corners, cut=0.08), ("dark", "body", "light")[number]))
    return parts


def _fish() -> list[Part]:
    tail = _polygon((0.42, 0.0), (0.98, -0.5), (0.88, 0.0), (0.98, 0.5))
    fin = _polygon((-0.32, -0.42), (0.1, -0.78), (0.36, -0.36))
    return [
        Part(_soft(tail, cut=0.14), "dark"),
        Part(_soft(fin, cut=0.14), "dark"),
        Part(_ellipse(-0.18, 0.02, 0.78, 0.53), "body"),
        Part(_between(_arc(0.5, 25, 155), _arc(0.5, 25, 155, lift=-0.2)) * (1.5, 1.0) + (-0.18, 0.02), "light"),
        Part(_soft(_polygon((-0.1, 0.02), (0.3, -0.14), (0.3, 0.3)), cut=0.15), "dark"),
        Part(_ellipse(-0.58, -0.12, 0.15), "white"),
        Part(_ellipse(-0.6, -0.12, 0.08), "ink"),
    ]


def _boat() -> list[Part]:
    return [
        Part(_polygon((-0.05, -0.96), (0.05, -0.96), (0.05, 0.4), (-0.05, 0.4)), "wood"),
        Part(_soft(_polygon((0.1, -0.9), (0.82, 0.24), (0.1, 0.24)), cut=0.05), "light"),
        Part(_soft(_polygon((-0.1, -0.66), (-0.1, 0.24), (-0.7, 0.24)), cut=0.05), "pale"),
        Part(_soft(_polygon((-0.96, 0.34), (0.96, 0.34), (0.62, 0.92), (-0.6, 0.92)), cut=0.08), "body"),
        Part(_polygon((-0.9, 0.46), (0.9, 0.46), (0.83, 0.57), (-0.83, 0.57)), "pale"),
    ]


def _mushroom() -> list[Part]:
    stem = _polygon((-0.28, 0.0), (0.28, 0.0), (0.36, 0.92), (-0.36, 0.92))
    angle = np.linspace(math.pi, 2 * math.pi, 40)
    dome = np.stack([0.96 * np.cos(angle), 0.24 + 1.14 * np.sin(angle)], axis=1)
    brim = _ellipse(0, 0.24, 0.96, 0.16)
    return [
        Part(_soft(stem, cut=0.12), "cream"),
        Part(dome, "body"),
        Part(brim, "body"),
        Part(_ellipse(0, 0.31, 0.62, 0.07), "shade"),
        Part(_ellipse(-0.04, -0.5, 0.2, 0.17), "white"),
        Part(_ellipse(-0.56, -0.06, 0.16, 0.15), "white"),
        Part(_ellipse(0.5, -0.14, 0.18, 0.17), "white"),
    ]


_SHAPES: Mapping[str, Callable[[], Sequence[Part]]] = {
    "ball": _ball,
    "gift": _gift,
    "star": _star,
    "heart": _heart,
    "moon": _moon,
    "house": _house,
    "tree": _tree,
    "fish": _fish,
    "boat": _boat,
    "mushroom": _mushroom,
}
