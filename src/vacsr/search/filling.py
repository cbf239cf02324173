"""A data set's images or captions into an index, in batches that are each stored before the next is embedded.

So a stop at any moment costs one batch: the same call goes on, since it leaves out what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search.index import VectorIndex
from vacsr.search.items import Items, cut, image_items, text_items
from vacsr.search.pruning import find_gone

_LOOKUP = 4096  # ids whose metadata are in memory at a time


class Filled(NamedTuple):
    """Items so far."""

    added: int = 0
    replaced: int = 0
    skipped: int = 0
    """They were there already, as they are."""
    of: int = 0
    removed: int = 0
    """From the index, since the data set has them no more."""

    @property
    def embedded(self) -> int:
        """What took time."""
        return self.added + self.replaced


def fill_index(
    index: VectorIndex,
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    source: str = "",
    texts: bool = False,
    batch: int = 1024,
    replace: bool = False,
    prune: bool = False,
    sure: bool = False,
    workers: int = 0,
    committed: Callable[[Filled], None] | None = None,
) -> Filled:
    """Embed the images, or captions, that the index lacks or that have changed, and add them ``batch`` at a time.

    ``source``: the SPEC, which the index keeps, see :func:`vacsr.search.sources.noted_spec`. An id that is there from
    another place is an error before anything is embedded: it is another image. ``replace`` embeds all and takes such
    ids over. ``prune`` removes in the end what came from the source and is not in it any more; if that is more than
    half, it is an error at the start unless one is ``sure``. ``committed`` is told after each batch that is stored.
    """
    if batch < 1:
        raise UsageError(f"batch is {batch}, expected 1 or more — try 1024")
    scorer.check_set(pairs)
    items = (
        text_items(scorer, pairs, source=source)
        if texts
        else image_items(scorer, pairs, source=source, workers=workers)
    )
    gone = find_gone(index, items.ids, source=source).checked(sure=sure) if prune else None
    rows = list(range(len(items.ids))) if replace else _lacking(index, items)
    if source:
        index.note_source(source)
    done = _add(index, items, cut(rows, batch), committed=committed)
    if rows:
        index.settle()
    return done if gone is None else done._replace(removed=index.delete(gone.ids))


def _add(
    index: VectorIndex,
    items: Items,
    batches: Sequence[Sequence[int]],
    *,
    committed: Callable[[Filled], None] | None,
) -> Filled:
    done = Filled(skipped=len(items.ids) - sum(map(len, batches)), of=len(items.ids))
    for rows, vectors in zip(batches, items.embed(batches), strict=True):
        result = index.add([items.ids[row] for row in rows], vectors, [items.metadata(row) for row in rows])
        done = done._replace(added=done.added + result.added, replaced=done.replaced + result.replaced)
        if committed is not None:
            committed(done)
    return done


def _lacking(index: VectorIndex, items: Items) -> list[int]:
    """Rows that the index has not, or not as they are now; who did not say where an item is from fits anything."""
    found: list[int] = []
    for some in cut(range(len(items.ids)), _LOOKUP):
        stored = index.metadata([items.ids[row] for row in some])
        for row in some:
            name, fact = items.ids[row], items.facts[row]
            if name not in stored:
                found.append(row)
                continue
            _check_source(name, stored[name].get("source"), fact.source)
            before = stored[name].get("mark")
            if before and fact.mark and before != fact.mark:
                found.append(row)
    return found


def _check_source(name: str, old: object, new: str) -> None:
    """Raise where an id is there from another source."""
    if old and new and old != new and os.path.abspath(str(old)) != new:
        message = f"{name!r} is in the index from {old!r}, this one is from {new!r}"
        action = "write the SPEC as it was, add --replace to take the new one, or fill another index"
        raise DataError(f"{message}: the same id for another item? — {action}; of two folders, name the one above both")
