"""`milvus:FILE_OR_URI`: an index in Milvus, embedded in a local file or on a server or cluster, by the same calls.

Milvus orders equal scores arbitrarily. A search sees what was added before it (strong consistency). A call that adds is
not all or none, and nothing is locked between a check and a change: Milvus offers neither. Rows are keyed by a hash of
their id: the client writes keys into its queries unescaped, so a quote in an id would become part of one.

There are two collections: the vectors, and NAME_about with one row of facts, written last, and one row per source.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.search.database import LOOKUP, DatabaseIndex, Row, as_dict, import_extra, row_key
from vacsr.search.index import Metadata

_TOKEN = "MILVUS_TOKEN"  # a server's token, or user:password; not a part of the name, since names are printed
_QUIET = {"grpc.keepalive_time_ms": 600_000, "grpc.keepalive_permit_without_calls": False}
_MAX_SOURCES = 16384  # Milvus returns no more
_ID_BYTES = 65535  # of Milvus' longest text


class MilvusIndex(DatabaseIndex):
    """See :class:`vacsr.search.VectorIndex`. ``index=FLAT`` is exact; AUTOINDEX, HNSW and IVF_FLAT are faster."""

    kind, needs = "milvus", ("pymilvus",)

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
        rows = self._call("query", self.name, filter="", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    def records(self) -> Iterator[tuple[str, Metadata]]:
        with self._errors():
            pages = self._client.query_iterator(self.name, batch_size=LOOKUP, output_fields=["id", "metadata"])
            while rows := pages.next():
                yield from ((str(row["id"]), as_dict(row["metadata"])) for row in rows)
            pages.close()

    def _rows(self, ids: list[str], *, vectors: bool) -> list[Row]:
        fields = ["id", "metadata", *(["vector"] if vectors else [])]
        rows = self._call("get", self.name, ids=[row_key(name) for name in ids], output_fields=fields)
        return [_as_row(row) for row in rows]

    def _write(self, ids: list[str], vectors: Tensor, metadata: list[str]) -> None:
        rows = [
            {"key": row_key(name), "id": name, "vector": vector.numpy(), "metadata": json.loads(text)}
            for name, vector, text in zip(ids, vectors, metadata, strict=True)
        ]
        self._call("upsert", self.name, rows)

    def _remove(self, ids: list[str]) -> None:
        self._call("delete", self.name, ids=[row_key(name) for name in ids])

    def _nearest(self, queries: Tensor, k: int) -> list[list[Row]]:
        answers = self._call(
            "search", self.name, data=list(queries.numpy()), limit=k, anns_field="vector",
            search_params={"metric_type": "IP"}, output_fields=["id", "vector", "metadata"],
        )  # fmt: skip
        return [[_as_row(hit["entity"])._replace(score=hit["distance"]) for hit in answer] for answer in answers]

    @property
    def _about(self) -> str:
        return f"{self.name}_about"

    def _connect(self, *, create: bool) -> Any:
        client = import_extra("milvus", "pymilvus", *([] if self.remote else ["milvus_lite"])).MilvusClient
        if not self.remote and self._path.suffix != ".db":
            raise UsageError(f"milvus:{self._place} is neither a server's address nor a file.db — write milvus:FILE.db")
        if not self.remote and not create and not self._path.exists():
            raise self._missing()
        with self._errors():
            if self.remote:
                return client(uri=self._place, token=os.environ.get(_TOKEN, ""))
            # Its own server starts first, slowly on a busy machine. It refuses clients that ping it every ten seconds.
            return client(str(self._path), timeout=60, grpc_options=_QUIET)

    def _facts(self) -> Metadata | None:
        """None also of an index that was not completed."""
        if not self._call("has_collection", self._about):
            return None
        self._call("load_collection", self._about)
        rows = self._call("get", self._about, ids=[row_key("about")], output_fields=["metadata"])
        return as_dict(rows[0]["metadata"]) if rows else None

    def _create(self, facts: Metadata, kind: str) -> Metadata:
        """Make what is missing: an earlier creation may have been stopped half-way."""
        with self._errors():
            self._ensure_collection(self.name, kind, dim=facts["dim"])
            self._ensure_collection(self._about, "FLAT", dim=2)
        if (existing := self._facts()) is not None:
            return existing
        self._write_about("about", facts)
        return facts

    def _ready(self) -> bool:
        """Compared one by one? False also where the server does not say."""
        self._call("load_collection", self.name)
        names = self._call("list_indexes", self.name)
        kinds = [self._call("describe_index", self.name, name) or {} for name in names]
        return any(kind.get("field_name") == "vector" and kind.get("index_type") == "FLAT" for kind in kinds)

    def _write_about(self, key: str, facts: Metadata) -> None:
        row = {"key": row_key(key), "id": key.partition(" ")[0], "vector": [1.0, 0.0], "metadata": facts}
        self._call("upsert", self._about, [row])

    def _ensure_collection(self, name: str, kind: str, *, dim: int) -> None:
        """Create the collection, or check that the one that exists takes such vectors."""
        from pymilvus import DataType

        client = self._client
        params = client.prepare_index_params()
        params.add_index("vector", index_type=kind, metric_type="IP")
        if not client.has_collection(name):
            schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("key", DataType.VARCHAR, max_length=64, is_primary=True)
            schema.add_field("id", DataType.VARCHAR, max_length=_ID_BYTES)
            schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
            schema.add_field("metadata", DataType.JSON)
            client.create_collection(name, schema=schema, index_params=params, consistency_level="Strong")
        fields = {field["name"]: field for field in client.describe_collection(name)["fields"]}
        where, action = f"milvus:{self._place}: the collection {name!r}", f"milvus:{self._place},collection=NAME"
        if not {"key", "id", "vector", "metadata"} <= fields.keys():
            raise DataError(f"{where} is not an index of vacsr — choose another: {action}")
        stored = int(fields["vector"]["params"]["dim"])
        if stored != dim:
            raise ShapeMismatch(f"{where} takes vectors of dimension {stored}, not {dim} — choose another: {action}")
        if not client.list_indexes(name):
            client.create_index(name, params)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except MilvusException as error:
            action = "the server and its address" if self.remote else "that no other program has the file open"
            raise EnvironmentProblem(f"milvus:{self._place}: {error.message} — check {action}") from error


def _as_row(fields: Any) -> Row:
    return Row(str(fields["id"]), as_dict(fields["metadata"]), fields.get("vector", ()))
