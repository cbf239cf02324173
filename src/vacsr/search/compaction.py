"""Which files of an exact index should become one: those with many dead rows, and many small ones side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vacsr.search.manifest import Part

DEAD_SHARE = 0.25
"""A file with more dead rows than this is written anew without them."""
FAN = 8
"""So many neighbours become one file, if none of them is as large as the others together."""
SEGMENT_BYTES = 1 << 28
"""Vectors that a written file holds at most; larger than what follows from merging would take long to write."""


class Rewrite(NamedTuple):
    """The parts [start, stop) become one, without their dead rows."""

    start: int
    stop: int


def next_rewrite(parts: Sequence[Part], *, row_bytes: int) -> Rewrite | None:
    """What to do first; None where all is well.

    A merge at least doubles the file that a row lies in, so a row is written a handful of times however small the
    batches are that fill an index.

    >>> next_rewrite([Part("a", 10, 0, dead_rows=3)], row_bytes=4)
    Rewrite(start=0, stop=1)
    >>> next_rewrite([Part("big", 1000, 0)] + [Part("small", 10, 0)] * 8, row_bytes=4)
    Rewrite(start=1, stop=9)
    >>> next_rewrite([Part("big", 1000, 0)] + [Part("small", 10, 0)] * 7, row_bytes=4)
    """
    for n, part in enumerate(parts):
        if part.dead_rows > DEAD_SHARE * part.rows:
            return Rewrite(n, n + 1)
    for start in range(len(parts) - FAN, -1, -1):
        sizes = [part.live for part in parts[start : start + FAN]]
        if sum(sizes) * row_bytes <= SEGMENT_BYTES and 2 * max(sizes) <= sum(sizes):
            return Rewrite(start, start + FAN)
    return None


def last_rewrite(parts: Sequence[Part], *, row_bytes: int) -> Rewrite | None:
    """What to do when a filling is over: a search takes a step for each file, and all threads wait for each other.

    The longest tail becomes one file in which none is as large as the others together.

    >>> last_rewrite([Part("big", 1000, 0), Part("a", 10, 0), Part("b", 10, 0)], row_bytes=4)
    Rewrite(start=1, stop=3)
    >>> last_rewrite([Part("big", 1000, 0), Part("a", 10, 0)], row_bytes=4)
    """
    for start in range(len(parts) - 1):
        sizes = [part.live for part in parts[start:]]
        if sum(sizes) * row_bytes <= SEGMENT_BYTES and 2 * max(sizes) <= sum(sizes):
            return Rewrite(start, len(parts))
    return None


def full_rewrite(parts: Sequence[Part], *, row_bytes: int) -> list[Rewrite]:
    """Everything without dead rows and in as few files as may be, last first, so that earlier places stay valid."""
    found: list[Rewrite] = []
    start = size = 0
    for n, part in enumerate(parts):
        if n > start and size + part.live * row_bytes > SEGMENT_BYTES:
            found.append(Rewrite(start, n))
            start, size = n, 0
        size += part.live * row_bytes
    if parts:
        found.append(Rewrite(start, len(parts)))
    return [run for run in reversed(found) if run.stop - run.start > 1 or parts[run.start].dead_rows]
