"""Top-k over mapped files, block by block: nothing as large as the index is ever in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.scoring.topk import TopK, stable_topk
from vacsr.search.segments import Segment

_QUERIES = 64  # searched together: each block of vectors is read once for all of them
_SCORES = 1 << 20  # of a block that is sorted at a time, over its queries
_SPARE = 16  # rows beyond the first k that are kept, in case that rounding has misplaced some
_EXACT = 8192  # rows that are in float64 at a time
_CONVERT = 1 << 19  # float16 numbers made float32 at a time: the copy stays in a core's cache


class Places(NamedTuple):
    """Where the best rows lie, best first."""

    position: Tensor  # [Q, k] int64, counted over all segments
    score: Tensor  # [Q, k] float32
    vectors: Tensor  # [Q, k, d] float32


@torch.inference_mode()
def best_places(segments: Sequence[Segment], queries: Tensor, k: int) -> Places:
    """The k rows of the highest inner product, by (−score, position). [Q, d] -> [Q, min(k, live rows)]

    Block products round differently from place to place. So all rows are taken that rounding may have kept out of the
    first k, their products are formed anew in float64, and these decide: equal vectors have equal scores wherever they
    lie.
    """
    k = min(k, sum(segment.part.live for segment in segments))
    if not k or not len(queries):
        shape = len(queries), k
        empty = torch.zeros(*shape, queries.shape[1])
        return Places(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), empty)
    parts = []
    for some in torch.split(queries, _QUERIES):
        found = _candidates(segments, some, k)
        parts += [_ranked(segments, query, places, k) for query, places in zip(some, found, strict=True)]
    return Places(*(torch.stack([part[n] for part in parts]) for n in range(3)))


def _candidates(segments: Sequence[Segment], queries: Tensor, k: int) -> list[Tensor]:
    """Positions, ascending, of all rows that may be among the best k of each query. [Q, d] -> Q times [k or more]"""
    best = _best_by_blocks(segments, queries, k + max(_SPARE, k // 8))
    lowest = best.score[:, k - 1] - _rounding(segments, queries)
    found = [index[score >= low] for score, index, low in zip(*best, lowest, strict=True)]
    some = best.score.shape[1] < sum(segment.part.live for segment in segments)
    unsure = [n for n, low in enumerate(lowest) if some and best.score[n, -1] >= low]  # more rows may be as near
    if unsure:
        blocks = _score_blocks(segments, queries[unsure])
        near = torch.cat([_near(scores, lowest[unsure], start=start) for start, scores in blocks])
        for n, query in enumerate(unsure):
            found[query] = near[near[:, 0] == n, 1]
    return [places.sort().values for places in found]


def _near(scores: Tensor, lowest: Tensor, *, start: int) -> Tensor:
    """(query, position) of every score that is high enough. [Q, b], [Q] -> [n, 2]"""
    return (scores >= lowest.unsqueeze(1)).nonzero() + torch.tensor([0, start])


def _rounding(segments: Sequence[Segment], queries: Tensor) -> Tensor:
    """What may lie between two rounded products of one query whose true order is the other way round. [Q]

    A float32 sum of d products is off by d·2⁻²⁴·‖q‖·‖v‖ at most; both may be, and the end result is rounded again.
    """
    longest = max(segment.part.longest for segment in segments)
    lengths: Tensor = torch.linalg.vector_norm(queries, dim=1)
    return lengths * (3 * queries.shape[1] * 2.0**-24 * longest)


def _best_by_blocks(segments: Sequence[Segment], queries: Tensor, k: int) -> TopK:
    """The first rows by block products, dead ones left out. [Q, d] -> [Q, min(k, live rows)]"""
    best: TopK | None = None
    for start, scores in _score_blocks(segments, queries):
        top = stable_topk(scores, k)
        found = TopK(top.score, top.index + start)
        if best is not None:
            joined = TopK(torch.cat((best.score, found.score), dim=1), torch.cat((best.index, found.index), dim=1))
            top = stable_topk(joined.score, k)
            found = TopK(top.score, joined.index.gather(1, top.index))
        best = found
    assert best is not None, "there are rows"
    alive = sum(segment.part.live for segment in segments)  # dead rows come last: their scores are −∞
    return TopK(best.score[:, :alive], best.index[:, :alive])


def _score_blocks(segments: Sequence[Segment], queries: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first position, scores [Q, b]) of consecutive blocks, dead rows −∞."""
    size = max(_SCORES // len(queries), 1)
    first = 0
    for segment in segments:
        for start in range(0, segment.part.rows, size):
            here = slice(start, start + size)
            scores = _products(segment.vectors[here], queries)
            if segment.dead is not None:
                scores.masked_fill_(segment.dead[here], float("-inf"))
            yield first + start, scores
        first += segment.part.rows


def _products(vectors: Tensor, queries: Tensor) -> Tensor:
    """[b, d], [Q, d] -> [Q, b] float32"""
    if vectors.dtype == torch.float32:
        return _product(vectors, queries)
    rows = max(_CONVERT // vectors.shape[1], 1)
    room = torch.empty(min(rows, len(vectors)), vectors.shape[1])
    out = torch.empty(len(queries), len(vectors))
    for start in range(0, len(vectors), rows):
        some = vectors[start : start + rows]
        out[:, start : start + rows] = _product(room[: len(some)].copy_(some), queries)
    return out


def _product(vectors: Tensor, queries: Tensor) -> Tensor:
    """With the long side first, which is much quicker for few queries. [b, d], [Q, d] -> [Q, b]"""
    if len(queries) == 1:
        return torch.mv(vectors, queries[0]).unsqueeze(0)
    return (vectors @ queries.T).T.contiguous()


def _ranked(segments: Sequence[Segment], query: Tensor, places: Tensor, k: int) -> Places:
    """The best k of the rows at ascending places. [d], [m] -> [k]"""
    exact = [(_gathered(segments, some).double() @ query.double()).float() for some in torch.split(places, _EXACT)]
    score, order = torch.cat(exact).sort(descending=True, stable=True)
    first = places[order[:k]]
    return Places(first, score[:k], _gathered(segments, first))


def _gathered(segments: Sequence[Segment], places: Tensor) -> Tensor:
    """[m] -> [m, d] float32"""
    out = torch.empty(len(places), segments[0].vectors.shape[1])
    first = 0
    for segment in segments:
        inside = (places >= first) & (places < first + segment.part.rows)
        if bool(inside.any()):
            out[inside] = segment.vectors[places[inside] - first].float()
        first += segment.part.rows
    return out
