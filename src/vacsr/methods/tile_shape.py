"""Into what tiles a method's pair matrix is cut: as asked for, or by what a GPU does well and memory allows."""

from __future__ import annotations

from itertools import product
from math import isqrt
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.objective import LossTerms
from vacsr.pairwise import PairTile
from vacsr.tiles import ChosenPairs, Pick, TileTerms

_NUMBERS = 9 << 23  # pairs × width of a tile by ``auto``: 192 × 192 pairs of two components at d = 1024
_BYTES = 1 << 25  # the least of a graph's tile: 64 × 64 such pairs in float32
_TILES = 64  # that a graph may have before its tiles grow


@runtime_checkable
class Tileable(Protocol):
    """A method whose loss is a sum over pairs, up to pairs that it chooses among all: any tile will do.

    Methods that are only ``pairwise`` need whole rows; they are walked in strips of rows, and need none of this.
    """

    pair_width: int
    """Numbers that the loss keeps of a pair, for the choice of a tile."""

    def picks(self) -> tuple[Pick, ...]:
        """Pairs that the loss chooses."""

    def tile_terms(self, v: Embedding, t: Embedding, tile: PairTile) -> TileTerms:
        """All terms but those of chosen pairs. [R, d], [C, d]"""

    def chosen_terms(self, v: Embedding, t: Embedding, pairs: ChosenPairs) -> LossTerms:
        """The terms of one pick's pairs, aligned. [G·n, d], [G·n, d]"""


class TileShape(NamedTuple):
    """Rows and columns of a tile; those at the edges of the matrix may be smaller."""

    rows: int
    cols: int


def tile_shape(
    method: Method,
    tile: int | Literal["auto"],
    *,
    rows: int,
    columns: int,
    itemsize: int = 4,
    graphed: bool = False,
) -> TileShape | None:
    """The tiles of a [rows, columns] matrix, as equal as can be; None where it is taken whole.

    ``auto`` has tiles that keep a GPU busy for longer than the host takes to launch them. In a CUDA graph a launch
    costs nothing: there they are smaller, of at least so many bytes (``itemsize``: those of a number in a product).

    >>> from vacsr.config import SigmoidConfig
    >>> from vacsr.methods.sigmoid import Sigmoid
    >>> tile_shape(Sigmoid(SigmoidConfig()), 64, rows=100, columns=100)
    TileShape(rows=50, cols=100)
    """
    if tile != "auto" and tile < 0:
        raise UsageError(f"train.tile={tile}: expected rows and columns of a tile, 0 for none, or auto")
    if tile == 0 or not rows * columns:
        return None
    if not isinstance(method, Tileable) and not method.pairwise:
        if tile == "auto":
            return None
        name = type(method).__name__.lower()
        raise UsageError(
            f"train.tile={tile}: the loss of '{name}' compares each pair with the whole batch, so it has no tiles "
            "— set train.tile=0 or auto"
        )
    width = int(getattr(method, "pair_width", 1))
    most = _NUMBERS // width
    if not isinstance(method, Tileable):
        shape = TileShape(_even(rows, max(1, most // columns) if tile == "auto" else tile), columns)
    elif tile == "auto":
        if graphed:
            most = min(most, max(_BYTES // (itemsize * width), rows * columns // _TILES))
        shape = _largest(rows, columns, most=most)
    else:
        shape = TileShape(_even(rows, tile), _even(columns, tile))
    return None if shape == (rows, columns) else shape


def _largest(rows: int, columns: int, *, most: int) -> TileShape:
    """The largest tile of at most so many pairs that divides the matrix, no side over twice the other: all are alike,
    and compiled once. Where that would be small, ragged edges are the lesser evil.

    >>> _largest(4096, 4096, most=192 * 192), _largest(1009, 1009, most=192 * 192)
    (TileShape(rows=256, cols=128), TileShape(rows=169, cols=169))
    """
    if rows * columns <= most:
        return TileShape(rows, columns)
    edge = max(1, isqrt(most))
    whole = [
        TileShape(r, c)
        for r, c in product(_divisors(rows), _divisors(columns))
        if r * c <= most and (max(r, c) <= 2 * min(r, c) or (r == rows < c) or (c == columns < r))
    ]
    best = max(whole, key=lambda shape: (shape.rows * shape.cols, -abs(shape.rows - shape.cols), shape.rows))
    ragged = TileShape(_even(rows, edge), _even(columns, edge))
    return best if 2 * best.rows * best.cols >= most else ragged


def _divisors(length: int) -> list[int]:
    return [n for n in range(1, length + 1) if length % n == 0]


def _even(length: int, edge: int) -> int:
    """The edge of as many parts as ``edge`` makes, all of one length but perhaps the last."""
    parts = -(-length // edge)
    return -(-length // parts)
