"""An exact index at one moment: a manifest and the files that it names, mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vacsr.errors import DataError
from vacsr.search.index import Entry, Metadata
from vacsr.search.manifest import DTYPES, Manifest, read_manifest
from vacsr.search.segments import Segment, keys_of, read_segment

_TRIES = 20  # of a reader whose files a writer has just merged away


class Place(NamedTuple):
    """Where an id lives."""

    segment: int
    row: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """It stays as it is, whatever is written meanwhile."""

    manifest: Manifest
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(part.live for part in self.manifest.parts)

    def find(self, ids: Sequence[str]) -> dict[str, Place]:
        """Those of the ids that live here."""
        keys = keys_of(ids)
        return {name: Place(n, row) for n, part in enumerate(self.segments) for name, row in part.find(ids, keys)}

    def entry(self, place: Place) -> Entry:
        """What lies at a place; the vector is a copy."""
        segment = self.segments[place.segment]
        return Entry(segment.vectors[place.row].float().clone(), segment.record(place.row)[1])

    def name(self, position: int) -> str:
        """Id of a row that is counted over all segments."""
        place = self._place(position)
        return self.segments[place.segment].name(place.row)

    def metadata(self, position: int) -> Metadata:
        """Of a row that is counted over all segments."""
        place = self._place(position)
        return self.segments[place.segment].record(place.row)[1]

    def _place(self, position: int) -> Place:
        for n, segment in enumerate(self.segments):
            if position < segment.part.rows:
                return Place(n, position)
            position -= segment.part.rows
        raise AssertionError("no such row")

    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of every living row, oldest first."""
        return (segment.record(row) for segment in self.segments for row in segment.live_rows().tolist())


def open_snapshot(folder: Path, before: Snapshot | None = None) -> Snapshot:
    """The present state; what ``before`` has mapped is not mapped again, and another index than that is an error.

    A writer may merge files away between manifest and files: then look again.
    """
    mapped = {(before.manifest.id, segment.part): segment for segment in before.segments} if before else {}
    for _ in range(_TRIES):
        manifest = read_manifest(folder)
        if before:
            _check_same_index(folder, before.manifest, manifest)
        if manifest.dtype not in DTYPES:
            raise DataError(f"{folder}: vectors of {manifest.dtype!r} are not known — use a newer vacsr")
        dtype = DTYPES[manifest.dtype]
        try:
            segments = tuple(
                mapped.get((manifest.id, part)) or read_segment(folder, part, dim=manifest.dim, dtype=dtype)
                for part in manifest.parts
            )
        except FileNotFoundError as error:
            missing = error
        else:
            return Snapshot(manifest, segments)
    raise DataError(f"{folder} is not whole: {missing} — copy it again, or fill it anew") from missing


def _check_same_index(folder: Path, before: Manifest, now: Manifest) -> None:
    """Raise where somebody has put another index in the place of the one that was opened."""
    if (now.id, now.dim, now.dtype, now.provenance) != (before.id, before.dim, before.dtype, before.provenance):
        was, has = (f"dimension {one.dim}, {one.provenance or 'unknown'!r}" for one in (before, now))
        message = f"{folder} is another index than the one that was opened: {was} then, {has} now"
        raise DataError(f"{message} — open it again, with the model that it was filled with")
