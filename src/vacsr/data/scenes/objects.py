"""What a scene is, and how one is drawn: a background, and a few things with a shape, colour, size and place.

The draw leans on habit, as photos do: fish and boats are common on a beach, trees are often green, stars hang high. So
some captions fit many scenes and others fit one. A scene is a pure function of the generator it is drawn from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHAPES = ("ball", "gift", "star", "heart", "moon", "house", "tree", "fish", "boat", "mushroom")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SIZES = ("small", "medium", "large")
BACKGROUNDS = ("meadow", "beach", "snow", "night", "city", "desert", "underwater")
VARIANTS = 5
"""Pictures of each background."""
RADIUS: Mapping[str, float] = {"small": 0.085, "medium": 0.122, "large": 0.17, "huge": 0.25}
"""Half the extent of a thing, in widths of the picture. Ordinary scenes have nothing huge: only subjects are."""
MOST = 6
"""Things in a scene at most."""

_MARGIN = 0.015  # between a thing and the edge
_TRIES = 60  # places tried for a thing
_SPACING = 1.04  # of two things: their distance in sums of their radii, at least
_TILTS = (-11, 0, 11)
_LIKES = 3.0  # how much likelier a usual companion is
_COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "meadow": ("tree", "mushroom", "house"),
    "beach": ("boat", "ball", "fish"),
    "snow": ("tree", "gift", "house"),
    "night": ("moon", "star", "house"),
    "city": ("house", "moon", "heart"),
    "desert": ("star", "ball", "moon"),
    "underwater": ("fish", "boat", "star"),
}
_USUAL_COLOUR: Mapping[str, str] = {
    "ball": "blue",
    "gift": "pink",
    "star": "yellow",
    "heart": "red",
    "moon": "yellow",
    "house": "orange",
    "tree": "green",
    "fish": "orange",
    "boat": "blue",
    "mushroom": "red",
}


class Looks(NamedTuple):
    """How a shape may stand in the picture."""

    tilts: bool
    mirrors: bool
    heights: tuple[float, float]
    """Where it usually is, 0 the top and 1 the bottom."""


LOOKS: Mapping[str, Looks] = {
    "ball": Looks(True, False, (0.0, 1.0)),
    "gift": Looks(True, False, (0.3, 1.0)),
    "star": Looks(True, False, (0.0, 0.6)),
    "heart": Looks(True, False, (0.0, 1.0)),
    "moon": Looks(True, True, (0.0, 0.5)),
    "house": Looks(False, True, (0.4, 1.0)),
    "tree": Looks(False, False, (0.4, 1.0)),
    "fish": Looks(True, True, (0.2, 1.0)),
    "boat": Looks(False, True, (0.3, 1.0)),
    "mushroom": Looks(False, False, (0.4, 1.0)),
}
_HABIT = 0.8  # how often a thing is where it usually is


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    shape: str
    colour: str
    size: str
    x: float
    """Of its centre: 0 is the left edge, 1 the right one."""
    y: float
    """0 is the top edge, 1 the bottom one."""
    tilt: int = 0
    """Degrees, clockwise."""
    mirrored: bool = False

    @property
    def radius(self) -> float:
        """Half its extent, in widths of the picture."""
        return RADIUS[self.size]


@dataclass(frozen=True)
class Scene:
    """A background and what is on it."""

    background: str
    variant: int
    """Which picture of the background."""
    things: tuple[Thing, ...]


class Look(NamedTuple):
    """A thing before it has a place."""

    shape: str
    colour: str
    size: str


def draw_scene(rng: random.Random) -> Scene:
    """One scene of one to six things.

    >>> scene = draw_scene(random.Random(0))
    >>> scene == draw_scene(random.Random(0)), 1 <= len(scene.things) <= MOST
    (True, True)
    """
    background, variant = rng.choice(BACKGROUNDS), rng.randrange(VARIANTS)
    groups = rng.choices((1, 2, 3, 4), weights=(15, 40, 33, 12))[0]
    looks = [look for _ in range(groups) for look in _draw_group(background, rng)][:MOST]
    return Scene(background, variant, place(looks, rng))


def _draw_group(background: str, rng: random.Random) -> list[Look]:
    """One to three things of one shape, mostly alike."""
    weights = [_LIKES if shape in _COMPANIONS[background] else 1.0 for shape in SHAPES]
    shape = rng.choices(SHAPES, weights=weights)[0]
    first = Look(shape, _draw_colour(shape, rng), rng.choice(SIZES))
    group = [first]
    for _ in range(rng.choices((0, 1, 2), weights=(68, 20, 12))[0]):
        colour = first.colour if rng.random() < 0.75 else _draw_colour(shape, rng)
        size = first.size if rng.random() < 0.7 else rng.choice(SIZES)
        group.append(Look(shape, colour, size))
    return group


def _draw_colour(shape: str, rng: random.Random) -> str:
    weights = [_LIKES if colour == _USUAL_COLOUR[shape] else 1.0 for colour in COLOURS]
    return rng.choices(COLOURS, weights=weights)[0]


def place(looks: Sequence[Look], rng: random.Random) -> tuple[Thing, ...]:
    """Give each a place where it covers no other, the largest first; one that finds no room is left out."""
    placed: list[Thing] = []
    for look in sorted(looks, key=lambda look: -RADIUS[look.size]):
        tilts, mirrors, heights = LOOKS[look.shape]
        tilt = rng.choice(_TILTS) if tilts else 0
        mirrored = mirrors and rng.random() < 0.5
        if rng.random() > _HABIT:
            heights = (0.0, 1.0)
        for _ in range(_TRIES):
            x, y = _draw_place(RADIUS[look.size], heights=heights, rng=rng)
            thing = Thing(*look, x, y, tilt, mirrored)
            if all(_apart(thing, other) for other in placed):
                placed.append(thing)
                break
    return tuple(placed)


def _draw_place(radius: float, *, heights: tuple[float, float], rng: random.Random) -> tuple[float, float]:
    """A centre whose thing stays inside the picture, and inside ``heights`` where that leaves room."""
    low, high = radius + _MARGIN, 1 - radius - _MARGIN
    top, bottom = max(low, heights[0]), min(high, heights[1])
    return round(rng.uniform(low, high), 3), round(rng.uniform(top, bottom), 3)


def _apart(one: Thing, other: Thing) -> bool:
    return math.dist((one.x, one.y), (other.x, other.y)) >= _SPACING * (one.radius + other.radius)
