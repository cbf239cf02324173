"""`milvus:FILE_OR_URI`: an index in Milvus, embedded in a local file or on a server or cluster, by the same calls.

Milvus ranks equal scores as it likes. A search sees what was added before it (strong consistency). Rows go by a hash
of their id: the client writes keys into its questions as they are, so a quote in an id would become a part of one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vacsr.errors import DataError
from vacsr.search.index import AddResult, Entry, Hits, IndexInfo, Metadata, held_kind
from vacsr.search.milvus_client import connect, milvus_errors, parse_milvus
from vacsr.search.milvus_collections import as_dict, check_text, ensure_collection, is_flat, metadata_of
from vacsr.search.rows import checked_ids, checked_metadata, checked_queries, checked_vectors

_MESSAGE = 1 << 24  # bytes of vectors in one message; a server takes 64 MiB
_LOOKUP = 4096  # ids in one question
_SOURCES = 16384  # that are listed; Milvus gives no more


class MilvusIndex:
    """See :class:`vacsr.search.VectorIndex`. ``dim``: make it where it is absent."""

    def __init__(self, where: str, *, dim: int | None = None, provenance: str | None = None) -> None:
        self.name = parse_milvus(where)
        self._about = f"{self.name.collection}_about"
        self._client = connect(self.name, create=dim is not None)
        try:
            with self._problems():
                facts = self._facts() or self._create(dim, provenance or "")
                self._client.load_collection(self.name.collection)
                self._exact = is_flat(self._client, self.name.collection)
            self._dim, self._provenance = int(facts["dim"]), str(facts["provenance"])
        except Exception:
            self.close()
            raise

    @property
    def dim(self) -> int:
        """Of a vector."""
        return self._dim

    @property
    def provenance(self) -> str:
        """What the vectors are."""
        return self._provenance

    @property
    def holds(self) -> str:
        """Images, texts, or unknown."""
        return held_kind(self.provenance)

    @property
    def exact(self) -> bool:
        """Is it of the kind FLAT? The others may miss some; what AUTOINDEX is, the server decides."""
        return self._exact

    @property
    def sources(self) -> tuple[str, ...]:
        """The SPECs that it was filled from."""
        with self._problems():
            rows = self._client.query(self._about, filter="", output_fields=["metadata"], limit=_SOURCES)
        noted = [as_dict(row["metadata"]) for row in rows]
        return tuple(
            str(fact["source"]) for fact in sorted(noted, key=lambda fact: fact.get("since", 0)) if "source" in fact
        )

    def note_source(self, spec: str) -> None:
        """Remember a SPEC, once: in a row of its own, so that several who fill at once lose none."""
        if spec in self.sources:
            return
        facts = {"source": spec, "since": time.time_ns()}
        row = {"key": _key(f"source {spec}"), "id": "source", "vector": [0.0, 1.0], "metadata": facts}
        with self._problems():
            self._client.upsert(self._about, [row])

    def __len__(self) -> int:
        with self._problems():
            found = self._client.query(self.name.collection, filter="", output_fields=["count(*)"])
        return int(found[0]["count(*)"])

    def known(self, ids: Sequence[str]) -> list[bool]:
        """Which of these ids are there. [N]"""
        found = self._known(list(dict.fromkeys(ids)))
        return [name in found for name in ids]

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """Vector and metadata of those that are there."""
        rows = self._stored(list(dict.fromkeys(ids)), ["id", "vector", "metadata"])
        return {str(row["id"]): Entry(torch.tensor(row["vector"]), as_dict(row["metadata"])) for row in rows}

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Of those that are there."""
        rows = self._stored(list(dict.fromkeys(ids)), ["id", "metadata"])
        return {str(row["id"]): as_dict(row["metadata"]) for row in rows}

    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of everything."""
        with self._problems():
            pages = self._client.query_iterator(
                self.name.collection, batch_size=_LOOKUP, output_fields=["id", "metadata"]
            )
            while rows := pages.next():
                yield from ((str(row["id"]), as_dict(row["metadata"])) for row in rows)
            pages.close()

    def add(self, ids: Sequence[str], vectors: Tensor, metadata: Sequence[Metadata] | None = None) -> AddResult:
        """Add vectors [N, d], or replace those whose ids are there. Stored when it returns; not all or none."""
        names = checked_ids(ids)
        rows = checked_vectors(vectors, names, dim=self.dim, dtype=torch.float32)
        facts = checked_metadata(metadata, names)
        for pair in zip(names, facts, strict=True):
            check_text(*pair)
        there = self._known(names)
        most = max(_MESSAGE // (4 * self.dim), 1)
        for start in range(0, len(names), most):
            here = slice(start, start + most)
            records = [
                {"key": _key(name), "id": name, "vector": row.numpy(), "metadata": fact}
                for name, row, fact in zip(names[here], rows[here], facts[here], strict=True)
            ]
            with self._problems():
                self._client.upsert(self.name.collection, records)
        return AddResult(len(names) - len(there), len(there))

    def delete(self, ids: Sequence[str]) -> int:
        """Remove those that are there; how many that were."""
        there = sorted(self._known(list(dict.fromkeys(ids))))
        for start in range(0, len(there), _LOOKUP):
            with self._problems():
                self._client.delete(self.name.collection, ids=list(map(_key, there[start : start + _LOOKUP])))
        return len(there)

    def search(self, queries: Tensor, k: int) -> Hits:
        """The k vectors of the highest inner product with each query; exact for FLAT. [Q, d]"""
        rows = checked_queries(queries, k, dim=self.dim)
        found: list[Any] = []
        for some in torch.split(rows, max(_MESSAGE // (4 * self.dim * k), 1)):
            with self._problems():
                found += self._client.search(
                    self.name.collection,
                    data=list(some.numpy()),
                    limit=k,
                    anns_field="vector",
                    search_params={"metric_type": "IP"},
                    output_fields=["id", "vector", "metadata"],
                )
        return self._hits(found)

    def _hits(self, found: Sequence[Sequence[Any]]) -> Hits:
        """[Q][k] answers as tensors."""
        shortest = min(map(len, found), default=0)  # an approximate index may find fewer for some
        answers = [list(row)[:shortest] for row in found]
        scores = torch.tensor([[hit["distance"] for hit in row] for row in answers], dtype=torch.float32)
        vectors = torch.tensor([[hit["entity"]["vector"] for hit in row] for row in answers], dtype=torch.float32)
        return Hits(
            [[str(hit["entity"]["id"]) for hit in row] for row in answers],
            scores.view(len(answers), shortest),
            vectors.view(len(answers), shortest, self.dim),
            [metadata_of(row) for row in answers],
        )

    def settle(self) -> None:
        """Nothing to do: Milvus merges by itself."""

    def info(self) -> IndexInfo:
        """Its size and what it holds."""
        where = f"{self.name.uri},collection={self.name.collection}"
        size = None if self.name.remote else _size(Path(self.name.uri).expanduser())
        return IndexInfo(
            kind="milvus", where=where, vectors=len(self), dim=self.dim, dtype="float32",
            provenance=self.provenance, dead=0, parts=1, bytes=size,
            holds=self.holds, exact=self.exact, sources=self.sources,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection, or the file."""
        self._client.close()

    def _known(self, ids: Sequence[str]) -> set[str]:
        """Those that are there."""
        keys = {_key(name): name for name in ids}
        return {keys[row["key"]] for row in self._stored(ids, ["key"])}

    def _stored(self, ids: Sequence[str], fields: list[str]) -> Iterator[Any]:
        """Rows of those that are there."""
        for start in range(0, len(ids), _LOOKUP):
            some = list(map(_key, ids[start : start + _LOOKUP]))
            with self._problems():
                rows = self._client.get(self.name.collection, ids=some, output_fields=fields)
            yield from rows

    def _facts(self) -> Metadata | None:
        """The row that says what the vectors are. It is written last, so it alone says that there is an index."""
        if not self._client.has_collection(self._about):
            return None
        self._client.load_collection(self._about)
        found = self._client.get(self._about, ids=[_key("about")], output_fields=["metadata"])
        return as_dict(found[0]["metadata"]) if found else None

    def _create(self, dim: int | None, provenance: str) -> Metadata:
        """Two collections: the vectors, and one row that says what they are, which not all of Milvus' kinds keep.

        Several may do so at once, and one may have been stopped half-way: what is there stays, the rest is made.
        """
        if dim is None:
            message = f"no index in milvus:{self.name.uri}, collection {self.name.collection!r}"
            raise DataError(f"{message} — fill one: vacsr index add milvus:{self.name.uri} --run RUN --pairs SPEC")
        ensure_collection(self._client, self.name, dim=dim)
        ensure_collection(self._client, self.name._replace(collection=self._about, kind="FLAT"), dim=2)
        facts = self._facts()  # another may have been quicker
        if facts is None:
            facts = {"dim": dim, "provenance": provenance}
            row = {"key": _key("about"), "id": "about", "vector": [1.0, 0.0], "metadata": facts}
            self._client.upsert(self._about, [row])
        return self._facts() or facts

    @contextmanager
    def _problems(self) -> Iterator[None]:
        with milvus_errors(self.name):
            yield


def _key(name: str) -> str:
    """Of a row: 160 bits in hexadecimal."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _size(path: Path) -> int:
    """Of a file, or of a folder's files."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
