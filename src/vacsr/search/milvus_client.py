"""A connection to Milvus by a name: a local file, or a server's address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError

TOKEN = "MILVUS_TOKEN"
"""The environment variable with a server's token, or `user:password`. Not a part of the name: names are printed."""


class MilvusName(NamedTuple):
    """``FILE_OR_URI[,collection=NAME][,index=KIND]``"""

    uri: str
    collection: str = "vacsr"
    kind: str = "FLAT"
    """Of a new collection: FLAT is exact; AUTOINDEX, HNSW or IVF_FLAT for sizes at which that is too slow."""

    @property
    def remote(self) -> bool:
        """On a server."""
        return "://" in self.uri


def parse_milvus(where: str) -> MilvusName:
    """
    >>> parse_milvus("photos.db,collection=cats")
    MilvusName(uri='photos.db', collection='cats', kind='FLAT')
    """
    uri, *options = where.split(",")
    given = dict(option.partition("=")[::2] for option in options)
    if not uri or not set(given) <= {"collection", "index"} or not all(given.values()):
        raise UsageError(f"milvus:{where} cannot be read — write milvus:FILE_OR_URI[,collection=NAME][,index=KIND]")
    known = MilvusName(uri)
    return known._replace(collection=given.get("collection", known.collection), kind=given.get("index", known.kind))


def connect(name: MilvusName, *, create: bool) -> Any:
    """A client. A local file that is not there is made only when asked for."""
    try:
        from pymilvus import MilvusClient

        if not name.remote:
            import milvus_lite  # noqa: F401
    except ImportError as error:
        raise MissingExtra(error.name or "pymilvus", "milvus") from error
    if name.remote:
        with milvus_errors(name):
            return MilvusClient(uri=name.uri, token=os.environ.get(TOKEN, ""))
    path = Path(name.uri).expanduser()
    if path.suffix != ".db":
        raise UsageError(f"milvus:{name.uri} is neither a server's address nor a file.db — write milvus:FILE.db")
    if not create and not path.exists():
        message = f"no index at {path}"
        raise DataError(f"{message} — fill one: vacsr index add milvus:{name.uri} --run RUN --pairs SPEC")
    with milvus_errors(name):
        return MilvusClient(str(path))


@contextmanager
def milvus_errors(name: MilvusName) -> Iterator[None]:
    """What Milvus says, as an error of ours."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        where = "the server and its address" if name.remote else "that no other program has the file open"
        raise EnvironmentProblem(f"milvus:{name.uri}: {error.message} — check {where}") from error
