"""The rows of a mapped matrix with the highest inner products, block by block: the matrix never is in memory at once.

Block products are fast and slightly rounded. Every row whose product comes close to the k-th is a candidate; candidates
are scored again in float64, and these scores decide. So equal vectors have equal scores, and ties go by row.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_QUERIES = 64  # searched together: each block of vectors is read once for all of them
_SCORES = 1 << 20  # of a block, over its queries
_ROWS = 1 << 18  # of a block at most: fewer blocks wake the threads less often
_HALF_QUERIES = 4  # float16 products run query by query; for more queries it is faster to convert the vectors once
_HALF_NORM = 2.0**15  # float16 products of longer vectors with a unit query could overflow
_PARTS = 64  # matrices that a block is cut into: torch multiplies one matrix with one vector on one thread only
_CONVERT = 1 << 22  # numbers converted from float16 at a time
_RESCORE = 1024  # rows in float64 at a time


@torch.inference_mode()
def nearest_rows(
    vectors: Tensor,
    queries: Tensor,
    k: int,
    *,
    deleted: NDArray[np.bool_],
    max_norm: float,
    block_scores: int = _SCORES,
) -> tuple[Rows, Floats]:
    """The k rows of the highest inner product that are not deleted, by (−score, row). [N, d], [Q, d] -> [Q, k] each

    k is cut to the rows that are left. ``max_norm``: of the vectors. Raises FloatingPointError if some are not finite.
    """
    k = min(k, len(vectors) - int(deleted.sum()))
    rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    if k:
        for start in range(0, len(queries), _QUERIES):
            some = queries[start : start + _QUERIES].double()
            near = _candidates(vectors, some, k, deleted=deleted, max_norm=max_norm, block_scores=block_scores)
            for n, query in enumerate(some.numpy()):
                rows[start + n], scores[start + n] = best_rows(vectors, query, near[n], k)
    return rows, scores


def _candidates(
    vectors: Tensor, queries: Tensor, k: int, *, deleted: NDArray[np.bool_], max_norm: float, block_scores: int
) -> list[Rows]:
    """Rows that may be among the best k of each query, in order. Queries become unit vectors: so nothing overflows.

    A product is off by at most half of ``slack``. [N, d], [Q, d] float64 -> [Q] of [m]
    """
    dim, half = vectors.shape[1], vectors.dtype == torch.float16 and len(queries) <= _HALF_QUERIES
    half = half and max_norm < _HALF_NORM
    exact = torch.nn.functional.normalize(queries, dim=1, eps=1e-300)
    unit = torch.empty(exact.shape, dtype=torch.float16 if half else torch.float32).copy_(exact)
    lost = float((exact - unit).norm(dim=1).max())
    slack = 2.02 * (max_norm * (lost + (dim + 8) * 2.0**-24) + (max_norm * 2.0**-11 + 2.0**-24 if half else 2.0**-100))
    rows = [np.empty(0, np.int64) for _ in queries]
    scores = [np.empty(0, np.float32) for _ in queries]
    floor = [float(np.finfo(np.float32).min)] * len(queries)  # above the −inf of deleted rows
    size = max(1, min(_ROWS, block_scores // len(queries)))
    for start in range(0, len(vectors), size):
        block = _products(vectors[start : start + size], unit)
        if not np.isfinite(block.sum(dtype=np.float64)):
            raise FloatingPointError(f"a vector of rows {start} to {start + block.shape[1] - 1} is not finite")
        block[:, deleted[start : start + size]] = -np.inf
        for n, products in enumerate(block):
            near = np.flatnonzero(products >= floor[n])
            if not len(near):
                continue
            rows[n], scores[n] = np.append(rows[n], near + start), np.append(scores[n], products[near])
            if len(rows[n]) > k:
                floor[n] = float(np.partition(scores[n], -k)[-k]) - slack
                keep = scores[n] >= floor[n]
                rows[n], scores[n] = rows[n][keep], scores[n][keep]
    return rows


def best_rows(vectors: Tensor, query: NDArray[np.float64], rows: Rows, k: int) -> tuple[Rows, Floats]:
    """The first k by (−score, row), with scores from float64. [N, d], [d], [m] -> [k] each"""
    stored = vectors.numpy()
    parts = (rows[start : start + _RESCORE] for start in range(0, len(rows), _RESCORE))
    # einsum adds up every row in the same order, which BLAS does not
    scores = np.concatenate([np.einsum("md,d->m", stored[part].astype(np.float64), query) for part in parts])
    scores = scores.astype(np.float32)
    order = np.argsort(-scores, kind="stable")[:k]
    return rows[order], scores[order]


def _products(vectors: Tensor, queries: Tensor) -> Floats:
    """[b, d], [Q, d] -> [Q, b]"""
    if vectors.dtype == queries.dtype == torch.float32:
        return np.ascontiguousarray(_multiply(vectors, queries).numpy().T)
    out = np.empty((len(queries), len(vectors)), np.float32)
    if queries.dtype == torch.float16:
        for row, query in zip(out, queries, strict=True):
            row[:] = torch.mv(vectors, query).numpy()  # converted by numpy: torch would wake its threads for it
        return out
    step = max(_CONVERT // vectors.shape[1], 1)
    for start in range(0, len(vectors), step):
        out[:, start : start + step] = _multiply(vectors[start : start + step].float(), queries).numpy().T
    return out


def _multiply(vectors: Tensor, queries: Tensor) -> Tensor:
    """Long side first, which is much faster for few queries, and in parts, so that all threads work. -> [b, Q]"""
    each, dim = len(vectors) // _PARTS, vectors.shape[1]
    out = torch.empty(len(vectors), len(queries))
    whole = each * _PARTS
    torch.bmm(
        vectors[:whole].view(_PARTS, each, dim),
        queries.T.expand(_PARTS, -1, -1),
        out=out[:whole].view(_PARTS, each, len(queries)),
    )
    torch.mm(vectors[whole:], queries.T, out=out[whole:])
    return out
