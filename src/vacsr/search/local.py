"""`exact:FOLDER`: an index in a folder, searched exactly, without a server. See :mod:`.store` for its files."""

import json
import os
import sqlite3
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

import vacsr.search.store as store
from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.files import atomic_paths, lock_file, make_folder
from vacsr.search.index import AddResult, Check, Entry, Hits, IndexInfo, LazyList, Metadata, VectorIndex
from vacsr.search.nearest import Floats, Rows, nearest_rows
from vacsr.search.store import Snapshot, State, open_snapshot

_LOCK = "writer.lock"
_MAX_DELETED = 0.25  # share of deleted rows from which on the files are compacted
_COPY = 1 << 14  # vectors copied at a time


class ExactIndex(VectorIndex):
    """Equal scores are ranked by the order of insertion; a replaced vector counts as new.

    ``patience``: seconds to wait while another process writes. Several threads may search at once.
    """

    kind, exact = "exact", True

    def __init__(self, folder: Path, *, patience: float = 60.0) -> None:
        self.folder, self.where, self.patience = folder, str(folder), patience
        self._opened: Snapshot | None = open_snapshot(folder)
        state = self._opened.state
        self.dim, self.dtype, self.provenance = state.dim, state.dtype, state.provenance

    @classmethod
    def open(cls, where: str, *, dim: int | None, provenance: str | None, dtype: str | None) -> Self:
        folder = Path(where).expanduser()
        if dim is not None and store.current_number(folder) is None:
            _prepare_folder(folder)
            with writer_lock(folder, patience=30.0):
                if store.current_number(folder) is None:  # else another process was faster
                    _create(folder, dim=dim, provenance=provenance or "", dtype=dtype or "float32")
        return cls(folder)

    @property
    def _snapshot(self) -> Snapshot:
        if self._opened is None:
            raise UsageError(f"the index {self.folder} is closed — open it again")
        return self._opened

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._snapshot.state.sources)

    def __len__(self) -> int:
        return len(self._snapshot)

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        now = self._snapshot
        return {name: Entry(now.vector(row), now.item(row)[1]) for name, row in now.find(ids).items()}

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        now = self._snapshot
        return {name: now.item(row)[1] for name, row in now.find(ids).items()}

    def records(self) -> Iterator[tuple[str, Metadata]]:
        return self._snapshot.records()

    def info(self) -> IndexInfo:
        now, size = self._snapshot, sum(path.stat().st_size for path in store.own_files(self.folder))
        return super().info()._replace(dead=now.state.rows - len(now), bytes=size)

    def _search(self, queries: Tensor, k: int) -> Hits:
        now = self._snapshot
        try:
            rows, scores = self._nearest(now, queries, k)
        except FloatingPointError as error:
            raise store.damaged(now.database.vectors, str(error)) from error
        vectors = torch.from_numpy(now.vectors.numpy()[rows].astype(np.float32))
        item = cache(now.item)  # id and metadata are read together, once
        ids = [LazyList(lambda row: item(row)[0], hits) for hits in rows.tolist()]
        metadata = [LazyList(lambda row: item(row)[1], hits) for hits in rows.tolist()]
        return Hits(ids, torch.from_numpy(scores), vectors, metadata)

    def _nearest(self, now: Snapshot, queries: Tensor, k: int) -> tuple[Rows, Floats]:
        """Rows that are not deleted and their scores, best first. [Q, d] -> [Q, k] each"""
        return nearest_rows(now.vectors, queries, k, deleted=now.deleted, max_norm=now.state.max_norm)

    def _add(self, ids: list[str], vectors: Tensor, metadata: list[str], check: Check | None) -> AddResult:
        """All or none."""
        with self._writing() as before:
            existing = before.find(ids)
            if check is not None and existing:
                check({name: before.item(row)[1] for name, row in existing.items()})
            _write_change(before, ids=ids, vectors=vectors, metadata=metadata, delete=existing.values())
        return AddResult(len(ids) - len(existing), len(existing))

    def delete(self, ids: Sequence[str]) -> int:
        with self._writing() as before:
            existing = before.find(ids)
            if existing:
                _write_change(before, delete=existing.values())
        return len(existing)

    def note_source(self, spec: str) -> None:
        if spec in self.sources:
            return
        with self._writing() as before:
            if spec not in before.state.sources:
                _write_change(before, source=spec)

    def refresh(self) -> bool:
        """Read what other processes have written since; was there anything? Another index in the folder is an error."""
        before = self._snapshot
        self._opened = open_snapshot(self.folder, before)
        return self._opened is not before

    def close(self) -> None:
        """Release the files, as soon as nobody holds hits. What was added is safe without it."""
        self._opened = None

    @contextmanager
    def _writing(self) -> Iterator[Snapshot]:
        """Hold the lock, start from the latest state, and compact the files afterwards if that is due."""
        with writer_lock(self.folder, patience=self.patience):
            self.refresh()
            _sweep(self._snapshot)
            yield self._snapshot
            self.refresh()
            now = self._snapshot
            if now.state.rows - len(now) > _MAX_DELETED * now.state.rows:
                try:
                    _compact(now)
                    self.refresh()
                    _sweep(self._snapshot)
                except (OSError, EnvironmentProblem) as error:
                    warnings.warn(f"the change is stored, but {self.folder} was not compacted: {error}", stacklevel=4)


def writer_lock(folder: Path, *, patience: float) -> AbstractContextManager[None]:
    """One writer at a time; wait up to ``patience`` seconds for another."""
    return lock_file(
        folder / _LOCK,
        wait="wait until it is done, then run the same command again",
        elsewhere="check the permissions, or use a local disk of Linux or macOS, or a Milvus server: milvus:URI",
        patience=patience,
        required=True,
    )


def _prepare_folder(folder: Path) -> None:
    """Make the folder of a new index. One with other things in it is refused."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, an exact index is a folder — choose another name")
    make_folder(folder)
    others = sorted(
        path.name for path in folder.iterdir() if path.name != _LOCK and not store.OWN_NAME.fullmatch(path.name)
    )
    if others:
        raise UsageError(f"{folder} holds other files, such as {others[0]!r}, and no index — give an empty folder")


def _create(folder: Path, *, dim: int, provenance: str, dtype: str) -> None:
    """An empty index. Vectors without their items are refused: they would be overwritten."""
    orphans = sorted(path.name for path in folder.glob("vectors-*") if path.stat().st_size)
    if orphans:
        message = f"{folder} holds vectors, {orphans[0]!r}, but no {store.ITEMS.format(0)}"
        raise DataError(f"{message} — copy the whole index again, or remove these files")
    state = State.model_validate({"id": uuid.uuid4().hex, "dim": dim, "dtype": dtype, "provenance": provenance})
    _write_pair(folder, 0, state, items=(), blocks=())


def _write_change(
    before: Snapshot,
    *,
    ids: Sequence[str] = (),
    vectors: Tensor | None = None,
    metadata: Sequence[str] = (),
    delete: Iterable[int] = (),
    source: str | None = None,
) -> None:
    """Append rows, delete others, add a source, all or none; on the disk when it returns. [N], [N, d], [N]"""
    state, max_norm = before.state, before.state.max_norm
    if vectors is not None:
        _append_vectors(before, vectors)
        max_norm = max(max_norm, float(vectors.float().norm(dim=1).max()))
    deleted = np.append(before.deleted, np.zeros(len(ids), dtype=bool))
    deleted[list(delete)] = True
    bits = np.packbits(deleted).tobytes() if deleted.any() else b""
    sources = json.dumps([*state.sources, *([] if source is None else [source])])
    items = zip(range(state.rows, len(deleted)), map(store.stored_id, ids), metadata, strict=True)
    with before.database.transaction() as connection:
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        connection.execute(
            "UPDATE state SET generation = generation + 1, rows = ?, max_norm = ?, deleted = ?, sources = ?",
            (len(deleted), max_norm, bits, sources),
        )


def _append_vectors(before: Snapshot, vectors: Tensor) -> None:
    """After the last row that counts, over whatever a killed writer left there."""
    path = before.database.vectors
    store.regular_file(path)
    with store.storage_errors(path), os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        file.seek(before.state.vector_bytes)
        file.write(vectors.contiguous().numpy().data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _sweep(now: Snapshot) -> None:
    """Remove other pairs, and what a killed writer left.

    Vectors go first: a reader that opens an old pair at this moment misses them, and looks again.
    """
    for path, number in sorted(store.own_files(now.database.folder).items(), reverse=True):
        if number != now.database.number or path.name.startswith("."):
            path.unlink(missing_ok=True)


def _compact(now: Snapshot) -> None:
    """Copy the rows that are left into the next pair of files."""
    left = np.flatnonzero(~now.deleted)
    state = now.state.model_copy(update={"generation": now.state.generation + 1, "rows": len(left), "deleted": b""})
    blocks = (now.vectors[torch.from_numpy(left[start : start + _COPY])] for start in range(0, len(left), _COPY))
    _write_pair(now.database.folder, now.database.number + 1, state, items=now.items(), blocks=blocks)


def _write_pair(
    folder: Path, number: int, state: State, *, items: Iterable[tuple[bytes, str]], blocks: Iterable[Tensor]
) -> None:
    """Write a pair of files. It counts from the moment that the items file has its name."""
    vectors, path = folder / store.VECTORS.format(number), folder / store.ITEMS.format(number)
    values = {**state.model_dump(), "sources": json.dumps(state.sources)}
    with store.storage_errors(vectors), atomic_paths(vectors) as (temporary,), temporary.open("wb") as file:
        for block in blocks:
            file.write(block.contiguous().numpy().data)
    with store.storage_errors(path), atomic_paths(path) as (temporary,):
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            with connection:
                connection.execute("BEGIN")
                for statement in store.SCHEMA:
                    connection.execute(statement)
                rows = ((row, *item) for row, item in enumerate(items))
                connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
                marks = ", ".join("?" * len(values))
                connection.execute(f"INSERT INTO state ({', '.join(values)}) VALUES ({marks})", list(values.values()))
        _sync_folder(folder)  # the vectors have their name before the items have theirs
    _sync_folder(folder)
    with suppress(OSError):  # a parent that may be passed through and not read
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
