"""Top-k in two stages: the cosine chooses candidates, the method ranks these. Faster, and no longer exact.

How much is lost depends on the model and the data: :func:`recall_of_prefilter` measures it, :func:`choose_prefilter`
finds the smallest number of candidates for a wanted recall. Nothing here holds the score matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, log
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, take
from vacsr.scoring.bounds import mean_level, miss_rate_bound
from vacsr.scoring.counts import counted
from vacsr.scoring.topk import Direction, TopK, stable_topk

if TYPE_CHECKING:
    from vacsr.scoring import PairScores

_QUERIES = 256  # whose cosines with everything are held at a time


class PrefilterRecall(NamedTuple):
    """Of the exact top-k, for each number of candidates."""

    candidates: Tensor  # [M]
    recall: Tensor  # [M] mean share of a query's exact top-k that is among its candidates
    complete: Tensor  # [M] share of the queries that miss nothing


class PrefilterChoice(NamedTuple):
    """A number of candidates, and what a sample of queries says about it."""

    candidates: int
    recall: float
    """Measured on the sample."""
    at_least: float
    """Lower confidence bound of the recall over all such queries."""
    queries: int


def prefiltered_topk(scores: PairScores, k: int, *, candidates: int, direction: Direction) -> TopK:
    """Best k by (−score, index) among the candidates with the highest cosine. [Q, min(k, N)]"""
    items = len(scores.texts.mean if direction == "i2t" else scores.images.mean)
    wanted = min(k, items)
    if candidates < wanted:
        enough = (
            f"use prefilter={10 * wanted}" if 10 * wanted < items else f"leave it out: all {items:,} are scored then"
        )
        raise UsageError(f"prefilter is {candidates}, k is {k}: too few to choose from — {enough}")
    parts = []
    for queries, cosine in _cosine_blocks(scores, direction):
        chosen = stable_topk(cosine, candidates).index.sort(dim=1).values  # in index order: so ties go by index
        top = stable_topk(_candidate_scores(scores, queries, chosen, direction=direction), k)
        parts.append(TopK(top.score, chosen.gather(1, top.index)))
    return TopK(torch.cat([part.score for part in parts]), torch.cat([part.index for part in parts]))


def recall_of_prefilter(
    scores: PairScores, k: int, candidates: Sequence[int], *, direction: Direction = "i2t"
) -> PrefilterRecall:
    """How much of the exact top-k so many candidates hold, measured on all queries. Needs all scores once."""
    _check_some(scores)
    ranks = prefilter_ranks(scores, k, direction=direction)
    found = ranks.unsqueeze(0) < torch.tensor(list(candidates), device=ranks.device).view(-1, 1, 1)
    recall, complete = found.double().mean(dim=(1, 2)), found.all(dim=2).double().mean(dim=1)
    return PrefilterRecall(torch.tensor(list(candidates)), recall.cpu(), complete.cpu())


def choose_prefilter(
    scores: PairScores,
    k: int,
    *,
    recall: float = 0.99,
    confidence: float = 0.95,
    sample: int = 1000,
    seed: int = 0,
    direction: Direction = "i2t",
) -> PrefilterChoice:
    """The fewest candidates whose recall of the exact top-k is at least ``recall``, with this confidence.

    ``sample`` queries, drawn by ``seed``, are ranked exactly. Recall only grows with the candidates, so testing every
    number of them needs no correction: to choose too few, the first number below the right one must pass.
    """
    if not (0 < recall < 1 and 0 < confidence < 1):
        raise UsageError(f"recall={recall}, confidence={confidence}: both lie between 0 and 1 — for all, leave it out")
    sample = counted(sample, "sample", ask="use sample=1000")
    _check_some(scores)
    total = len(scores.images.mean if direction == "i2t" else scores.texts.mean)
    rows = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:sample].sort().values
    ranks = prefilter_ranks(_some_queries(scores, rows, direction), k, direction=direction).cpu()
    queries, found = len(rows), ranks.shape[1]
    level = mean_level(1 - confidence, parts=found)
    allowed = _allowed_misses(queries, recall=recall, level=level)
    worst = ranks.flatten().sort(descending=True).values  # the first of these may be missed
    needed = int(worst[allowed * found]) + 1 if allowed < queries else found
    chosen = max(needed, found)
    missed = int((ranks >= chosen).sum()) / found
    bound = 1 - miss_rate_bound(ceil(missed), queries, level=level)
    return PrefilterChoice(chosen, 1 - missed / queries, bound, queries)


def prefilter_ranks(scores: PairScores, k: int, *, direction: Direction = "i2t") -> Tensor:
    """Place, from 0, of each query's exact top-k in its order by (−cosine, index). [Q, min(k, N)]"""
    exact = scores.topk(k, direction=direction).index
    parts = []
    for queries, cosine in _cosine_blocks(scores, direction):
        items = exact[queries]
        own, place = cosine.gather(1, items), torch.arange(cosine.shape[1], device=cosine.device)
        ranks = torch.empty_like(items)
        for n in range(items.shape[1]):
            value = own[:, n : n + 1]
            before = (cosine > value) | ((cosine == value) & (place < items[:, n : n + 1]))
            ranks[:, n] = before.sum(dim=1)
        parts.append(ranks)
    return torch.cat(parts)


def _check_some(scores: PairScores) -> None:
    """A share of nothing is no number."""
    images, texts = len(scores.images.mean), len(scores.texts.mean)
    if not images or not texts:
        message = f"a recall is a share of what queries should find, here are {images:,} images and {texts:,} texts"
        raise UsageError(f"{message} — score some of both: PairScorer.score_all(images, texts)")


def _allowed_misses(queries: int, *, recall: float, level: float) -> int:
    """The most whole queries that a sample may miss and still show the recall."""
    if miss_rate_bound(0, queries, level=level) > 1 - recall:
        need = ceil(log(level) / log(recall))
        message = f"{queries} queries cannot show a recall of {recall}, even without a miss; {need} can"
        raise UsageError(f"{message} — pass sample={need} or more with as many queries, or ask for less recall")
    allowed = 0
    while miss_rate_bound(allowed + 1, queries, level=level) <= 1 - recall:
        allowed += 1
    return allowed


def _cosine_blocks(scores: PairScores, direction: Direction) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive queries with their cosines to every item [b, N]; without queries one block [0, N]."""
    queries, items = (scores.images, scores.texts) if direction == "i2t" else (scores.texts, scores.images)
    for start in range(0, max(1, len(queries.mean)), _QUERIES):
        here = slice(start, start + _QUERIES)
        yield here, queries.mean[here].float() @ items.mean.float().T


@torch.inference_mode()
def _candidate_scores(scores: PairScores, queries: slice, chosen: Tensor, *, direction: Direction) -> Tensor:
    """Scores of each query with its candidates, a query at a time, or on a GPU as aligned pairs in one go. [b, m]"""
    blocks, first = scores.scorer.blocks, queries.start
    if chosen.device.type == "cuda" and blocks.folded is not None:
        owners = torch.arange(first, first + len(chosen), device=chosen.device)
        rows, cols = owners.repeat_interleave(chosen.shape[1]), chosen.flatten()
        pair = (rows, cols) if direction == "i2t" else (cols, rows)
        return scores.score_of(*pair).view_as(chosen)
    out = torch.empty(chosen.shape, device=chosen.device)
    for row, items in enumerate(chosen):
        owner = slice(first + row, first + row + 1)
        v, t = (owner, items) if direction == "i2t" else (items, owner)
        out[row] = blocks.block(take(scores.images, v), take(scores.texts, t)).flatten()
    return out


def _some_queries(scores: PairScores, rows: Tensor, direction: Direction) -> PairScores:
    """The same items, fewer queries."""
    side: Embedding = scores.images if direction == "i2t" else scores.texts
    some = take(side, rows.to(side.mean.device))
    return replace(scores, images=some) if direction == "i2t" else replace(scores, texts=some)
