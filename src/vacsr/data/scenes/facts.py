"""Facts of scenes, when they are true, and the exact grade of every image–caption pair.

Descriptions are existential: "a star" means that there is some star. "Left of" and "above" compare centres: further
left by a clear gap, and more to the left than up or down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vacsr.data.scenes.objects import Scene, Thing

Mask = npt.NDArray[np.bool_]

SIDES = ("left", "right", "top", "bottom")
WAYS = ("left of", "above")  # "right of" and "below" are these, said from the other end
NEAR_EDGE = 0.36  # a centre nearer to an edge than this is on that side of the picture
GAP = 0.12  # centres that differ by less are neither left of nor above one another
EASY_BELOW = 0.25  # a pair below this grade is an easy negative
_BLOCK = 1 << 24  # pairs whose facts are summed at a time


@dataclass(frozen=True)
class Kind:
    """A description of a thing; None leaves a property open."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    side: str | None = None  # where in the picture, one of SIDES


@dataclass(frozen=True)
class IsBackground:
    name: str


@dataclass(frozen=True)
class AtLeast:
    kind: Kind
    count: int


@dataclass(frozen=True)
class Exactly:
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
    """The words of a caption and its facts. It is true where every fact holds."""

    text: str
    facts: tuple[Fact, ...]  # one or more, no duplicates; each has the same weight in the grade


class SceneTable:
    """N ≥ 1 scenes as arrays, to decide a fact for all of them at once.

    >>> scene = Scene("beach", 0, (Thing("star", "red", "small", 0.2, 0.2), Thing("boat", "blue", "large", 0.3, 0.7)))
    >>> table = SceneTable([scene])
    >>> table.true(Related(Kind("star"), "above", Kind("boat"))), table.true(AtLeast(Kind(colour="green"), 1))
    (array([ True]), array([False]))
    """

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._background = np.array([scene.background for scene in scenes])
        most = max([1, *(len(scene.things) for scene in scenes)])
        nothing = Thing("", "", "", np.nan, np.nan)  # of no kind, and nowhere
        rows = [[*scene.things, *[nothing] * (most - len(scene.things))] for scene in scenes]

        def column(name: str) -> npt.NDArray[Any]:
            return np.array([[getattr(thing, name) for thing in row] for row in rows])

        self._exists = np.array([[thing is not nothing for thing in row] for row in rows])
        self._said = {name: column(name) for name in ("shape", "colour", "size")}
        x, y = column("x"), column("y")
        distance = {"left": x, "right": 1 - x, "top": y, "bottom": 1 - y}
        self._side = {side: away < NEAR_EDGE for side, away in distance.items()}
        right, down = (at[:, None, :] - at[:, :, None] for at in (x, y))
        self.related = {"left of": (right > GAP) & (right > abs(down)), "above": (down > GAP) & (down > abs(right))}
        """[N, first, second] for each of WAYS: whether the first thing is left of, or above, the second."""
        self._fitting: dict[Kind, Mask] = {}

    def true(self, fact: Fact) -> Mask:
        """In which scenes the fact holds. [N]"""
        true: Mask
        match fact:
            case IsBackground(name):
                true = self._background == name
            case AtLeast(kind, number):
                true = self.count(kind) >= number
            case Exactly(kind, number):
                true = self.count(kind) == number
            case Related(first, way, second):
                pairs = self._fits(first)[:, :, None] & self._fits(second)[:, None, :] & self.related[way]
                true = pairs.any(axis=(1, 2))
        return true

    def count(self, kind: Kind) -> npt.NDArray[np.int64]:
        """How many things of each scene the description fits. [N]"""
        number: npt.NDArray[np.int64] = self._fits(kind).sum(axis=1)
        return number

    def _fits(self, kind: Kind) -> Mask:
        """Which things the description fits. [N, O]"""
        if kind not in self._fitting:
            fits = self._exists if kind.side is None else self._exists & self._side[kind.side]
            for name, values in self._said.items():
                wanted = getattr(kind, name)
                fits = fits if wanted is None else fits & (values == wanted)
            self._fitting[kind] = fits
        return self._fitting[kind]


def share_true(scenes: Sequence[Scene], statements: Sequence[Statement], *, block: int = _BLOCK) -> Tensor:
    """The share of a statement's facts that hold in a scene. [N, M] float32

    Each distinct fact is decided once for all scenes; a statement then sums its own facts' rows.
    """
    rows = {fact: row for row, fact in enumerate({fact: None for statement in statements for fact in statement.facts})}
    table = SceneTable(scenes)
    true = torch.zeros(len(rows) + 1, len(scenes), dtype=torch.uint8)  # and a row of which nothing holds
    for fact, row in rows.items():
        true[row] = torch.from_numpy(table.true(fact))
    lengths = torch.tensor([len(statement.facts) for statement in statements])
    columns = torch.full((len(statements), int(lengths.max())), len(rows))
    for number, statement in enumerate(statements):
        columns[number, : len(statement.facts)] = torch.tensor([rows[fact] for fact in statement.facts])
    grades = torch.empty(len(scenes), len(statements))
    step = max(1, block // len(scenes))
    for start in range(0, len(statements), step):
        part = slice(start, start + step)
        held = torch.zeros(len(statements[part]), len(scenes), dtype=torch.uint8)
        for column in columns[part].T:
            held += true[column]
        grades[:, part] = (held / lengths[part, None]).T
    return grades
