"""What an index still holds from a data set that the data set no longer has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vacsr.errors import UsageError
from vacsr.search.index import VectorIndex
from vacsr.search.sources import covers, source_key

_MOST = 0.5  # of a source's items that go without a question


class Gone(NamedTuple):
    """Items that the source no longer has."""

    source: str
    ids: list[str]
    of: int
    """Items in the index that are from the source."""

    def checked(self, *, sure: bool) -> Gone:
        """Raise where so many would go that it looks like a mistake: a folder that has moved, or is not mounted."""
        if len(self.ids) > _MOST * self.of and not sure:
            message = f"{len(self.ids):,} of the {self.of:,} items from {self.source} are not there any more"
            example = f"first {self.ids[0]!r}, and nothing was changed"
            raise UsageError(f"{message}, {example} — check the SPEC, or add --yes to remove them")
        return self


def find_gone(index: VectorIndex, ids: Sequence[str], *, source: str) -> Gone:
    """What came from ``source``, or from a split of it, and is not among ``ids`` any more."""
    origins = {source_key(other) for other in index.sources if covers(source, other)}
    there, mine = set(ids), [name for name, metadata in index.records() if metadata.get("from") in origins]
    return Gone(source, [name for name in mine if name not in there], len(mine))
