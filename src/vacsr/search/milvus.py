"""`milvus:FILE_OR_URI`: an index in Milvus, embedded in a local file or on a server or cluster, by the same calls.

Milvus orders equal scores arbitrarily. A search sees what was added before it (strong consistency). A call that adds is
not all or none, and nothing is locked between a check and a change: Milvus offers neither. Rows are keyed by a hash of
their id: the client writes keys into its queries unescaped, so a quote in an id would become part of one.

There are two collections: the vectors, and NAME_about with one row of facts, written last, and one row per source.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.search.database import (
    LOOKUP,
    DatabaseIndex,
    Row,
    as_dict,
    disk_bytes,
    import_extra,
    no_index,
    refuse_float16,
    row_key,
    split_name,
)
from vacsr.search.index import IndexInfo, Metadata

_TOKEN = "MILVUS_TOKEN"  # a server's token, or user:password; not a part of the name, since names are printed
_QUIET = {"grpc.keepalive_time_ms": 600_000, "grpc.keepalive_permit_without_calls": False}
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
        uri, options = split_name("milvus", where, collection="vacsr", index="FLAT")
        return cls(uri, options["collection"], options["index"])


class MilvusIndex(DatabaseIndex):
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
        refuse_float16(dtype)
        return cls(MilvusName.parse(where), dim=dim, provenance=provenance or "")

    @property
    def sources(self) -> tuple[str, ...]:
        rows = self._call("query", self._about, filter="", output_fields=["metadata"], limit=_MAX_SOURCES)
        facts = [as_dict(row["metadata"]) for row in rows]
        noted = sorted((fact for fact in facts if "source" in fact), key=lambda fact: fact["since"])
        return tuple(str(fact["source"]) for fact in noted)

    def note_source(self, spec: str) -> None:
        """Remember a SPEC, once: in a row of its own, so that several who fill at once lose none."""
        if spec not in self.sources:
            self._write_about(f"source {spec}", {"source": spec, "since": time.time_ns()})

    def __len__(self) -> int:
        rows = self._call("query", self.name.collection, filter="", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    def records(self) -> Iterator[tuple[str, Metadata]]:
        with _milvus_errors(self.name):
            pages = self._client.query_iterator(
                self.name.collection, batch_size=LOOKUP, output_fields=["id", "metadata"]
            )
            while rows := pages.next():
                yield from ((str(row["id"]), as_dict(row["metadata"])) for row in rows)
            pages.close()

    def info(self) -> IndexInfo:
        size = None if self.name.remote else disk_bytes(Path(self.name.uri).expanduser())
        return super().info()._replace(bytes=size)

    def close(self) -> None:
        self._client.close()

    def _rows(self, ids: list[str], *, vectors: bool) -> list[Row]:
        fields = ["id", "metadata", *(["vector"] if vectors else [])]
        rows = self._call("get", self.name.collection, ids=[row_key(name) for name in ids], output_fields=fields)
        return [_as_row(row) for row in rows]

    def _write(self, ids: list[str], vectors: Tensor, metadata: list[str]) -> None:
        rows = [
            {"key": row_key(name), "id": name, "vector": vector.numpy(), "metadata": json.loads(text)}
            for name, vector, text in zip(ids, vectors, metadata, strict=True)
        ]
        self._call("upsert", self.name.collection, rows)

    def _remove(self, ids: list[str]) -> None:
        self._call("delete", self.name.collection, ids=[row_key(name) for name in ids])

    def _nearest(self, queries: Tensor, k: int) -> list[list[Row]]:
        answers = self._call(
            "search", self.name.collection, data=list(queries.numpy()), limit=k, anns_field="vector",
            search_params={"metric_type": "IP"}, output_fields=["id", "vector", "metadata"],
        )  # fmt: skip
        return [[_as_row(hit["entity"])._replace(score=hit["distance"]) for hit in answer] for answer in answers]

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        with _milvus_errors(self.name):
            return getattr(self._client, verb)(*arguments, **options)

    def _facts(self) -> Metadata | None:
        """Dimension and provenance; None if there is no index, or one that was not completed."""
        if not self._client.has_collection(self._about):
            return None
        self._client.load_collection(self._about)
        rows = self._client.get(self._about, ids=[row_key("about")], output_fields=["metadata"])
        return as_dict(rows[0]["metadata"]) if rows else None

    def _create(self, dim: int | None, provenance: str) -> Metadata:
        """Make what is missing: an earlier creation may have been stopped half-way."""
        if dim is None:
            raise no_index(f"milvus:{self.where}")
        _ensure_collection(self._client, self.name, dim=dim)
        _ensure_collection(self._client, self.name._replace(collection=self._about, kind="FLAT"), dim=2)
        if self._facts() is None:
            self._write_about("about", {"dim": dim, "provenance": provenance})
        return self._facts() or {"dim": dim, "provenance": provenance}

    def _write_about(self, key: str, facts: Metadata) -> None:
        row = {"key": row_key(key), "id": key.partition(" ")[0], "vector": [1.0, 0.0], "metadata": facts}
        self._call("upsert", self._about, [row])


def _connect(name: MilvusName, *, create: bool) -> Any:
    """A client. A local file that is missing is created only on request."""
    client = import_extra("milvus", "pymilvus", *([] if name.remote else ["milvus_lite"])).MilvusClient
    path = Path(name.uri).expanduser()
    if not name.remote and path.suffix != ".db":
        raise UsageError(f"milvus:{name.uri} is neither a server's address nor a file.db — write milvus:FILE.db")
    if not name.remote and not create and not path.exists():
        raise no_index(f"milvus:{name.uri}")
    with _milvus_errors(name):
        if name.remote:
            return client(uri=name.uri, token=os.environ.get(_TOKEN, ""))
        # Its own server starts first, slowly on a busy machine. It refuses clients that ping it every ten seconds.
        return client(str(path), timeout=60, grpc_options=_QUIET)


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


def _as_row(fields: Any) -> Row:
    return Row(str(fields["id"]), as_dict(fields["metadata"]), fields.get("vector", ()))
