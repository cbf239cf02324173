"""`pgvector:postgresql://HOST/DATABASE`: an index in a table of PostgreSQL, with the extension pgvector.

A call that adds or deletes is one transaction: all or none, and no other process changes the table between a check and
the change. Without ``index=HNSW`` a search compares with every vector, so it is exact.

There are two tables: the vectors, with ``metadata`` as jsonb for queries of your own, and NAME_about with the facts.
Vectors travel as bytes, and lie in the rows of their table: moved out of them, as PostgreSQL does with values of two
kilobytes, each would be looked up by itself.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.search.database import LOOKUP, DatabaseIndex, Row, import_extra
from vacsr.search.index import IndexInfo, Metadata

_CREATE = (
    "CREATE EXTENSION IF NOT EXISTS vector",
    "CREATE TABLE {name} (id text PRIMARY KEY, embedding vector({dim}) NOT NULL, metadata jsonb NOT NULL)",
    "ALTER TABLE {name} ALTER COLUMN embedding SET STORAGE MAIN",
    "CREATE TABLE {about} (number int GENERATED ALWAYS AS IDENTITY, key text, value text, UNIQUE (key, value))",
)
_EXISTS = "SELECT 1 FROM pg_tables WHERE tablename = %s AND schemaname = ANY (current_schemas(false))"  # never cached
_HNSW = "CREATE INDEX ON {name} USING hnsw (embedding vector_ip_ops)"
_APPROXIMATE = "SELECT count(*) FROM pg_indexes WHERE tablename = %s AND indexdef ~ 'USING (hnsw|ivfflat)'"
_NOTE = "INSERT INTO {about} (key, value) VALUES (%s, %s) ON CONFLICT DO NOTHING"
_NEW = "CREATE TEMPORARY TABLE {new} ON COMMIT DROP AS SELECT id, embedding, metadata FROM {name} WITH NO DATA"
_COPY = "COPY {new} FROM STDIN (FORMAT BINARY)"
_WRITE = """INSERT INTO {name} (id, embedding, metadata) SELECT * FROM {new}
    ON CONFLICT (id) DO UPDATE SET embedding = excluded.embedding, metadata = excluded.metadata"""
_NEAREST = """SELECT id, metadata, embedding, -(embedding <#> %(query)s::vector)
    FROM {name} ORDER BY embedding <#> %(query)s::vector LIMIT %(k)s"""
_MAX_EF = 1000  # of pgvector's hnsw.ef_search; the iterative scan finds the rest


class PgvectorIndex(DatabaseIndex):
    """See :class:`vacsr.search.VectorIndex`."""

    kind, unit, kinds, needs = "pgvector", "table", ("FLAT", "HNSW"), ("psycopg",)

    @property
    def sources(self) -> tuple[str, ...]:
        rows = self._query("SELECT value FROM {about} WHERE key = 'source' ORDER BY number")
        return tuple(value for (value,) in rows)

    def note_source(self, spec: str) -> None:
        self._query(_NOTE, ["source", spec])

    def __len__(self) -> int:
        return int(self._query("SELECT count(*) FROM {name}")[0][0])

    def records(self) -> Iterator[tuple[str, Metadata]]:
        page, last = "SELECT id, metadata FROM {name} WHERE id > %s ORDER BY id LIMIT %s", ""
        while rows := self._query(page, [last, LOOKUP]):
            yield from rows
            last = rows[-1][0]

    def info(self) -> IndexInfo:
        size = self._query("SELECT pg_total_relation_size(%s::regclass)", [f'"{self.name}"'])[0][0]
        return super().info()._replace(bytes=int(size))

    def _rows(self, ids: list[str], *, vectors: bool) -> list[Row]:
        vector = ", embedding" if vectors else ""
        rows = self._query(f"SELECT id, metadata{vector} FROM {{name}} WHERE id = ANY(%s)", [ids])
        return [Row(row[0], row[1], *map(_floats, row[2:])) for row in rows]

    def _write(self, ids: list[str], vectors: Tensor, metadata: list[str]) -> None:
        from psycopg.types.json import Jsonb

        head = struct.pack(">HH", vectors.shape[1], 0)
        with self._errors(), self._client.transaction(), self._client.cursor() as cursor:
            cursor.execute(self._sql(_NEW))
            with cursor.copy(self._sql(_COPY)) as copy:
                copy.set_types(["text", "bytea", "jsonb"])
                for name, vector, about in zip(ids, vectors.numpy().astype(">f4"), metadata, strict=True):
                    copy.write_row((name, head + vector.tobytes(), Jsonb(about, dumps=str)))
            cursor.execute(self._sql(_WRITE))
            cursor.execute(self._sql("DROP TABLE {new}"))

    def _remove(self, ids: list[str]) -> None:
        self._query("DELETE FROM {name} WHERE id = ANY(%s)", [ids])

    def _nearest(self, queries: Tensor, k: int) -> list[list[Row]]:
        with self._errors(), self._client.transaction():
            if not self.exact:
                self._query("SELECT set_config('hnsw.ef_search', %s, true)", [str(min(max(k, 40), _MAX_EF))])
                self._query("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
            answers = [self._query(_NEAREST, {"query": str(query), "k": k}) for query in queries.tolist()]
        return [[Row(row[0], row[1], _floats(row[2]), row[3]) for row in answer] for answer in answers]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Others may read meanwhile, and not write."""
        with self._errors(), self._client.transaction():
            self._query("LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE")
            yield

    def _connect(self, *, create: bool) -> Any:
        if not self._place.startswith(("postgresql://", "postgres://")):
            raise UsageError(f"pgvector:{self._place} has no server — write pgvector:postgresql://HOST/DATABASE")
        psycopg = import_extra("pgvector", "psycopg")
        with self._errors():
            if "password" in psycopg.conninfo.conninfo_to_dict(self._place):
                message = "a name is printed, so it must not hold a password"
                raise UsageError(f"{message} — leave it out, and set PGPASSWORD or write ~/.pgpass")
            return psycopg.connect(self._place, autocommit=True)

    def _facts(self) -> Metadata | None:
        if not self._query(_EXISTS, [f"{self.name}_about"]):
            return None
        return dict(self._query("SELECT key, value FROM {about} WHERE key <> 'source'"))

    def _create(self, facts: Metadata, kind: str) -> Metadata:
        """All or none. A second process waits, and then finds the tables."""
        with self._errors(), self._client.transaction():
            self._query("SELECT pg_advisory_xact_lock(hashtext(%s))", [self.name])
            if (existing := self._facts()) is not None:
                return existing
            for statement in (*_CREATE, *([_HNSW] if kind == "HNSW" else [])):
                self._query(statement.replace("{dim}", str(facts["dim"])))
            for key, value in facts.items():
                self._query(_NOTE, [key, str(value)])
        return facts

    def _ready(self) -> bool:
        return not self._query(_APPROXIMATE, [self.name])[0][0]

    def _query(self, sql: str, values: Any = None) -> list[Any]:
        with self._errors():
            cursor = self._client.execute(self._sql(sql), values, binary=True)
            return list(cursor.fetchall()) if cursor.description else []

    def _sql(self, text: str) -> Any:
        """With the names of the tables, quoted."""
        from psycopg.sql import SQL, Identifier

        names = {"name": self.name, "about": f"{self.name}_about", "new": f"{self.name}_new"}
        return SQL(text).format(**{key: Identifier(name) for key, name in names.items()})

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """PostgreSQL's errors as ours."""
        import psycopg

        try:
            yield
        except psycopg.DataError as error:
            raise DataError(f"pgvector:{self._place} does not store this ({error}) — use exact:FOLDER") from error
        except psycopg.Error as error:
            message, action = " ".join(str(error).split()), "check the server, the database and your rights"
            raise EnvironmentProblem(f"pgvector:{self._place}: {message} — {action}") from error


def _floats(vector: bytes) -> Any:
    """pgvector's bytes: the length, two bytes of zeros, and big-endian floats."""
    return np.frombuffer(vector, ">f4", offset=4).astype(np.float32)
