"""Candidates of an index, scored again by the method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.index import Hits


class Rescored(NamedTuple):
    """Q queries with w candidates each, in their new order."""

    place: Tensor  # [Q, w] where each was in the index's order
    score: Tensor  # [Q, w]
    cosine: Tensor  # [Q, w]
    sigma: Tensor | None  # [Q, depth]


def rescore(
    scorer: PairScorer, queries: Embedding, hits: Hits, *, direction: Direction, candidates: int, depth: int
) -> Rescored:
    """Order the first ``candidates`` of each query by (−score, cosine's order); any more follow, ordered likewise.

    The uncertainty is of the first ``depth``. All pairs of all queries are scored in one pass.
    """
    count, width = hits.scores.shape
    held = Embedding(hits.vectors.reshape(count * width, -1).to(scorer.device))
    cells = torch.arange(count * width).view(count, width)
    query = torch.arange(count)[:, None].expand(count, width)
    images, texts = (held, queries) if direction == "t2i" else (queries, held)
    rows, cols = (cells, query) if direction == "t2i" else (query, cells)
    score = scorer.score_of(images, texts, rows=rows.flatten(), cols=cols.flatten()).cpu().view(count, width)
    parts = [part.argsort(dim=1, descending=True, stable=True) for part in torch.split(score, candidates, dim=1)]
    place = torch.cat([part + number * candidates for number, part in enumerate(parts)], dim=1)
    first = place[:, :depth]
    with torch.inference_mode():
        sigma = scorer.uncertainty_of(
            images, texts, rows=rows.gather(1, first).flatten(), cols=cols.gather(1, first).flatten()
        )
    return Rescored(
        place, score.gather(1, place), hits.scores.cpu().gather(1, place),
        None if sigma is None else sigma.cpu().view(first.shape),
    )  # fmt: skip
