"""The files of a local index: SQLite for ids, metadata and state, beside one mapped file of vectors.

``items-N.sqlite`` holds ids and metadata by row, and one row of state: how many rows count, which are deleted, where
they came from. ``vectors-N.bin`` holds the vectors, row by row. Both only grow: a change appends vectors, syncs them,
and then commits to SQLite. A writer that is killed before the commit has changed nothing; the next one overwrites what
it appended. Hence a reader needs no lock: it keeps the state that it read, and its rows stay as they are.

When more than a quarter of the rows are deleted, the others are copied into a pair of files with the next N. Readers of
the old pair keep it open. Whatever is in the folder may have been prepared by somebody: sizes, types and the schema are
checked, links are refused, and nothing outside the folder is opened or deleted.
"""

import json
import mmap
import os
import re
import sqlite3
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, model_validator
from torch import Tensor

from vacsr.errors import DataError, DiskFull, EnvironmentProblem
from vacsr.files import disk_errors
from vacsr.search.index import DTYPES, Metadata

ITEMS, VECTORS = "items-{:08d}.sqlite", "vectors-{:08d}.bin"
OWN_NAME = re.compile(r"\.?(?:items-(\d{8})\.sqlite|vectors-(\d{8})\.bin)(?:\.\d+\.tmp)?(?:-wal|-shm|-journal)?")
"""Names that only an index gives, also while a file is written."""
SCHEMA = (
    "CREATE TABLE items (row INTEGER PRIMARY KEY, id BLOB NOT NULL, metadata TEXT NOT NULL)",
    "CREATE INDEX items_by_id ON items (id)",
    "CREATE TABLE state (id TEXT, dim INTEGER, dtype TEXT, provenance TEXT, generation INTEGER, "
    "rows INTEGER, max_norm REAL, deleted BLOB, sources TEXT)",
)
_TRIES = 20  # to open files that a writer replaces meanwhile
_LOOKUP = 4096  # ids or rows per statement


class State(BaseModel):
    """The row of ``state``."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    id: str  # drawn when the index is created, so that another index in the same folder is not taken for it
    dim: int = Field(ge=1, le=1 << 24)
    dtype: Literal["float32", "float16"]
    provenance: str
    generation: int = Field(default=0, ge=0)  # grows by one with every change
    rows: int = Field(default=0, ge=0, lt=1 << 32)
    max_norm: float = Field(default=0.0, ge=0)  # of any stored vector: bounds the rounding of products
    deleted: bytes = b""  # a bit per row; empty if none is deleted
    sources: Annotated[list[InstanceOf[str]], BeforeValidator(json.loads)] = []  # may hold lone surrogates

    @model_validator(mode="after")
    def _check_deleted(self) -> Self:
        if self.deleted and len(self.deleted) != (self.rows + 7) // 8:
            raise ValueError("the deleted rows do not fit the rows")
        return self

    @property
    def vector_bytes(self) -> int:
        return self.rows * self.dim * DTYPES[self.dtype].itemsize


class Database:
    """A connection to one items file that any thread may use; it closes when nothing refers to it any more."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.path, self.vectors = folder / ITEMS.format(number), folder / VECTORS.format(number)
        self.inode = regular_file(self.path).st_ino
        self._connection, self._lock = _connect(self.path), threading.Lock()
        weakref.finalize(self, self._connection.close)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, storage_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is done inside, or roll it back."""
        with self._lock, storage_errors(self.path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The index at one generation. It stays as it is, whatever is written meanwhile."""

    database: Database
    state: State
    mapping: mmap.mmap | None  # None without rows
    deleted: NDArray[np.bool_]  # [rows]

    @property
    def vectors(self) -> Tensor:
        """[rows, d]. Reading a mapped file that somebody has cut off would kill the process, so its size is checked."""
        if self.mapping is None:
            return torch.empty(0, self.state.dim, dtype=DTYPES[self.state.dtype])
        if self.mapping.size() < self.state.vector_bytes:
            raise damaged(self.database.vectors, f"shorter than its {self.state.rows:,} vectors")
        return torch.frombuffer(self.mapping, dtype=DTYPES[self.state.dtype]).view(self.state.rows, self.state.dim)

    def __len__(self) -> int:
        return self.state.rows - int(self.deleted.sum())

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        keys: list[bytes] = [stored_id(name) for name in ids]
        rows: dict[str, int] = {}
        for start in range(0, len(keys), _LOOKUP):
            some = keys[start : start + _LOOKUP]
            sql = f"SELECT id, row FROM items WHERE id IN ({','.join('?' * len(some))})"
            rows |= {self._name(key): row for key, row in self.database.query(sql, some) if self._has(row)}
        return rows

    def item(self, row: int) -> tuple[str, Metadata]:
        for key, text in self.database.query("SELECT id, metadata FROM items WHERE row = ?", (row,)):
            return self._name(key), self._metadata(text)
        raise damaged(self.database.path, f"row {row} is missing")

    def vector(self, row: int) -> Tensor:
        """A copy. -> [d] float32"""
        vector = self.vectors[row].float().clone()
        if not bool(vector.isfinite().all()):
            raise damaged(self.database.vectors, f"row {row} is not finite")
        return vector

    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of all, oldest first."""
        return ((self._name(key), self._metadata(text)) for key, text in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The same as stored; in pages, since a long read keeps SQLite's log from shrinking."""
        sql = "SELECT row, id, metadata FROM items WHERE row >= ? AND row < ? ORDER BY row"
        for start in range(0, self.state.rows, _LOOKUP):
            rows = self.database.query(sql, (start, start + _LOOKUP))
            yield from ((key, text) for row, key, text in rows if self._has(row))

    def _has(self, row: int) -> bool:
        return 0 <= row < self.state.rows and not self.deleted[row]

    def _name(self, key: Any) -> str:
        try:
            return str(key.decode("utf-8", "surrogatepass"))
        except (AttributeError, UnicodeDecodeError) as error:
            raise damaged(self.database.path, f"id: {error}") from error

    def _metadata(self, text: Any) -> Metadata:
        try:
            return dict(json.loads(text, parse_constant=_refuse_constant).items())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(self.database.path, f"metadata: {error}") from error


def open_snapshot(folder: Path, before: Snapshot | None = None) -> Snapshot:
    """The present state: ``before`` itself if nothing has changed. Another index than that is an error."""
    missing: FileNotFoundError | None = None
    for _ in range(_TRIES):  # a writer may replace the files between the look and the opening
        number = current_number(folder)
        if number is None:
            message = f"no index in {folder} (no {ITEMS.format(0)})"
            raise DataError(f"{message} — fill one: vacsr index add exact:{folder} --run RUN --pairs SPEC")
        try:
            database = None if before is None else before.database
            inode = regular_file(folder / ITEMS.format(number)).st_ino
            if database is None or (database.number, database.inode) != (number, inode):
                database = Database(folder, number)
            state = _read_state(database)
            if before is not None and state.id != before.state.id:
                message = f"{folder} now holds another index than the one that was opened"
                raise DataError(f"{message} — open it again, with the model that it was filled with")
            if before is not None and state.generation == before.state.generation:
                return before
            return _map_vectors(database, state)
        except FileNotFoundError as error:
            missing = error
    raise DataError(f"{folder} is not complete: {missing} — copy the folder again, or fill it again") from missing


def current_number(folder: Path) -> int | None:
    """The number of the pair that counts, the highest; None without an index."""
    with storage_errors(folder):
        names = [OWN_NAME.fullmatch(path.name) for path in folder.glob("items-*.sqlite")]
    return max((int(name[1]) for name in names if name), default=None)


def own_files(folder: Path) -> dict[Path, int]:
    """Plain files with names that only an index gives, and their numbers: whatever else is there is somebody else's."""
    names = {path: OWN_NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {
        path: int(name[1] or name[2]) for path, name in names.items() if name and stat.S_ISREG(path.lstat().st_mode)
    }


def _read_state(database: Database) -> State:
    names = list(State.model_fields)
    rows = database.query(f"SELECT {', '.join(names)} FROM state LIMIT 2")
    try:
        (row,) = rows
        return State.model_validate(dict(zip(names, row, strict=True)))
    except (ValueError, TypeError, RecursionError) as error:  # pydantic's is a ValueError
        raise damaged(database.path, str(error)) from error


def _map_vectors(database: Database, state: State) -> Snapshot:
    if regular_file(database.vectors).st_size < state.vector_bytes:
        raise damaged(database.vectors, f"shorter than its {state.rows:,} vectors")
    mapping, deleted = None, np.zeros(state.rows, dtype=bool)
    if state.rows:
        with database.vectors.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), state.vector_bytes, access=mmap.ACCESS_COPY)
    if state.deleted:
        deleted = np.unpackbits(np.frombuffer(state.deleted, dtype=np.uint8), count=state.rows).astype(bool)
    return Snapshot(database, state, mapping, deleted)


def _connect(path: Path) -> sqlite3.Connection:
    """To a database of exactly our schema: a prepared file may hold views or triggers."""
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        if (path.parent / name).is_symlink():
            raise damaged(path.parent / name, "a symbolic link")
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    uri = f"{path.absolute().as_uri()}?{'immutable=1' if frozen else 'mode=rw'}"
    with storage_errors(path):
        connection = sqlite3.connect(uri, uri=True, timeout=60.0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("trusted_schema = OFF", "synchronous = FULL", "cache_size = -65536"):
                connection.execute(f"PRAGMA {pragma}")
            if {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema")} != set(SCHEMA):
                raise damaged(path, "not the tables of this version of vacsr")
        except BaseException:
            connection.close()
            raise
    return connection


def stored_id(name: str) -> bytes:
    """An id as it is stored; SQLite's text cannot hold lone surrogates."""
    return name.encode("utf-8", "surrogatepass")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def regular_file(path: Path) -> os.stat_result:
    """Of a regular file; a symbolic link could lead out of the folder."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "not a regular file")
    return status


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the disk as ours: a full disk, a folder that cannot be used, or a damaged file."""
    try:
        with disk_errors(path):
            yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code == sqlite3.SQLITE_FULL:
            raise DiskFull(f"no space left while writing {path} — free some space, then run the same again") from error
        if not path.exists():
            raise FileNotFoundError(str(path)) from error
        if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            raise EnvironmentProblem(f"cannot use {path} ({error}) — check the folder's permissions") from error
        raise damaged(path, str(error)) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise EnvironmentProblem(f"cannot use {path} ({error}) — check the folder's permissions") from error


def damaged(path: Path, reason: str) -> DataError:
    """For a file that no index of ours can have written."""
    return DataError(f"{path} is damaged ({reason}) — copy the index again, or fill it again")
