"""Top-k in two stages: a coarse score chooses candidates among all items, a fine one scores and orders these.

:func:`choose_engine` decides whether scores come from torch, from the kernel, or from both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method, take
from vacsr.scoring.folded import FP8, BlockScorer, Engine, half_dtype
from vacsr.scoring.kernel import KernelScorer, available, fits
from vacsr.scoring.topk import DIRECTIONS, Direction, TopK, best_of

Precision = torch.dtype | Literal["auto"]
"""Of the large products: ``torch.float32``, ``torch.bfloat16``, on a GPU also float16 and float8, or ``"auto"``."""
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16, FP8)}
MARGIN = 8.0
"""Allowed coarse error of an item that is no candidate, relative to the largest error of any candidate of the call."""


def choose_engine(method: Method, *, device: torch.device, dtype: Precision = torch.float32) -> Engine:
    """The fastest engine for a method, a device and a dtype; folds the adapter once.

    In float32 everything is float32: on a GPU the kernel only chooses candidates for the top-k, and only where the
    result is the same. In half precision the kernel computes the scores; in float8 their top-k is rescored in half.
    ``auto`` is half precision on a GPU, float32 on a CPU and for methods without a folded form.
    """
    folded, gpu = method.fold(), device.type == "cuda"
    if dtype == "auto":
        dtype = half_dtype(folded) if gpu and folded is not None else torch.float32
    if dtype not in (known := DTYPES.get(device.type, DTYPES["cpu"])):
        raise UsageError(f"no scoring in {dtype} on {device.type} — use 'auto' or one of {', '.join(map(str, known))}")
    if dtype == FP8:
        kernel = KernelScorer(method, dtype=dtype, folded=folded)  # raises where it cannot run: there is no other way
        return Cascade(kernel, kernel.plain, exact=False)
    plain = BlockScorer(method, dtype=dtype, folded=folded)
    if not gpu or folded is None or not fits(folded) or not available(folded.parts[0].trunk.device):
        return plain
    if dtype == torch.float32:
        return Cascade(KernelScorer(method, dtype=half_dtype(folded), folded=folded), plain, exact=True)
    return KernelScorer(method, dtype=dtype, folded=folded)


class Cascade(Engine):
    """The kernel chooses candidates, torch scores and orders them.

    ``exact``: everything is the fine engine's, order included. Each query gets 2·k candidates, at least k + ``spare``.
    An item that is no candidate has a coarse score of at most the candidates' lowest. If the k-th best fine score
    exceeds that by more than ``MARGIN`` times the largest coarse error seen on any candidate of the call, no such item
    belongs to the top-k; otherwise the fine engine scores the query with all items. Calls of fewer than ``worthwhile``
    operations go to the fine engine directly: the kernel would not be worth its compilation.

    Not ``exact``: the score matrix is the coarse engine's, and the candidates are reordered by the fine one.
    """

    def __init__(
        self, coarse: KernelScorer, fine: BlockScorer, *, exact: bool, spare: int = 16, worthwhile: float = 1e12
    ) -> None:
        self.coarse, self.fine, self.exact, self.spare, self.worthwhile = coarse, fine, exact, spare, worthwhile
        self.dtype = fine.dtype if exact else coarse.dtype

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        return (self.fine if self.exact else self.coarse).stream(v, t)

    def aligned(self, v: Embedding, t: Embedding) -> Tensor:
        return self.fine.aligned(v, t)

    def lists(self, queries: Embedding, items: Embedding, *, direction: Direction) -> Tensor:
        return self.fine.lists(queries, items, direction=direction)

    @torch.inference_mode()
    def topk(self, v: Embedding, t: Embedding, *, k: int, directions: Sequence[Direction] = DIRECTIONS) -> list[TopK]:
        sides = [(v, t) if direction == "i2t" else (t, v) for direction in directions]
        count = k + max(k, self.spare)
        operations = 2.0 * len(v.mean) * len(t.mean) * sum(part.trunk.numel() for part in self.coarse.parts)
        if self.exact and (operations < self.worthwhile or count >= min(len(items.mean) for _, items in sides)):
            return self.fine.topk(v, t, k=k, directions=directions)
        tops = self.coarse.topk(v, t, k=count, directions=directions)
        return [
            self._ranked(top, *side, k=k, direction=direction)
            for top, side, direction in zip(tops, sides, directions, strict=True)
        ]

    def _ranked(self, candidates: TopK, queries: Embedding, items: Embedding, *, k: int, direction: Direction) -> TopK:
        """[Q, m] -> [Q, min(k, m)]"""
        fine = candidate_scores(self.fine, queries, items, candidates.index, direction=direction)
        best = best_of(fine, candidates.index, k=k)
        if not self.exact:
            return best
        unsure = (~surely_best(candidates.score, fine, k=k)).nonzero().flatten()  # the only wait for the GPU
        if len(unsure):
            (again,) = self.fine.topk(take(queries, unsure), items, k=k, directions=["i2t"])  # v⊙t is symmetric
            best.score[unsure], best.index[unsure] = again
        return best


def candidate_scores(
    engine: Engine,
    queries: Embedding,
    items: Embedding,
    index: Tensor,
    *,
    direction: Direction,
    chunk: int | None = None,
) -> Tensor:
    """Scores of each query with its candidates, about ``chunk`` pairs at a time. [Q, d], [N, d], [Q, m] -> [Q, m]

    By default 32,768 pairs on a GPU, 800 on a CPU, whose cache then holds them.
    """
    chunk = chunk or (1 << 15 if index.device.type == "cuda" else 800)
    rows = torch.split(torch.arange(len(index), device=index.device), max(1, chunk // max(1, index.shape[1])))
    scored = partial(engine.lists, direction=direction)
    return torch.cat([scored(take(queries, row), items.map(partial(_picked, index=index[row]))) for row in rows])


def _picked(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], which takes several times as long on a CPU. [N, d], [Q, m] -> [Q, m, d]"""
    return rows.index_select(0, index.flatten()).view(*index.shape, rows.shape[1])


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
