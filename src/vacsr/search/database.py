"""What indexes in a database have in common: a name with options, work in pieces, and hits from rows.

A backend says how rows are read, written, deleted and searched; :mod:`.qdrant` is a short one.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.errors import DataError, MissingExtra, UsageError
from vacsr.search.index import AddResult, Check, Entry, Hits, Metadata, VectorIndex

LOOKUP = 4096  # ids in one query
_MESSAGE = 1 << 22  # bytes of vectors in one message; as JSON they are five times as long, and servers take 32 MiB
_OPTION = re.compile(r"(.+),(\w+)=([^,]+)", re.DOTALL)


class Row(NamedTuple):
    """What a database returns under one id."""

    id: str
    metadata: Metadata
    vector: Sequence[float] = ()
    score: float = 0.0


class DatabaseIndex(VectorIndex):
    """Ids and metadata must be Unicode text. Equal scores have no order."""

    @abstractmethod
    def _rows(self, ids: list[str], *, vectors: bool) -> list[Row]:
        """Those of some unique ids that exist; with their vectors only on request."""

    @abstractmethod
    def _write(self, ids: list[str], vectors: Tensor, metadata: list[str]) -> None:
        """Insert some, or overwrite those that exist. [N, d]"""

    @abstractmethod
    def _remove(self, ids: list[str]) -> None:
        """Delete some that exist."""

    @abstractmethod
    def _nearest(self, queries: Tensor, k: int) -> list[list[Row]]:
        """The best k of each query, with vectors and scores. An approximate index may find fewer. [Q, d]"""

    def _transaction(self) -> AbstractContextManager[Any]:
        """What is written inside is stored together, if the database can do that."""
        return nullcontext()

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        return {row.id: Entry(torch.tensor(row.vector), row.metadata) for row in self._stored(ids, vectors=True)}

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        return {row.id: row.metadata for row in self._stored(ids)}

    def delete(self, ids: Sequence[str]) -> int:
        with self._transaction():
            names = [row.id for row in self._stored(ids)]
            for start in range(0, len(names), LOOKUP):
                self._remove(names[start : start + LOOKUP])
        return len(names)

    def _add(self, ids: list[str], vectors: Tensor, metadata: list[str], check: Check | None) -> AddResult:
        _check_unicode(ids, metadata)
        size = max(_MESSAGE // (4 * self.dim), 1)
        with self._transaction():
            existing = self.metadata(ids)
            if check is not None and existing:
                check(existing)
            for start in range(0, len(ids), size):
                part = slice(start, start + size)
                self._write(ids[part], vectors[part], metadata[part])
        return AddResult(len(ids) - len(existing), len(existing))

    def _search(self, queries: Tensor, k: int) -> Hits:
        rows: list[list[Row]] = []
        for some in torch.split(queries, max(_MESSAGE // (4 * self.dim * k), 1)) if len(queries) else ():
            rows += self._nearest(some, k)
        shortest = min(map(len, rows), default=0)
        rows = [row[:shortest] for row in rows]
        scores = torch.tensor([[hit.score for hit in row] for row in rows], dtype=torch.float32)
        vectors = torch.tensor([[hit.vector for hit in row] for row in rows], dtype=torch.float32)
        return Hits(
            [[hit.id for hit in row] for row in rows],
            scores.view(len(rows), shortest),
            vectors.view(len(rows), shortest, self.dim),
            [[hit.metadata for hit in row] for row in rows],
        )

    def _stored(self, ids: Sequence[str], *, vectors: bool = False) -> Iterator[Row]:
        names = list(dict.fromkeys(ids))
        for start in range(0, len(names), LOOKUP):
            yield from self._rows(names[start : start + LOOKUP], vectors=vectors)


def split_name(scheme: str, where: str, **options: str) -> tuple[str, dict[str, str]]:
    """``WHERE[,option=VALUE]…`` as a place and its options, with their defaults.

    >>> split_name("milvus", "photos.db,collection=cats", collection="vacsr", index="FLAT")
    ('photos.db', {'collection': 'cats', 'index': 'FLAT'})
    """
    given, place = dict[str, str](), where
    while match := _OPTION.fullmatch(place):
        place, key, value = match.groups()
        given[key] = value
    if not given.keys() <= options.keys():
        expected = "".join(f"[,{key}={value}]" for key, value in options.items())
        raise UsageError(f"cannot parse {scheme}:{where} — write {scheme}:WHERE{expected}")
    return place, options | given


def check_index_kind(scheme: str, kind: str, kinds: Sequence[str]) -> None:
    """Refuse an ``index=KIND`` that the backend does not have."""
    if kind not in kinds:
        raise UsageError(f"{scheme} has no index {kind!r} — write index={' or index='.join(kinds)}")


def import_extra(extra: str, *modules: str) -> Any:
    """The first of some modules, which come with an extra of vacsr."""
    try:
        first, *_ = [import_module(module) for module in modules]
        return first
    except ImportError as error:
        raise MissingExtra(error.name or modules[0], extra) from error


def no_index(spec: str) -> DataError:
    """For an index that is to be read and does not exist."""
    return DataError(f"no index at {spec} — fill one: vacsr index add {spec} --run RUN --pairs SPEC")


def refuse_float16(dtype: str | None) -> None:
    """Databases store float32."""
    if dtype == "float16":
        raise UsageError("a database stores float32, not float16 — leave it out, or use exact:FOLDER")


def disk_bytes(path: Path) -> int:
    """Of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def row_key(name: str) -> str:
    """A key that is safe in any query language, from an id. 160 bits in hexadecimal."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def as_dict(value: Any) -> Metadata:
    """A JSON field, which some clients return as text."""
    return dict(json.loads(value) if isinstance(value, str | bytes) else value)


def _check_unicode(ids: Sequence[str], metadata: Sequence[str]) -> None:
    """Refuse lone surrogates, which databases cannot store."""
    for name, text in zip(ids, metadata, strict=True):
        try:
            json.dumps([name, json.loads(text)], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = f"id or metadata of {name!r} are not Unicode text, which a database does not take"
            raise DataError(f"{message} — fix them, or use exact:FOLDER") from error
