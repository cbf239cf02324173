"""What a scene is, and how one is drawn: a background, and a few things with a shape, colour, size and position.

Some combinations are likelier, as in photos: fish and boats are common on a beach, trees are often green. So some
captions fit many scenes and others fit one. Scenes with a subject have one thing larger than all others; they show the
classes of few-shot recognition. A small CLIP learns to name things from these, but backgrounds from ordinary scenes.
"""

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SIZES = ("small", "medium", "large")
VARIANTS = 5  # pictures of each background
RADIUS: Mapping[str, float] = {"small": 0.085, "medium": 0.122, "large": 0.17, "huge": 0.25}
"""Half the extent of a thing, in widths of the picture. Only subjects are huge."""
MOST = 6  # things in a scene

_T = TypeVar("_T")
_SUBJECT_SIZES = {"large": 1, "huge": 2}  # and how often
_OTHERS = {0: 1, 1: 2, 2: 2, 3: 1}  # small things beside a subject, and how often
_MARGIN = 0.015  # between a thing and the edge
_TRIES = 60  # positions tried for a thing
_SPACING = 1.04  # of two things: their distance in sums of their radii, at least
_TILTS = (-11, 0, 11)
_LIKES = 3.0  # how much likelier a usual companion or colour is
_HABIT = 0.8  # how often a thing is at its usual height
_COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "meadow": ("tree", "mushroom", "house"),
    "beach": ("boat", "ball", "fish"),
    "snow": ("tree", "gift", "house"),
    "night": ("moon", "star", "house"),
    "city": ("house", "moon", "heart"),
    "desert": ("star", "ball", "moon"),
    "underwater": ("fish", "boat", "star"),
}
BACKGROUNDS = tuple(_COMPANIONS)


class _Habits(NamedTuple):
    """How a shape usually looks."""

    colour: str
    tilts: bool
    mirrors: bool
    heights: tuple[float, float]  # 0 is the top and 1 the bottom


_HABITS: Mapping[str, _Habits] = {
    "ball": _Habits("blue", True, False, (0.0, 1.0)),
    "gift": _Habits("pink", True, False, (0.3, 1.0)),
    "star": _Habits("yellow", True, False, (0.0, 0.6)),
    "heart": _Habits("red", True, False, (0.0, 1.0)),
    "moon": _Habits("yellow", True, True, (0.0, 0.5)),
    "house": _Habits("orange", False, True, (0.4, 1.0)),
    "tree": _Habits("green", False, False, (0.4, 1.0)),
    "fish": _Habits("orange", True, True, (0.2, 1.0)),
    "boat": _Habits("blue", False, True, (0.3, 1.0)),
    "mushroom": _Habits("red", False, False, (0.4, 1.0)),
}
SHAPES = tuple(_HABITS)


@dataclass(frozen=True)
class Thing:
    shape: str
    colour: str
    size: str
    x: float  # of its centre, 0 at the left edge and 1 at the right
    y: float  # 0 at the top edge and 1 at the bottom
    tilt: int = 0  # degrees, clockwise
    mirrored: bool = False

    @property
    def radius(self) -> float:
        """Half its extent, in widths of the picture."""
        return RADIUS[self.size]


@dataclass(frozen=True)
class Scene:
    background: str
    variant: int  # which picture of the background
    things: tuple[Thing, ...]


def stream(seed: int, purpose: str) -> random.Random:
    """An independent generator for each purpose of one seed."""
    digest = hashlib.sha256(f"scenes/{seed}/{purpose}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def draw_weighted(weights: Mapping[_T, float], rng: random.Random) -> _T:
    """One of the keys, in proportion to its value."""
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def draw_scene(rng: random.Random) -> Scene:
    """One scene of one to six things."""
    background, variant = rng.choice(BACKGROUNDS), rng.randrange(VARIANTS)
    groups = draw_weighted({1: 15, 2: 40, 3: 33, 4: 12}, rng)
    looks = [look for _ in range(groups) for look in _draw_group(background, rng)][:MOST]
    return Scene(background, variant, _placed(looks, rng))


def draw_subject_scene(rng: random.Random, *, shape: str | None = None, colour: str | None = None) -> Scene:
    """A subject anywhere on any background, beside up to three small things of other shapes; all drawn evenly."""
    shape = rng.choice(SHAPES) if shape is None else shape
    colour = rng.choice(COLOURS) if colour is None else colour
    subject = (shape, colour, draw_weighted(_SUBJECT_SIZES, rng))
    background, variant = rng.choice(BACKGROUNDS), rng.randrange(VARIANTS)
    rest = [other for other in SHAPES if other != shape]
    others = [(rng.choice(rest), rng.choice(COLOURS), "small") for _ in range(draw_weighted(_OTHERS, rng))]
    return Scene(background, variant, _placed([subject, *others], rng))


def _draw_group(background: str, rng: random.Random) -> list[tuple[str, str, str]]:
    """Shape, colour and size of one to three things of one shape, mostly alike."""
    usual = _COMPANIONS[background]
    shape = draw_weighted({shape: _LIKES if shape in usual else 1.0 for shape in SHAPES}, rng)
    colour, size = _draw_colour(shape, rng), rng.choice(SIZES)
    group = [(shape, colour, size)]
    for _ in range(draw_weighted({0: 68, 1: 20, 2: 12}, rng)):
        other_colour = colour if rng.random() < 0.75 else _draw_colour(shape, rng)
        group.append((shape, other_colour, size if rng.random() < 0.7 else rng.choice(SIZES)))
    return group


def _draw_colour(shape: str, rng: random.Random) -> str:
    return draw_weighted({colour: _LIKES if colour == _HABITS[shape].colour else 1.0 for colour in COLOURS}, rng)


def _placed(looks: Sequence[tuple[str, str, str]], rng: random.Random) -> tuple[Thing, ...]:
    """Give each a position where it covers no other, the largest first; one without room is left out."""
    placed: list[Thing] = []
    for shape, colour, size in sorted(looks, key=lambda look: -RADIUS[look[2]]):
        _, tilts, mirrors, heights = _HABITS[shape]
        tilt = rng.choice(_TILTS) if tilts else 0
        mirrored = mirrors and rng.random() < 0.5
        if rng.random() > _HABIT:
            heights = (0.0, 1.0)
        low, high = RADIUS[size] + _MARGIN, 1 - RADIUS[size] - _MARGIN  # inside the picture
        for _ in range(_TRIES):
            x = round(rng.uniform(low, high), 3)
            y = round(rng.uniform(max(low, heights[0]), min(high, heights[1])), 3)
            thing = Thing(shape, colour, size, x, y, tilt, mirrored)
            distances = [math.dist((x, y), (other.x, other.y)) / (thing.radius + other.radius) for other in placed]
            if all(distance >= _SPACING for distance in distances):
                placed.append(thing)
                break
    return tuple(placed)
