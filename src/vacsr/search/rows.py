"""What may go into an index: ids that come once, vectors of finite length, metadata that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.search.index import Metadata

_LONGEST = 1e18  # so that the inner product of two vectors stays within float32
_MOST = 16384  # Milvus gives no more, and two backends should not differ


def checked_ids(ids: Sequence[str]) -> list[str]:
    """None empty, none twice."""
    if isinstance(ids, str):
        raise UsageError(f"ids are one str, {ids!r}, expected a list — pass [{ids!r}]")
    found: set[str] = set()
    for row, name in enumerate(ids):
        if not isinstance(name, str) or not name:
            raise DataError(f"id {row} is {name!r}, expected words — name every vector")
        if name in found:
            raise DataError(f"id {name!r} comes twice in one call — give every vector an id of its own")
        found.add(name)
    return list(ids)


def checked_vectors(vectors: Tensor, ids: Sequence[str], *, dim: int, dtype: torch.dtype) -> Tensor:
    """As they are stored. [N, d] -> [N, d] of ``dtype`` in the main memory"""
    _check_shape(vectors, dim=dim, kind="vectors")
    if len(vectors) != len(ids):
        raise ShapeMismatch(f"{len(vectors):,} vectors and {len(ids):,} ids — give one id per vector")
    rows = vectors.detach().to("cpu", torch.float32)
    kept = rows.to(dtype)
    bad = ~(_lengths(kept.float()) <= _LONGEST)  # so written that NaN is bad
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        what = f"values too large for {dtype}" if bool(rows[row].isfinite().all()) else "NaN or infinity"
        raise DataError(f"the vector of {ids[row]!r} holds {what} — check what embedded it")
    return kept


def checked_queries(queries: Tensor, k: int, *, dim: int) -> Tensor:
    """[Q, d] -> [Q, d] float32 in the main memory"""
    if not 1 <= k <= _MOST:
        raise UsageError(f"k is {k}, expected 1 to {_MOST} — ask for 10")
    _check_shape(queries, dim=dim, kind="queries")
    rows = queries.detach().to("cpu", torch.float32)
    bad = ~(_lengths(rows) <= _LONGEST)
    if bool(bad.any()):
        raise DataError(f"query {int(bad.nonzero()[0])} holds NaN, infinity or huge values — check what embedded it")
    return rows


def checked_metadata(metadata: Sequence[Metadata] | None, ids: Sequence[str]) -> list[Metadata]:
    """One dict per id, empty where none is given."""
    if metadata is None:
        return [{} for _ in ids]
    if len(metadata) != len(ids):
        raise ShapeMismatch(f"{len(metadata):,} metadata and {len(ids):,} ids — give one per vector, or none")
    return list(metadata)


def as_json(name: str, metadata: Metadata) -> str:
    """The id and its metadata as JSON, plain ASCII: it may hold halves of surrogate pairs, which UTF-8 may not."""
    if not isinstance(metadata, dict):
        raise DataError(f"the metadata of {name!r} are a {type(metadata).__name__}, expected a dict — pass {{…}}")
    try:
        return json.dumps([name, metadata], allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise DataError(f"the metadata of {name!r} are not JSON ({error}) — use words, numbers and lists") from error


def _check_shape(rows: Tensor, *, dim: int, kind: str) -> None:
    if rows.ndim != 2 or rows.shape[1] != dim:
        message = f"{kind} are {list(rows.shape)}, the index holds vectors of dimension {dim}"
        raise ShapeMismatch(f"{message} — give [N, {dim}], from the model that it was filled with")
    if not rows.is_floating_point():
        raise DataError(f"{kind} are {rows.dtype}, expected floating point — convert them with .float()")


def _lengths(rows: Tensor) -> Tensor:
    """[N, d] -> [N]"""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths
