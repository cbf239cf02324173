"""`milvus:FILE_OR_URI`: an index in Milvus, embedded in a local file or on a server or cluster, by the same calls.

Milvus orders equal scores arbitrarily. A search sees what was added before it (strong consistency). A call that adds is
not all or none, and nothing is locked between a check and a change: Milvus offers neither. Rows are keyed by a hash of
their id: the client writes keys into its queries unescaped, so a quote in an id would become part of one.

There are two collections: the vectors, and NAME_about with one row of facts, written last, and one row per source.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, ShapeMismatch, UsageError
from vacsr.search.index import AddResult, Check, Entry, Hits, IndexInfo, Metadata, VectorIndex

_TOKEN = "MILVUS_TOKEN"  # a server's token, or user:password; not a part of the name, since names are printed
_MESSAGE = 1 << 24  # bytes of vectors in one message; a server takes 64 MiB
_QUIET = {"grpc.keepalive_time_ms": 600_000, "grpc.keepalive_permit_without_calls": False}
_LOOKUP = 4096  # ids in one query
_MAX_SOURCES = 16384  # Milvus returns no more
_ID_BYTES = 65535  # of Milvus' longest text


class MilvusName(NamedTuple):
    """``FILE_OR_URI[,collection=NAME][,index=KIND]``"""

    uri: str
    collection: str = "vacsr"
    kind: str = "FLAT"  # of a new collection: FLAT is exact; AUTOINDEX, HNSW and IVF_FLAT are faster at large sizes

    @property
    def remote(self) -> bool:
        return "://" in self.uri

    @classmethod
    def parse(cls, where: str) -> MilvusName:
        """
        >>> MilvusName.parse("photos.db,collection=cats")
        MilvusName(uri='photos.db', collection='cats', kind='FLAT')
        """
        uri, *parts = where.split(",")
        options = dict(part.partition("=")[::2] for part in parts)
        if not uri or not set(options) <= {"collection", "index"} or not all(options.values()):
            raise UsageError(f"cannot parse milvus:{where} — write milvus:FILE_OR_URI[,collection=NAME][,index=KIND]")
        return cls(uri, options.get("collection", "vacsr"), options.get("index", "FLAT"))


class MilvusIndex(VectorIndex):
    """See :class:`vacsr.search.VectorIndex`."""

    kind = "milvus"

    def __init__(self, name: MilvusName, *, dim: int | None = None, provenance: str = "") -> None:
        self.name, self._about = name, f"{name.collection}_about"
        self.where = f"{name.uri},collection={name.collection}"
        self._client = _connect(name, create=dim is not None)
        try:
            with _milvus_errors(name):
                facts = self._facts() or self._create(dim, provenance)
                self._client.load_collection(name.collection)
                self.exact = _is_flat(self._client, name.collection)
            self.dim, self.provenance = int(facts["dim"]), str(facts["provenance"])
        except Exception:
            self.close()
            raise

    @classmethod
    def open(cls, where: str, *, dim: int | None, provenance: str | None, dtype: str | None) -> Self:
        if dtype == "float16":
            raise UsageError("Milvus stores float32, not float16 — leave it out, or use exact:FOLDER")
        return cls(MilvusName.parse(where), dim=dim, provenance=provenance or "")

    @property
    def sources(self) -> tuple[str, ...]:
        rows = self._call("query", self._about, filter="", output_fields=["metadata"], limit=_MAX_SOURCES)
        facts = [_as_dict(row["metadata"]) for row in rows]
        noted = sorted((fact for fact in facts if "source" in fact), key=lambda fact: fact["since"])
        return tuple(str(fact["source"]) for fact in noted)

    def note_source(self, spec: str) -> None:
        """Remember a SPEC, once: in a row of its own, so that several who fill at once lose none."""
        if spec not in self.sources:
            self._write_about(f"source {spec}", {"source": spec, "since": time.time_ns()})

    def __len__(self) -> int:
        rows = self._call("query", self.name.collection, filter="", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        rows = self._stored(ids, ["id", "vector", "metadata"])
        return {str(row["id"]): Entry(torch.tensor(row["vector"]), _as_dict(row["metadata"])) for row in rows}

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        return {str(row["id"]): _as_dict(row["metadata"]) for row in self._stored(ids, ["id", "metadata"])}

    def records(self) -> Iterator[tuple[str, Metadata]]:
        with _milvus_errors(self.name):
            pages = self._client.query_iterator(
                self.name.collection, batch_size=_LOOKUP, output_fields=["id", "metadata"]
            )
            while rows := pages.next():
                yield from ((str(row["id"]), _as_dict(row["metadata"])) for row in rows)
            pages.close()

    def delete(self, ids: Sequence[str]) -> int:
        keys = [row["key"] for row in self._stored(ids, ["key"])]
        for start in range(0, len(keys), _LOOKUP):
            self._call("delete", self.name.collection, ids=keys[start : start + _LOOKUP])
        return len(keys)

    def info(self) -> IndexInfo:
        path = Path(self.name.uri).expanduser()
        files = [] if self.name.remote else [path, *path.rglob("*")]  # some versions make a folder
        size = sum(file.stat().st_size for file in files if file.is_file())
        return super().info()._replace(bytes=None if self.name.remote else size)

    def close(self) -> None:
        self._client.close()

    def _add(self, ids: list[str], vectors: Tensor, metadata: list[str], check: Check | None) -> AddResult:
        items = [json.loads(text) for text in metadata]
        _check_unicode(ids, items)
        existing = self.metadata(ids)
        if check is not None and existing:
            check(existing)
        size = max(_MESSAGE // (4 * self.dim), 1)
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            rows = [
                {"key": _key(name), "id": name, "vector": vector.numpy(), "metadata": item}
                for name, vector, item in zip(ids[part], vectors[part], items[part], strict=True)
            ]
            self._call("upsert", self.name.collection, rows)
        return AddResult(len(ids) - len(existing), len(existing))

    def _search(self, queries: Tensor, k: int) -> Hits:
        answers: list[Any] = []
        for some in torch.split(queries, max(_MESSAGE // (4 * self.dim * k), 1)) if len(queries) else ():
            answers += self._call(
                "search", self.name.collection, data=list(some.numpy()), limit=k, anns_field="vector",
                search_params={"metric_type": "IP"}, output_fields=["id", "vector", "metadata"],
            )  # fmt: skip
        shortest = min(map(len, answers), default=0)  # an approximate index may find fewer for some
        rows = [list(answer)[:shortest] for answer in answers]
        scores = torch.tensor([[hit["distance"] for hit in row] for row in rows], dtype=torch.float32)
        vectors = torch.tensor([[hit["entity"]["vector"] for hit in row] for row in rows], dtype=torch.float32)
        return Hits(
            [[str(hit["entity"]["id"]) for hit in row] for row in rows],
            scores.view(len(rows), shortest),
            vectors.view(len(rows), shortest, self.dim),
            [[_as_dict(hit["entity"]["metadata"]) for hit in row] for row in rows],
        )

    def _stored(self, ids: Sequence[str], fields: list[str]) -> Iterator[Any]:
        keys = [_key(name) for name in dict.fromkeys(ids)]
        for start in range(0, len(keys), _LOOKUP):
            some = keys[start : start + _LOOKUP]
            yield from self._call("get", self.name.collection, ids=some, output_fields=fields)

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        with _milvus_errors(self.name):
            return getattr(self._client, verb)(*arguments, **options)

    def _facts(self) -> Metadata | None:
        """Dimension and provenance; None if there is no index, or one that was not completed."""
        if not self._client.has_collection(self._about):
            return None
        self._client.load_collection(self._about)
        rows = self._client.get(self._about, ids=[_key("about")], output_fields=["metadata"])
        return _as_dict(rows[0]["metadata"]) if rows else None

    def _create(self, dim: int | None, provenance: str) -> Metadata:
        """Make what is missing: an earlier creation may have been stopped half-way."""
        if dim is None:
            message = f"no index in milvus:{self.name.uri}, collection {self.name.collection!r}"
            raise DataError(f"{message} — fill one: vacsr index add milvus:{self.name.uri} --run RUN --pairs SPEC")
        _ensure_collection(self._client, self.name, dim=dim)
        _ensure_collection(self._client, self.name._replace(collection=self._about, kind="FLAT"), dim=2)
        if self._facts() is None:
            self._write_about("about", {"dim": dim, "provenance": provenance})
        return self._facts() or {"dim": dim, "provenance": provenance}

    def _write_about(self, key: str, facts: Metadata) -> None:
        row = {"key": _key(key), "id": key.partition(" ")[0], "vector": [1.0, 0.0], "metadata": facts}
        self._call("upsert", self._about, [row])


def _connect(name: MilvusName, *, create: bool) -> Any:
    """A client. A local file that is missing is created only on request."""
    try:
        from pymilvus import MilvusClient

        if not name.remote:
            import milvus_lite  # noqa: F401
    except ImportError as error:
        raise MissingExtra(error.name or "pymilvus", "milvus") from error
    path = Path(name.uri).expanduser()
    if not name.remote and path.suffix != ".db":
        raise UsageError(f"milvus:{name.uri} is neither a server's address nor a file.db — write milvus:FILE.db")
    if not name.remote and not create and not path.exists():
        raise DataError(f"no index at {path} — fill one: vacsr index add milvus:{name.uri} --run RUN --pairs SPEC")
    with _milvus_errors(name):
        if name.remote:
            return MilvusClient(uri=name.uri, token=os.environ.get(_TOKEN, ""))
        # Its own server starts first, slowly on a busy machine. It refuses clients that ping it every ten seconds.
        return MilvusClient(str(path), timeout=60, grpc_options=_QUIET)


@contextmanager
def _milvus_errors(name: MilvusName) -> Iterator[None]:
    """Milvus' errors as ours."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        action = "the server and its address" if name.remote else "that no other program has the file open"
        raise EnvironmentProblem(f"milvus:{name.uri}: {error.message} — check {action}") from error


def _ensure_collection(client: Any, name: MilvusName, *, dim: int) -> None:
    """Create the collection, or check that the one that exists takes such vectors."""
    from pymilvus import DataType

    params = client.prepare_index_params()
    params.add_index("vector", index_type=name.kind, metric_type="IP")
    if not client.has_collection(name.collection):
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.VARCHAR, max_length=64, is_primary=True)
        schema.add_field("id", DataType.VARCHAR, max_length=_ID_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("metadata", DataType.JSON)
        client.create_collection(name.collection, schema=schema, index_params=params, consistency_level="Strong")
    fields = {field["name"]: field for field in client.describe_collection(name.collection)["fields"]}
    where, action = f"milvus:{name.uri}: the collection {name.collection!r}", f"milvus:{name.uri},collection=NAME"
    if not {"key", "id", "vector", "metadata"} <= fields.keys():
        raise DataError(f"{where} is not an index of vacsr — choose another: {action}")
    stored = int(fields["vector"]["params"]["dim"])
    if stored != dim:
        raise ShapeMismatch(f"{where} takes vectors of dimension {stored}, not {dim} — choose another: {action}")
    if not client.list_indexes(name.collection):
        client.create_index(name.collection, params)


def _is_flat(client: Any, collection: str) -> bool:
    """Are vectors compared one by one? False also where the server does not say."""
    kinds = [client.describe_index(collection, name) or {} for name in client.list_indexes(collection)]
    return any(kind.get("field_name") == "vector" and kind.get("index_type") == "FLAT" for kind in kinds)


def _check_unicode(ids: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Refuse lone surrogates, which Milvus cannot store."""
    for name, item in zip(ids, metadata, strict=True):
        try:
            json.dumps([name, item], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = f"id or metadata of {name!r} are not Unicode text, which Milvus does not take"
            raise DataError(f"{message} — fix them, or use exact:FOLDER") from error


def _as_dict(value: Any) -> Metadata:
    """A JSON field, which some versions return as text."""
    return dict(json.loads(value) if isinstance(value, str | bytes) else value)


def _key(name: str) -> str:
    """Of a row: 160 bits in hexadecimal."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40]
