"""Inner products of many vectors with a few queries, quick and slightly off, and how far off at most.

A search reads every vector once, so it can be as quick as memory is read, if its steps are large: each one wakes all
threads and waits for the last of them, which takes long on a machine that is busy otherwise. Small steps run on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

_FEW = 4  # queries whose products with float16 are formed one after another; for more it is quicker to convert once
_PARTS = 64  # matrices that a block is cut into: one matrix times one vector runs on one thread only
_ALONE = 1 << 25  # bytes that one thread reads sooner, on a busy machine, than the others are awake
_CONVERT = 1 << 22  # numbers that are converted at a time
_HALF, _SINGLE, _DOUBLE = 2.0**-11, 2.0**-24, 2.0**-53  # a rounded number is off by so much of itself
_HALF_MOST = 2.0**15  # length of a vector that float16 products of a unit query cannot overflow with
_TINY = 2.0**-125  # numbers below it may have been taken for 0


class Arithmetic(NamedTuple):
    """A way to form products."""

    queries: Tensor  # [Q, d] of the dtype that is multiplied in
    scale: NDArray[np.float64]  # [Q], what products are still to be multiplied with
    error: NDArray[np.float64]  # [Q], what a product is off by at most, before that


def arithmetics(queries: Tensor, *, stored: torch.dtype, longest: float) -> Iterator[Arithmetic]:
    """Ways for these queries [Q, d] float32, the quickest first and the surest last.

    ``longest``: length of the longest stored vector. The errors take for granted that sums are formed in float32, or in
    float64, which who uses a way has to check: torch can be told to use less.
    """
    if stored == torch.float16 and len(queries) <= _FEW and longest < _HALF_MOST:
        yield _half(queries, longest)
    yield _wide(queries, longest, dtype=torch.float32)
    yield _wide(queries, longest, dtype=torch.float64)


def products(vectors: Tensor, way: Arithmetic) -> Floats:
    """[b, d] -> [Q, b], still to be scaled"""
    dtype, (count, dim) = way.queries.dtype, way.queries.shape
    out = np.empty((count, len(vectors)), np.float32)
    if dtype == torch.float16:
        for row, query in zip(out, way.queries, strict=True):
            row[:] = torch.mv(vectors, query).numpy()
        return out
    if dtype == vectors.dtype and count == 1 and vectors.nbytes <= _ALONE:
        np.einsum("md,d->m", vectors.numpy(), way.queries[0].numpy(), out=out[0])
        return out
    if dtype == vectors.dtype:
        return np.ascontiguousarray(_product(vectors, way.queries).numpy().T)
    rows = max(_CONVERT // dim, 1)
    room = torch.empty(min(rows, len(vectors)), dim, dtype=dtype)
    for start in range(0, len(vectors), rows):
        some = vectors[start : start + rows]
        out[:, start : start + rows] = _product(room[: len(some)].copy_(some), way.queries).numpy().T
    return out


def _product(vectors: Tensor, queries: Tensor) -> Tensor:
    """With the long side first, which is much quicker for few queries. [b, d], [Q, d] -> [b, Q]"""
    each, dim = len(vectors) // _PARTS, vectors.shape[1]
    out = torch.empty(len(vectors), len(queries), dtype=vectors.dtype)
    most, rest = out[: each * _PARTS], out[each * _PARTS :]
    torch.bmm(
        vectors[: len(most)].view(_PARTS, each, dim),
        queries.T.expand(_PARTS, -1, -1),
        out=most.view(_PARTS, each, len(queries)),
    )
    torch.mm(vectors[len(most) :], queries.T, out=rest)
    return out


def _half(queries: Tensor, longest: float) -> Arithmetic:
    """float16 times float16, added up in float32 and rounded to float16.

    Queries are made unit vectors first: then neither they nor, for the vectors that are let in, the products leave
    float16's range. Off is a product by what rounding the query costs, by the sum's rounding and by the result's.
    """
    given = queries.double().numpy()
    lengths = np.linalg.norm(given, axis=1)
    lengths[lengths == 0] = 1.0
    unit = given / lengths[:, None]
    rounded = unit.astype(np.float16)
    lost = np.linalg.norm(unit - rounded, axis=1)
    dim = queries.shape[1]
    error = longest * (1.01 * lost + 1.01 * _HALF + _sum_error(dim, _SINGLE)) + _HALF**2
    return Arithmetic(torch.from_numpy(rounded), lengths, error + _tiny(lengths, dim, longest) / lengths)


def _wide(queries: Tensor, longest: float, *, dtype: torch.dtype) -> Arithmetic:
    """float32 or float64 throughout; results are float32."""
    lengths, dim = np.linalg.norm(queries.double().numpy(), axis=1), queries.shape[1]
    error = lengths * longest * _sum_error(dim, _SINGLE if dtype == torch.float32 else _DOUBLE)
    rows = torch.empty(queries.shape, dtype=dtype).copy_(queries)  # of usual strides: others make bmm six times slower
    return Arithmetic(rows, np.ones(len(queries)), error + _tiny(lengths, dim, longest))


def _sum_error(dim: int, unit: float) -> float:
    """Of a sum of ``dim`` products in any order and of some more roundings to float32, for vectors of length 1."""
    return 1.01 * (dim * unit + 6 * _SINGLE)


def _tiny(lengths: NDArray[np.float64], dim: int, longest: float) -> NDArray[np.float64]:
    """What is lost where numbers, products or sums are too small for float32. [Q] -> [Q]"""
    return np.asarray(dim * _TINY * (1 + lengths + longest))
