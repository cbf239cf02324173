"""`exact:PATH`: an index in a folder, complete and exact, without a server.

Vectors lie in files that never change; a manifest names them. A change writes new files first and then replaces the
manifest: before that moment nothing has happened, after it everything has. Who reads keeps the state it opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vacsr.errors import EnvironmentProblem
from vacsr.search import compaction
from vacsr.search.blocked import best_places
from vacsr.search.compaction import Rewrite
from vacsr.search.index import AddResult, Entry, Hits, IndexInfo, Metadata, held_kind
from vacsr.search.manifest import DTYPES, Part, read_manifest, sweep, write_manifest, writer_lock
from vacsr.search.ondemand import OnDemand
from vacsr.search.rows import as_json, checked_ids, checked_metadata, checked_queries, checked_vectors
from vacsr.search.segments import keys_of, mark_dead, rewrite_segments, write_segment
from vacsr.search.snapshot import Place, Snapshot, open_snapshot


class ExactIndex:
    """See :class:`vacsr.search.VectorIndex`. Equal scores are ranked by the order of insertion.

    A replaced vector counts as new. ``patience``: seconds to wait while another process writes. Several threads may
    search at once.
    """

    def __init__(self, folder: Path, *, patience: float = 60.0) -> None:
        self.folder, self.patience = folder, patience
        self._snapshot = open_snapshot(folder)

    @property
    def dim(self) -> int:
        """Of a vector."""
        return self._snapshot.manifest.dim

    @property
    def provenance(self) -> str:
        """What the vectors are."""
        return self._snapshot.manifest.provenance

    @property
    def holds(self) -> str:
        """Images, texts, or unknown."""
        return held_kind(self.provenance)

    @property
    def exact(self) -> bool:
        """Always: every vector is compared."""
        return True

    @property
    def sources(self) -> tuple[str, ...]:
        """The SPECs that it was filled from."""
        return self._snapshot.manifest.sources

    def __len__(self) -> int:
        return len(self._snapshot)

    def known(self, ids: Sequence[str]) -> list[bool]:
        """Which of these ids are there. [N]"""
        found = self._snapshot.find(list(ids))
        return [name in found for name in ids]

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """Vector and metadata of those that are there."""
        now = self._snapshot
        return {name: now.entry(place) for name, place in now.find(list(ids)).items()}

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Of those that are there."""
        now = self._snapshot
        return {name: now.segments[place.segment].record(place.row)[1] for name, place in now.find(list(ids)).items()}

    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of everything, oldest first."""
        return self._snapshot.records()

    def note_source(self, spec: str) -> None:
        """Remember a SPEC, once. On the disk when it returns."""
        if spec in self.sources:
            return
        with self._writing() as now:
            if spec not in now.manifest.sources:
                self._commit(now.manifest.parts, sources=(*now.manifest.sources, spec))

    def search(self, queries: Tensor, k: int) -> Hits:
        """The k vectors of the highest inner product with each query, exactly. [Q, d]"""
        now = self._snapshot
        found = best_places(now.segments, checked_queries(queries, k, dim=self.dim), k)
        rows = found.position.tolist()
        ids = [OnDemand(now.name, row) for row in rows]
        return Hits(ids, found.score, found.vectors, [OnDemand(now.metadata, row) for row in rows])

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

    def settle(self) -> None:
        """Merge the last files, where that costs no more than adding their rows did."""
        with self._writing():
            self._tidy(compaction.last_rewrite)

    def refresh(self) -> bool:
        """See what other processes have written since; whether that was anything. Another index is an error."""
        before = self._snapshot
        if read_manifest(self.folder) == before.manifest:
            return False
        self._snapshot = open_snapshot(self.folder, before)
        return True

    def info(self) -> IndexInfo:
        """Its size and what it holds."""
        now = self._snapshot.manifest
        dead, size = sum(part.dead_rows for part in now.parts), sum(part.bytes for part in now.parts)
        return IndexInfo(
            kind="exact", where=str(self.folder), vectors=len(self), dim=now.dim, dtype=now.dtype,
            provenance=now.provenance, dead=dead, parts=len(now.parts), bytes=size,
            holds=self.holds, exact=self.exact, sources=now.sources,
        )  # fmt: skip

    def close(self) -> None:
        """Unmap the files, once nobody holds hits of them. What was added is safe without it."""
        self._snapshot = Snapshot(replace(self._snapshot.manifest, parts=()), ())

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._snapshot.manifest.dtype]

    @property
    def _row_bytes(self) -> int:
        return self.dim * self._dtype.itemsize

    @contextmanager
    def _writing(self) -> Iterator[Snapshot]:
        """The lock, the latest state, and nothing beside it that a killed writer left."""
        with writer_lock(self.folder, patience=self.patience):
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

    def _commit(self, parts: Sequence[Part], *, sources: tuple[str, ...] | None = None) -> None:
        """The moment that counts; then files that no manifest names any more go."""
        before = self._snapshot
        known = before.manifest.sources if sources is None else sources
        generation = before.manifest.generation + 1
        manifest = replace(before.manifest, generation=generation, parts=tuple(parts), sources=known)
        write_manifest(self.folder, manifest)
        self._snapshot = open_snapshot(self.folder, before)
        for name in before.manifest.files() - manifest.files():
            with suppress(OSError):  # the next change sweeps
                (self.folder / name).unlink(missing_ok=True)

    def _tidy(self, due: Callable[..., Rewrite | None] = compaction.next_rewrite) -> None:
        """Merge and rewrite where it is due, a change each. What was asked for is stored by now, so a disk that is
        full or fails only leaves things untidy."""
        try:
            while rewrite := due(self._snapshot.manifest.parts, row_bytes=self._row_bytes):
                self._rewrite(rewrite)
        except (OSError, EnvironmentProblem) as error:
            warnings.warn(f"the change is stored, but {self.folder} could not be tidied: {error}", stacklevel=3)

    def _rewrite(self, rewrite: Rewrite) -> None:
        now = self._snapshot
        new = rewrite_segments(self.folder, self._name("vectors", 0), now.segments[rewrite.start : rewrite.stop])
        parts = now.manifest.parts
        self._commit([*parts[: rewrite.start], new, *parts[rewrite.stop :]])
