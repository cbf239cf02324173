"""Top-k in two stages: a coarse score chooses candidates among all items, a fine one scores and orders these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, take
from vacsr.scoring.folded import BlockScorer, Engine
from vacsr.scoring.kernel import KernelScorer
from vacsr.scoring.topk import BothTopK, Direction, TopK, best_of, stable_topk

MARGIN = 8.0
"""Allowed coarse error of an item that is no candidate, relative to the largest error of any candidate of the call."""


class Cascade(Engine):
    """The kernel chooses candidates, torch scores and orders them.

    ``exact``: everything is the fine engine's, order included. Each query gets 2·k candidates, at least k + ``spare``.
    An item that is no candidate has a coarse score of at most the candidates' lowest. If the k-th best fine score
    exceeds that by more than ``MARGIN`` times the largest coarse error seen on any candidate of the call, no such item
    belongs to the top-k; otherwise the fine engine scores the query with all items. Calls of fewer than ``worthwhile``
    operations go to the fine engine directly: the kernel would not be worth its compilation.

    Not ``exact``: the score matrix is the coarse engine's, and its best 3·k are reordered by the fine one.
    """

    def __init__(
        self, coarse: KernelScorer, fine: BlockScorer, *, exact: bool, spare: int = 16, worthwhile: float = 1e12
    ) -> None:
        self.coarse, self.fine, self.exact, self.spare, self.worthwhile = coarse, fine, exact, spare, worthwhile
        self.dtype, self.folded = fine.dtype if exact else coarse.dtype, fine.folded

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        return (self.fine if self.exact else self.coarse).stream(v, t)

    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        return self.fine.aligned(v, t)

    @torch.inference_mode()
    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction, matrix: Tensor | None = None) -> TopK:
        queries, items = (v, t) if direction == "i2t" else (t, v)
        if self._direct(v, t, k=k, items=len(items.mean), matrix=matrix):
            return self.fine.topk(v, t, k=k, direction=direction, matrix=matrix)
        candidates = self.coarse.topk(v, t, k=self._candidates(k), direction=direction)
        return self._ranked(candidates, queries, items, k=k)

    @torch.inference_mode()
    def topk_both(self, v: Embedding, t: Embedding, *, k: int, matrix: Tensor | None = None) -> BothTopK:
        if self._direct(v, t, k=k, items=min(len(v.mean), len(t.mean)), matrix=matrix):
            return self.fine.topk_both(v, t, k=k, matrix=matrix)
        texts, images = self.coarse.topk_both(v, t, k=self._candidates(k))
        return BothTopK(self._ranked(texts, v, t, k=k), self._ranked(images, t, v, k=k))

    def _candidates(self, k: int) -> int:
        return k + max(k, self.spare) if self.exact else 3 * k

    def _direct(self, v: Embedding, t: Embedding, *, k: int, items: int, matrix: Tensor | None) -> bool:
        """Does the fine engine rank alone?"""
        if not self.exact:
            return False
        operations = 2.0 * len(v.mean) * len(t.mean) * self.coarse.packed.trunk.numel()
        return matrix is not None or operations < self.worthwhile or self._candidates(k) >= items

    def _ranked(self, candidates: TopK, queries: Embedding, items: Embedding, *, k: int) -> TopK:
        """[Q, m] -> [Q, min(k, m)]. v⊙t is symmetric, so queries may be texts."""
        fine = candidate_scores(self.fine, queries, items, candidates.index)
        best = best_of(fine, candidates.index, k=k)
        if not self.exact:
            return best
        unsure = (~surely_best(candidates.score, fine, k=k)).nonzero().flatten()  # the only wait for the GPU
        if len(unsure):
            again = self.fine.topk(take(queries, unsure), items, k=k, direction="i2t")
            best.score[unsure], best.index[unsure] = again
        return best


def candidate_scores(
    engine: Engine, queries: Embedding, items: Embedding, index: Tensor, *, chunk: int = 1 << 15
) -> Tensor:
    """Scores of each query with its candidates, ``chunk`` aligned pairs at a time. [Q, d], [N, d], [Q, m] -> [Q, m]"""
    query = torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
    pairs = zip(torch.split(query, chunk), torch.split(index.flatten(), chunk), strict=True)
    parts = [engine.aligned(take(queries, rows), take(items, columns)) for rows, columns in pairs]
    return torch.cat(parts).view_as(index)


def surely_best(coarse: Tensor, fine: Tensor, *, k: int) -> Tensor:
    """Which queries have their k best items among their candidates, by the rule of :class:`Cascade`. -> [Q] bool

    Scores of the candidates [Q, m], [Q, m], k ≤ m. A query with a score that is not finite is never sure.
    """
    if not len(coarse):
        return torch.empty(0, dtype=torch.bool, device=coarse.device)
    error = (coarse - fine).abs()
    finite = error.isfinite().all(dim=1)
    allowed = MARGIN * torch.where(finite.unsqueeze(1), error, 0.0).amax()
    return finite & (fine.topk(k, dim=1).values[:, -1] > coarse.amin(dim=1) + allowed)


@torch.inference_mode()
def prefiltered_topk(
    engine: Engine, v: Embedding, t: Embedding, *, k: int, candidates: int, direction: Direction, batch: int = 256
) -> TopK:
    """The best k by (−score, index) among the items with the highest cosine. [Q, min(k, N)]

    ``batch``: queries whose cosines with all items are held at a time.
    """
    queries, items = (v, t) if direction == "i2t" else (t, v)
    total = len(items.mean)
    wanted = min(k, total)
    if candidates < wanted:
        enough = f"use prefilter={10 * wanted}" if 10 * wanted < total else f"omit it to score all {total:,} items"
        raise UsageError(f"prefilter={candidates} is less than k={k} — {enough}")
    scores, indices = [], []
    for start in range(0, max(1, len(queries.mean)), batch):
        part = take(queries, slice(start, start + batch))
        index = stable_topk(part.mean.float() @ items.mean.float().T, candidates).index
        top = best_of(_prefiltered_scores(engine, part, items, index, direction=direction), index, k=k)
        scores.append(top.score)
        indices.append(top.index)
    return TopK(torch.cat(scores), torch.cat(indices))


def _prefiltered_scores(
    engine: Engine, queries: Embedding, items: Embedding, index: Tensor, *, direction: Direction
) -> Tensor:
    """As aligned pairs on a GPU; elsewhere one product per query, which is faster there. -> [b, m]"""
    if index.device.type == "cuda" and engine.folded is not None:  # v⊙t is symmetric
        return candidate_scores(engine, queries, items, index)
    out = torch.empty(index.shape, device=index.device)
    for row, chosen in enumerate(index):
        query, some = take(queries, slice(row, row + 1)), take(items, chosen)
        v, t = (query, some) if direction == "i2t" else (some, query)
        out[row] = engine.block(v, t).flatten()
    return out
