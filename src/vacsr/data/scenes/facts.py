"""What can be said of a scene, one fact at a time, and when it is true.

Descriptions are existential: "a star" means that some star is there, whatever else is. "Left of" and its like compare
centres: further left by a clear gap, and more to the left than up or down.
"""

from __future__ import annotations

from dataclasses import dataclass

from vacsr.data.scenes.objects import Scene, Thing

SIDES = ("left", "right", "top", "bottom")
WAYS = ("left of", "above")
"""Relations; "right of" and "below" are these, said from the other end."""
NEAR_EDGE = 0.36
"""A centre nearer to an edge than this is on that side of the picture."""
GAP = 0.12
"""Centres that differ by less than this are neither left of nor above one another."""


@dataclass(frozen=True)
class Kind:
    """A description of a thing; None leaves a property open."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    side: str | None = None
    """Where in the picture, one of SIDES."""


@dataclass(frozen=True)
class IsBackground:
    """The background is this one."""

    name: str


@dataclass(frozen=True)
class AtLeast:
    """There are this many such things, or more."""

    kind: Kind
    count: int


@dataclass(frozen=True)
class Exactly:
    """There are this many such things, no more."""

    kind: Kind
    count: int


@dataclass(frozen=True)
class Related:
    """Some thing of the first kind is left of, or above, some thing of the second."""

    first: Kind
    way: str
    second: Kind


Fact = IsBackground | AtLeast | Exactly | Related


@dataclass(frozen=True)
class Statement:
    """What one caption says: its words, and the facts they come to. It is true where every fact holds."""

    text: str
    facts: tuple[Fact, ...]
    """Unlike one another, at least one; each has the same weight in the grade."""


def on_side(thing: Thing, side: str) -> bool:
    """Is it on this side of the picture?"""
    distance = {"left": thing.x, "right": 1 - thing.x, "top": thing.y, "bottom": 1 - thing.y}
    return distance[side] < NEAR_EDGE


def fits(thing: Thing, kind: Kind) -> bool:
    """Does the description fit the thing?

    >>> fits(Thing("star", "red", "large", 0.2, 0.5), Kind("star", size="large", side="left"))
    True
    """
    return (
        kind.shape in (None, thing.shape)
        and kind.colour in (None, thing.colour)
        and kind.size in (None, thing.size)
        and (kind.side is None or on_side(thing, kind.side))
    )


def count(scene: Scene, kind: Kind) -> int:
    """How many things of the scene the description fits."""
    return sum(fits(thing, kind) for thing in scene.things)


def stands(first: Thing, way: str, second: Thing) -> bool:
    """Is the first thing left of, or above, the second?"""
    right, down = second.x - first.x, second.y - first.y
    ahead, aside = (right, down) if way == "left of" else (down, right)
    return ahead > GAP and ahead > abs(aside)


def holds(fact: Fact, scene: Scene) -> bool:
    """Is the fact true of the scene?

    >>> scene = Scene("beach", 0, (Thing("star", "red", "small", 0.2, 0.2), Thing("boat", "blue", "large", 0.3, 0.7)))
    >>> holds(Related(Kind("star"), "above", Kind("boat")), scene), holds(AtLeast(Kind(colour="green"), 1), scene)
    (True, False)
    """
    match fact:
        case IsBackground(name):
            return scene.background == name
        case AtLeast(kind, number):
            return count(scene, kind) >= number
        case Exactly(kind, number):
            return count(scene, kind) == number
        case Related(first, way, second):
            heads = [thing for thing in scene.things if fits(thing, first)]
            tails = [thing for thing in scene.things if fits(thing, second)]
            return any(stands(head, way, tail) for head in heads for tail in tails)
