"""Top-k over mapped files, block by block: nothing as large as the index is ever in memory at once.

Products are torch's, on all threads. What is left is little, and numpy does it on one: to wake the others takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.search.products import Arithmetic, Floats, arithmetics, products
from vacsr.search.segments import Segment

Rows = NDArray[np.int64]
Doubles = NDArray[np.float64]

_QUERIES = 64  # searched together: each block of vectors is read once for all of them
_SCORES = 1 << 20  # of a block, over its queries
_EXACT = 1024  # rows that are in float64 at a time
_NOTHING = np.finfo(np.float32).min  # above the −∞ of dead rows


class Places(NamedTuple):
    """Where the best rows lie, best first."""

    position: Tensor  # [Q, k] int64, counted over all segments
    score: Tensor  # [Q, k] float32
    vectors: Tensor  # [Q, k, d] float32


class Near(NamedTuple):
    """Rows that may be among the best of some queries: by position for each query."""

    query: Rows  # [n]
    position: Rows  # [n]
    score: Floats  # [n], as a block product gave it

    def kept(self, mask: NDArray[np.bool_]) -> Near:
        """Some of them. [n]"""
        return Near(self.query[mask], self.position[mask], self.score[mask])

    def joined(self, other: Near) -> Near:
        """These, then the others."""
        query, position = np.concatenate((self.query, other.query)), np.concatenate((self.position, other.position))
        return Near(query, position, np.concatenate((self.score, other.score)))


@torch.inference_mode()
def best_places(segments: Sequence[Segment], queries: Tensor, k: int) -> Places:
    """The k rows of the highest inner product, by (−score, position). [Q, d] -> [Q, min(k, live rows)]

    Block products are rounded, and differently from place to place. So all rows are taken that rounding may have kept
    out of the first k, their products are formed anew in float64, and these decide: equal vectors have equal scores
    wherever they lie.
    """
    k = min(k, sum(segment.part.live for segment in segments))
    if not k or not len(queries):
        shape = len(queries), k
        empty = torch.zeros(*shape, queries.shape[1])
        return Places(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), empty)
    found = [one for some in torch.split(queries, _QUERIES) for one in _best(segments, some, k)]
    vectors = np.empty((len(found), k, queries.shape[1]), np.float32)
    for one, rows in zip(found, vectors, strict=True):
        _gather(segments, one.position, out=rows)
    position, score = np.stack([one.position for one in found]), np.stack([one.score for one in found])
    return Places(torch.from_numpy(position), torch.from_numpy(score), torch.from_numpy(vectors))


def _best(segments: Sequence[Segment], queries: Tensor, k: int) -> list[_Ranked]:
    """The best k of each query, by the quickest arithmetic that proves as exact as it should be."""
    longest = max(segment.part.longest for segment in segments)
    for way in arithmetics(queries, stored=segments[0].vectors.dtype, longest=longest):
        near = _candidates(segments, way, k)
        room = np.empty((min(len(near.query), _EXACT), queries.shape[1]))
        found = [
            _ranked(segments, query, near.kept(near.query == n), k, room=room)
            for n, query in enumerate(queries.double().numpy())
        ]
        if all(one.off <= limit for one, limit in zip(found, way.error * way.scale, strict=True)):
            break
    return found


def _candidates(segments: Sequence[Segment], way: Arithmetic, k: int) -> Near:
    """All rows that may be among the best k.

    At least k rows truly reach the k-th block product less its error; a row that truly reaches that has a block product
    of at least that less the error again. The bound rises from block to block, and what falls below it is dropped.
    """
    count = len(way.queries)
    best, lowest = np.empty((count, 0), np.float32), np.full(count, _NOTHING)
    near = Near(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    for start, scores in _score_blocks(segments, way):
        first = best.shape[1] < k
        if first:
            best = _highest(best, scores, k)
            lowest = _lowest(best, way, k)
        query, column = np.nonzero(scores >= lowest[:, None])
        found = Near(query, column + start, scores[query, column])
        if not first and len(query):
            best = _highest(best, _padded(found, count), k)
            lowest = _lowest(best, way, k)
        near = near.joined(found)
        near = near.kept(near.score >= lowest[near.query])
    return near._replace(score=near.score * way.scale[near.query].astype(np.float32))


def _lowest(best: Floats, way: Arithmetic, k: int) -> Floats:
    """What a score must reach. [Q, ≤ k] -> [Q]"""
    if best.shape[1] < k:
        return np.full(len(best), _NOTHING)
    return np.asarray(np.maximum(best.min(axis=1) - (2 * way.error).astype(np.float32), _NOTHING))


def _highest(best: Floats, more: Floats, k: int) -> Floats:
    """The k highest of two lists of scores, in any order. [Q, a], [Q, b] -> [Q, min(k, a + b)]"""
    both = np.concatenate((best, more), axis=1)
    return both if both.shape[1] <= k else np.partition(both, -k, axis=1)[:, -k:]


def _padded(found: Near, count: int) -> Floats:
    """Scores as rows of one length, filled up with −∞. -> [Q, longest]"""
    each = np.bincount(found.query, minlength=count)
    place = np.arange(len(found.query)) - (each.cumsum() - each)[found.query]
    rows = np.full((count, each.max()), -np.inf, np.float32)
    rows[found.query, place] = found.score
    return rows


def _score_blocks(segments: Sequence[Segment], way: Arithmetic) -> Iterator[tuple[int, Floats]]:
    """(first position, scores [Q, b]) of consecutive blocks, dead rows −∞."""
    size = max(_SCORES // len(way.queries), 1)
    first = 0
    for segment in segments:
        for start in range(0, segment.part.rows, size):
            here = slice(start, start + size)
            scores = products(segment.vectors[here], way)
            if segment.dead is not None:
                np.copyto(scores, -np.inf, where=segment.dead[here].numpy())
            yield first + start, scores
        first += segment.part.rows


class _Ranked(NamedTuple):
    position: Rows  # [k]
    score: Floats  # [k]
    off: float  # what a block product was off by, at most


def _ranked(segments: Sequence[Segment], query: Doubles, near: Near, k: int, *, room: Doubles) -> _Ranked:
    """The best k of some rows, by their true products. ``room``: for rows in float64. [d], [m, d] -> [k]"""
    exact = np.empty(len(near.position))
    for start in range(0, len(exact), len(room)):
        here = slice(start, start + len(room))
        rows = room[: len(exact[here])]
        _gather(segments, near.position[here], out=rows)
        np.einsum("md,d->m", rows, query, out=exact[here])
    score = exact.astype(np.float32)
    order = np.argsort(-score, kind="stable")[:k]
    return _Ranked(near.position[order], score[order], float(np.abs(exact - near.score).max()))


def _gather(segments: Sequence[Segment], places: Rows, *, out: Floats | Doubles) -> None:
    """Rows of the index, as numbers of ``out``'s kind. [m] -> [m, d]"""
    first = 0
    for segment in segments:
        inside = np.flatnonzero((places >= first) & (places < first + segment.part.rows))
        if len(inside):
            out[inside] = segment.vectors.numpy()[places[inside] - first]
        first += segment.part.rows
