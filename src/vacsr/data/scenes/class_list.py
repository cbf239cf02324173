"""The classes of the picture world: a colour on a shape, "red star"."""

from __future__ import annotations

import math
from typing import NamedTuple

from vacsr.data.scenes.objects import COLOURS, SHAPES
from vacsr.data.scenes.world import stream
from vacsr.errors import UsageError

FEWEST, MOST_CLASSES = 4, len(SHAPES) * len(COLOURS)


class SceneClass(NamedTuple):
    """A colour on a shape."""

    colour: str
    shape: str

    @property
    def name(self) -> str:
        """For people and for prompts."""
        return f"{self.colour} {self.shape}"


def scene_class_list(count: int, *, seed: int) -> tuple[SceneClass, ...]:
    """So many classes, in the order of their labels.

    The seed shuffles colours and shapes; labels then walk down both lists at once, each from its top again after its
    end, and one colour further whenever both end together. As many of either are used as half of the labels can
    show. So the second half, the "new" classes, has no colour and no shape that the first half has not, and no pair of
    them that it has. From 20 classes on, fewer are the first of more.

    >>> [each.name for each in scene_class_list(4, seed=0)]
    ['green star', 'red fish', 'red star', 'green fish']
    """
    if not FEWEST <= count <= MOST_CLASSES:
        raise UsageError(f"scenes: classes is {count}, expected {FEWEST} to {MOST_CLASSES} — write classes=24")
    half = math.ceil(count / 2)
    colours = stream(seed, "classes/colours").sample(COLOURS, len(COLOURS))[:half]
    shapes = stream(seed, "classes/shapes").sample(SHAPES, len(SHAPES))[:half]
    together = math.lcm(len(colours), len(shapes))
    return tuple(
        SceneClass(colours[(label + label // together) % len(colours)], shapes[label % len(shapes)])
        for label in range(count)
    )
