"""`exact:PATH`: an index in a folder, complete and exact, without a server.

Vectors lie in files that never change; a manifest names them. A change writes new files first and then replaces the
manifest: before that moment nothing has happened, after it everything has. Who reads keeps the state it opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem
from vacsr.search import compaction
from vacsr.search.blocked import best_places
from vacsr.search.compaction import Rewrite
from vacsr.search.index import AddResult, Hits, IndexInfo, Metadata
from vacsr.search.locks import writer_lock
from vacsr.search.manifest import DTYPES, LOCK, Manifest, Part, read_manifest, sweep, write_manifest
from vacsr.search.rows import as_json, checked_ids, checked_metadata, checked_queries, checked_vectors
from vacsr.search.segments import Segment, keys_of, mark_dead, read_segment, rewrite_segments, write_segment

_TRIES = 20  # of a reader whose files a writer has just merged away


class Place(NamedTuple):
    """Where an id lives."""

    segment: int
    row: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An index at one moment, mapped."""

    manifest: Manifest
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(part.live for part in self.manifest.parts)

    def find(self, ids: Sequence[str]) -> dict[str, Place]:
        """Those of the ids that live here."""
        keys = keys_of(ids)
        return {name: Place(n, row) for n, part in enumerate(self.segments) for name, row in part.find(ids, keys)}

    def record(self, position: int) -> tuple[str, Metadata]:
        """Id and metadata of a row that is counted over all segments."""
        for segment in self.segments:
            if position < segment.part.rows:
                return segment.record(position)
            position -= segment.part.rows
        raise AssertionError("no such row")


class ExactIndex:
    """See :class:`vacsr.search.VectorIndex`. Equal scores are ranked by the order of insertion.

    A replaced vector counts as new. ``patience``: seconds to wait while another process writes. Several threads may
    search at once.
    """

    def __init__(self, folder: Path, *, patience: float = 60.0) -> None:
        self.folder, self.patience = folder, patience
        self._snapshot = self._open(None)

    @property
    def dim(self) -> int:
        """Of a vector."""
        return self._snapshot.manifest.dim

    @property
    def provenance(self) -> str:
        """What the vectors are."""
        return self._snapshot.manifest.provenance

    def __len__(self) -> int:
        return len(self._snapshot)

    def known(self, ids: Sequence[str]) -> list[bool]:
        """Which of these ids are there. [N]"""
        found = self._snapshot.find(list(ids))
        return [name in found for name in ids]

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Of those that are there."""
        now = self._snapshot
        return {name: now.segments[place.segment].record(place.row)[1] for name, place in now.find(list(ids)).items()}

    def search(self, queries: Tensor, k: int) -> Hits:
        """The k vectors of the highest inner product with each query, exactly. [Q, d]"""
        now = self._snapshot
        found = best_places(now.segments, checked_queries(queries, k, dim=self.dim), k)
        records = [[now.record(position) for position in row] for row in found.position.tolist()]
        ids = [[name for name, _ in row] for row in records]
        return Hits(ids, found.score, found.vectors, [[metadata for _, metadata in row] for row in records])

    def add(self, ids: Sequence[str], vectors: Tensor, metadata: Sequence[Metadata] | None = None) -> AddResult:
        """Add vectors [N, d], or replace those whose ids are there, all or none. On the disk when it returns."""
        names = checked_ids(ids)
        rows = checked_vectors(vectors, names, dim=self.dim, dtype=self._dtype)
        texts = [as_json(*pair).encode() for pair in zip(names, checked_metadata(metadata, names), strict=True)]
        if not names:
            return AddResult(0, 0)
        with self._writing() as now:
            found = now.find(names)
            parts = self._without(now, found.values())
            keys = torch.from_numpy(keys_of(names))
            most = max(compaction.SEGMENT_BYTES // self._row_bytes, 1)
            for n, start in enumerate(range(0, len(names), most)):
                here = slice(start, start + most)
                name = self._name("vectors", n)
                parts.append(write_segment(self.folder, name, vectors=rows[here], keys=keys[here], texts=texts[here]))
            self._commit(parts)
            self._tidy()
        return AddResult(len(names) - len(found), len(found))

    def delete(self, ids: Sequence[str]) -> int:
        """Remove those that are there; how many that were. On the disk when it returns."""
        with self._writing() as now:
            found = now.find(list(dict.fromkeys(ids)))
            if found:
                self._commit(self._without(now, found.values()))
                self._tidy()
        return len(found)

    def compact(self) -> None:
        """Write everything anew without what was deleted, in as few files as may be."""
        with self._writing() as now:
            for rewrite in compaction.full_rewrite(now.manifest.parts, row_bytes=self._row_bytes):
                self._rewrite(rewrite)

    def refresh(self) -> bool:
        """See what other processes have written since; whether that was anything. Another index is an error."""
        before = self._snapshot
        if read_manifest(self.folder) == before.manifest:
            return False
        self._snapshot = self._open(before)
        return True

    def info(self) -> IndexInfo:
        """Its size and what it holds."""
        now = self._snapshot.manifest
        dead, size = sum(part.dead_rows for part in now.parts), sum(part.bytes for part in now.parts)
        return IndexInfo(
            "exact", str(self.folder), len(self), now.dim, now.dtype, now.provenance, dead, len(now.parts), size
        )

    def close(self) -> None:
        """Unmap the files. What was added is safe without it."""
        self._snapshot = Snapshot(replace(self._snapshot.manifest, parts=()), ())

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._snapshot.manifest.dtype]

    @property
    def _row_bytes(self) -> int:
        return self.dim * self._dtype.itemsize

    def _open(self, before: Snapshot | None) -> Snapshot:
        """The present state. A writer may merge files away between manifest and files: then look again."""
        mapped = {(before.manifest.id, segment.part): segment for segment in before.segments} if before else {}
        for _ in range(_TRIES):
            manifest = read_manifest(self.folder)
            if before:
                _check_same_index(self.folder, before.manifest, manifest)
            if manifest.dtype not in DTYPES:
                raise DataError(f"{self.folder}: vectors of {manifest.dtype!r} are not known — use a newer vacsr")
            dtype = DTYPES[manifest.dtype]
            try:
                segments = tuple(
                    mapped.get((manifest.id, part)) or read_segment(self.folder, part, dim=manifest.dim, dtype=dtype)
                    for part in manifest.parts
                )
            except FileNotFoundError as error:
                missing = error
            else:
                return Snapshot(manifest, segments)
        raise DataError(f"{self.folder} is not whole: {missing} — copy it again, or fill it anew") from missing

    @contextmanager
    def _writing(self) -> Iterator[Snapshot]:
        """The lock, the latest state, and nothing beside it that a killed writer left."""
        with writer_lock(self.folder / LOCK, patience=self.patience):
            self.refresh()
            sweep(self.folder, self._snapshot.manifest)
            yield self._snapshot

    def _name(self, kind: str, number: int) -> str:
        """A file name that was never used: one writer at a time, and the generation only grows."""
        return f"{kind}-{self._snapshot.manifest.generation + 1:08d}-{number}.safetensors"

    def _without(self, now: Snapshot, places: Iterable[Place]) -> list[Part]:
        """The parts with these rows dead; one that has no other row is left out."""
        rows: dict[int, list[int]] = {}
        for place in places:
            rows.setdefault(place.segment, []).append(place.row)
        parts = []
        for n, segment in enumerate(now.segments):
            dying = rows.get(n, [])
            if len(dying) < segment.part.live:
                parts.append(mark_dead(self.folder, self._name("dead", n), segment, dying) if dying else segment.part)
        return parts

    def _commit(self, parts: Sequence[Part]) -> None:
        """The moment that counts; then files that no manifest names any more go."""
        before = self._snapshot
        manifest = replace(before.manifest, generation=before.manifest.generation + 1, parts=tuple(parts))
        write_manifest(self.folder, manifest)
        self._snapshot = self._open(before)
        for name in before.manifest.files() - manifest.files():
            with suppress(OSError):  # the next change sweeps
                (self.folder / name).unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Merge and rewrite where it is due, a change each. What was asked for is stored by now, so a disk that is
        full or fails only leaves things untidy."""
        try:
            while rewrite := compaction.next_rewrite(self._snapshot.manifest.parts, row_bytes=self._row_bytes):
                self._rewrite(rewrite)
        except (OSError, EnvironmentProblem) as error:
            warnings.warn(f"the change is stored, but {self.folder} could not be tidied: {error}", stacklevel=3)

    def _rewrite(self, rewrite: Rewrite) -> None:
        now = self._snapshot
        new = rewrite_segments(self.folder, self._name("vectors", 0), now.segments[rewrite.start : rewrite.stop])
        parts = now.manifest.parts
        self._commit([*parts[: rewrite.start], new, *parts[rewrite.stop :]])


def _check_same_index(folder: Path, before: Manifest, now: Manifest) -> None:
    """Raise where somebody has put another index in the place of the one that was opened."""
    if (now.id, now.dim, now.dtype, now.provenance) != (before.id, before.dim, before.dtype, before.provenance):
        was, has = (f"dimension {one.dim}, {one.provenance or 'unknown'!r}" for one in (before, now))
        message = f"{folder} is another index than the one that was opened: {was} then, {has} now"
        raise DataError(f"{message} — open it again, with the model that it was filled with")
