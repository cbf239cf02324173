"""`qdrant:FOLDER_OR_URL`: an index in Qdrant, in the client's local mode or on a server, by the same calls.

A server stores each message of a call as a whole, not all of the call, and locks nothing between a check and a change.
Local mode is for tests and small data: it keeps all vectors in memory and compares with each. It stores a point at a
time and lets one process open the folder. Its files are pickled, so open only folders that you trust.

Points are keyed by a hash of their id. The facts about an index are the metadata of its collection.
"""

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem
from vacsr.search.database import LOOKUP, DatabaseIndex, Row, import_extra, row_key
from vacsr.search.index import Metadata

_TOKEN = "QDRANT_API_KEY"
_FACT = "vacsr"  # of a collection that is an index


class QdrantIndex(DatabaseIndex):
    """See :class:`vacsr.search.VectorIndex`. ``exact``: always in local mode, on a server with ``index=FLAT``."""

    kind, needs = "qdrant", ("qdrant_client",)
    kinds = ("FLAT", "HNSW")

    @property
    def sources(self) -> tuple[str, ...]:
        facts = self._metadata().items()
        noted = [fact for key, fact in facts if key.startswith("source ") and isinstance(fact, dict)]
        return tuple(str(fact["source"]) for fact in sorted(noted, key=lambda fact: fact["since"]))

    def note_source(self, spec: str) -> None:
        """Remember a SPEC, once: under a key of its own, so that several who fill at once lose none."""
        if spec not in self.sources:
            fact = {"source": spec, "since": time.time_ns()}
            self._call("update_collection", self.name, metadata={f"source {row_key(spec)}": fact})

    def __len__(self) -> int:
        return int(self._call("count", self.name, exact=True).count)

    def records(self) -> Iterator[tuple[str, Metadata]]:
        offset = None
        while True:
            points, offset = self._call("scroll", self.name, limit=LOOKUP, offset=offset, with_payload=True)
            yield from (_as_row(point)[:2] for point in points)
            if offset is None:
                return

    def _rows(self, ids: list[str], *, vectors: bool) -> list[Row]:
        keys = [_point_id(name) for name in ids]
        return [_as_row(point) for point in self._call("retrieve", self.name, keys, with_vectors=vectors)]

    def _write(self, ids: list[str], vectors: Tensor, metadata: list[str]) -> None:
        from qdrant_client.models import Batch

        payloads = [{"id": name, "metadata": json.loads(text)} for name, text in zip(ids, metadata, strict=True)]
        batch = Batch(ids=[_point_id(name) for name in ids], vectors=vectors.tolist(), payloads=payloads)
        self._call("upsert", self.name, batch, wait=True)

    def _remove(self, ids: list[str]) -> None:
        self._call("delete", self.name, [_point_id(name) for name in ids], wait=True)

    def _nearest(self, queries: Tensor, k: int) -> list[list[Row]]:
        from qdrant_client.models import QueryRequest, SearchParams

        params = SearchParams(exact=self.exact) if self.remote else None
        requests = [
            QueryRequest(query=query, limit=k, with_payload=True, with_vector=True, params=params)
            for query in queries.tolist()
        ]
        answers = self._call("query_batch_points", self.name, requests)
        return [[_as_row(hit) for hit in answer.points] for answer in answers]

    def _connect(self, *, create: bool) -> Any:
        client = import_extra("qdrant", "qdrant_client").QdrantClient
        if not self.remote and not create and not (self._path / "meta.json").exists():
            raise self._missing()
        with self._errors():
            if self.remote:
                return client(url=self._place, api_key=os.environ.get(_TOKEN), timeout=60)
            try:
                return client(path=str(self._path), force_disable_check_same_thread=True)
            except (OSError, RuntimeError, sqlite3.Error):
                raise
            except Exception as error:  # of JSON, of pickle, or of vectors that do not fit
                raise DataError(f"qdrant:{self._place} is damaged ({error!r:.200}) — fill it again") from error

    def _facts(self) -> Metadata | None:
        if not self._call("collection_exists", self.name):
            return None
        facts = self._metadata().get(_FACT)
        if facts is None:
            message = f"qdrant:{self._place}: the collection {self.name!r} is not an index of vacsr"
            raise DataError(f"{message} — choose another: qdrant:{self._place},collection=NAME")
        return dict(facts)

    def _create(self, facts: Metadata, kind: str) -> Metadata:
        from qdrant_client.models import Distance, HnswConfigDiff, VectorParams

        facts = {**facts, "index": kind}
        self._call(
            "create_collection", self.name, metadata={_FACT: facts},
            vectors_config=VectorParams(size=facts["dim"], distance=Distance.DOT),
            hnsw_config=HnswConfigDiff(m=0) if kind == "FLAT" else None,  # 0: no graph is built
        )  # fmt: skip
        return facts

    def _ready(self) -> bool:
        return not self.remote or self._metadata()[_FACT]["index"] == "FLAT"

    def _metadata(self) -> Metadata:
        return dict(self._call("get_collection", self.name).config.metadata or {})

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Qdrant's errors as ours. Local mode raises those of Python."""
        from qdrant_client.http.exceptions import ApiException

        try:
            yield
        except (ApiException, RuntimeError, OSError, sqlite3.Error) as error:
            action = "the server and its address" if self.remote else "that no other program has the folder open"
            raise EnvironmentProblem(f"qdrant:{self._place}: {error} — check {action}") from error


def _as_row(point: Any) -> Row:
    try:
        item = str(point.payload["id"]), dict(point.payload["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"point {point.id} is no item of vacsr ({error!r}) — delete it, or fill another index"
        ) from error
    return Row(*item, point.vector or (), getattr(point, "score", 0.0))


def _point_id(name: str) -> str:
    """Qdrant's ids are numbers or UUIDs."""
    return str(uuid.UUID(row_key(name)[:32]))
