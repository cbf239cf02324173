"""What indexes in a database have in common: a name with options, work in pieces, and hits from rows.

A backend says how to connect, and how rows are read, written, deleted and searched; :mod:`.qdrant` is a short one.
"""

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vacsr.errors import DataError, MissingExtra, UsageError
from vacsr.search.index import AddResult, Check, Entry, Hits, IndexInfo, Metadata, VectorIndex

LOOKUP = 4096  # ids in one query
_MESSAGE = 1 << 22  # bytes of vectors in one message; as JSON they are five times as long, and servers take 32 MiB
_OPTION = re.compile(r"(.+),(\w+)=([^,]+)", re.DOTALL)


class Row(NamedTuple):
    id: str
    metadata: Metadata
    vector: Sequence[float] = ()
    score: float = 0.0


class DatabaseIndex(VectorIndex):
    """Ids and metadata must be Unicode text. Equal scores have no order."""

    unit: ClassVar[str] = "collection"  # the option that names one of several indexes in a place
    kinds: ClassVar[tuple[str, ...]] = ()  # what ``index=`` may be; empty: the database knows
    _client: Any  # with close()

    def __init__(self, where: str, *, dim: int | None = None, provenance: str = "") -> None:
        """``dim``: of a new index, where there is none."""
        self._place, options = split_name(self.kind, where, **{self.unit: "vacsr", "index": "FLAT"})
        self.name, kind = options[self.unit], options["index"]
        if self.kinds and kind not in self.kinds:
            raise UsageError(f"{self.kind} has no index {kind!r} — write index={' or index='.join(self.kinds)}")
        self.where = f"{self._place},{self.unit}={self.name}"
        self.remote, self._path = "://" in self._place, Path(self._place).expanduser()
        self._client = self._connect(create=dim is not None)
        try:
            facts = self._facts()
            if not facts and dim is None:
                raise self._missing()
            facts = facts or self._create({"dim": dim, "provenance": provenance}, kind)
            self.dim, self.provenance = int(facts["dim"]), str(facts["provenance"])
            self.exact = self._ready()
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            message = f"{self.kind}:{self.where} does not hold an index of vacsr ({error!r:.200})"
            raise DataError(f"{message} — choose another place or name") from error
        except Exception:
            self.close()
            raise

    @classmethod
    def open(cls, where: str, *, dim: int | None, provenance: str | None, dtype: str | None) -> Self:
        if dtype == "float16":
            raise UsageError("a database stores float32, not float16 — leave it out, or use exact:FOLDER")
        return cls(where, dim=dim, provenance=provenance or "")

    @abstractmethod
    def _connect(self, *, create: bool) -> Any:
        """A client. A local place that is missing is created only on request."""

    @abstractmethod
    def _facts(self) -> Metadata | None:
        """``dim`` and ``provenance`` of the index; empty where there is none."""

    @abstractmethod
    def _create(self, facts: Metadata, kind: str) -> Metadata:
        """Make an index of this kind, and return its facts: another process may have been faster."""

    @abstractmethod
    def _ready(self) -> bool:
        """Prepare searches; are they exact?"""

    @abstractmethod
    def _errors(self) -> AbstractContextManager[None]:
        """The database's errors as ours."""

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

    def info(self) -> IndexInfo:
        return super().info()._replace(bytes=None if self.remote else disk_bytes(self._path))

    def close(self) -> None:
        self._client.close()

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        with self._errors():
            return getattr(self._client, verb)(*arguments, **options)

    def _missing(self) -> DataError:
        """For an index that is to be read and does not exist."""
        spec = f"{self.kind}:{self.where}"
        return DataError(f"no index at {spec} — fill one: vacsr index add {spec} --run RUN --pairs SPEC")

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
        vectors = torch.from_numpy(np.array([[hit.vector for hit in row] for row in rows], dtype=np.float32))
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


def import_extra(extra: str, *modules: str) -> Any:
    """The first of some modules, which come with an extra of vacsr."""
    try:
        first, *_ = [import_module(module) for module in modules]
        return first
    except ImportError as error:
        raise MissingExtra(error.name or modules[0], extra) from error


def disk_bytes(path: Path) -> int:
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
