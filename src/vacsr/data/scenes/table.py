"""The things of many scenes side by side, to decide one fact for all of them at once.

It means what :func:`vacsr.data.scenes.facts.holds` means, scene by scene; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vacsr.data.scenes.facts import GAP, NEAR_EDGE, AtLeast, Exactly, Fact, IsBackground, Kind, Related
from vacsr.data.scenes.objects import Scene, Thing

Mask = npt.NDArray[np.bool_]


class SceneTable:
    """N ≥ 1 scenes, as arrays of N × the most things that one of them has."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._background = np.array([scene.background for scene in scenes])
        most = max([1, *(len(scene.things) for scene in scenes)])
        nothing = Thing("", "", "", np.nan, np.nan)  # of no kind, and nowhere
        rows = [[*scene.things, *[nothing] * (most - len(scene.things))] for scene in scenes]
        self._there = np.array([[thing is not nothing for thing in row] for row in rows])
        self._said = {
            name: np.array([[getattr(thing, name) for thing in row] for row in rows])
            for name in ("shape", "colour", "size")
        }
        x, y = (np.array([[getattr(thing, axis) for thing in row] for row in rows]) for axis in "xy")
        distance = {"left": x, "right": 1 - x, "top": y, "bottom": 1 - y}
        self._side = {side: away < NEAR_EDGE for side, away in distance.items()}
        right, down = (at[:, None, :] - at[:, :, None] for at in (x, y))  # [N, first, second]
        self._stands = {"left of": (right > GAP) & (right > abs(down)), "above": (down > GAP) & (down > abs(right))}
        self._fitting: dict[Kind, Mask] = {}

    def true(self, fact: Fact) -> Mask:
        """In which scenes the fact holds. [N]"""
        true: Mask
        match fact:
            case IsBackground(name):
                true = self._background == name
            case AtLeast(kind, number):
                true = self._fits(kind).sum(axis=1) >= number
            case Exactly(kind, number):
                true = self._fits(kind).sum(axis=1) == number
            case Related(first, way, second):
                pairs = self._fits(first)[:, :, None] & self._fits(second)[:, None, :] & self._stands[way]
                true = pairs.any(axis=(1, 2))
        return true

    def _fits(self, kind: Kind) -> Mask:
        """Which things the description fits. [N, O]"""
        if kind not in self._fitting:
            fits = self._there if kind.side is None else self._there & self._side[kind.side]
            for name, values in self._said.items():
                wanted = getattr(kind, name)
                fits = fits if wanted is None else fits & (values == wanted)
            self._fitting[kind] = fits
        return self._fitting[kind]
