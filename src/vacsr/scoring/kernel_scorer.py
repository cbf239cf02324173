"""Block scorers that have the kernel under them: in its own precision, or as a quick finder of what float32 scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from vacsr.adapter import FoldedAdapter
from vacsr.errors import NotFoldable, UsageError
from vacsr.methods.base import Embedding, Method, take
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.counts import counted
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import DTYPES, NoRoom, PairKernel, available
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_tiles import Tile
from vacsr.scoring.kernel_topk import BothTopK
from vacsr.scoring.rescore import best_of, fine_scores, surely_best
from vacsr.scoring.topk import Direction, TopK, streamed_rows

_SAFE = 1e4  # what neither hidden units nor weights may reach in float16, whose range ends at 65,504
_FEW = 64  # texts up to which a side so short scales the weights also where scores are streamed
_ROUGH = 3  # float8 finds so many times k
_SPARE = 16  # candidates beyond k that are scored again, or k where that is more
_WORTH_FINDING = 1e12  # operations of all pairs from which on the kernel is worth its compilation


class KernelScorer(BlockScorer):
    """`BlockScorer` with the kernel under it: same calls, same scores within the error of the operands' rounding.

    Should the GPU turn out to have no room for any tile of the kernel, it says so and goes on without it.
    """

    def __init__(self, method: Method, *, dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None) -> None:
        if not isinstance(method, Vacsr):
            raise UsageError(f"the kernel scores the vacsr method, not {type(method).__name__} — use BlockScorer")
        exact = method.adapter.fold()
        again = finest_half(exact) if dtype == FP8 else dtype
        super().__init__(method, dtype=again)
        self.own_order = dtype != FP8
        self.kernel = PairKernel(exact, dtype=dtype, tile=tile)

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        """[I, d], [T, d] -> [I, T] float32. v⊙t does not care which side is which: the shorter one scales weights."""
        if len(t.mean) < len(v.mean):
            return self.block(t, v).T
        if self.kernel.tiles:
            try:
                return self.kernel.scores(v.mean, self.kernel.texts(t.mean))
            except NoRoom as error:
                _tell(error)
        return super().block(v, t)

    def stream(self, v: Embedding, t: Embedding) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T], the texts packed once; without images one block [0, T].

        Fewer texts than a tile has would leave most of it empty: they scale the weights instead, for many images at a
        time.
        """
        if len(t.mean) < min(len(v.mean), _FEW):
            rows = streamed_rows(len(v.mean), len(t.mean))
            for start in range(0, len(v.mean), rows):
                yield self.block(take(v, slice(start, start + rows)), t)
            return
        if self.kernel.tiles:
            try:
                yield from self.kernel.blocks(v.mean, self.kernel.texts(t.mean))
                return
            except NoRoom as error:  # the first block's or never: all are of one kind
                _tell(error)
        yield from super().stream(v, t)

    @torch.inference_mode()
    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction) -> TopK:
        """[I, min(k, T)] or [T, min(k, I)]. With float8, whose order is rough, 3·k are found and scored in float16."""
        if self.own_order:
            return super().topk(v, t, k=k, direction=direction)
        queries, items = (v, t) if direction == "i2t" else (t, v)
        return self._again(super().topk(v, t, k=_ROUGH * k, direction=direction), queries, items, k=k)

    @torch.inference_mode()
    def topk_both(self, v: Embedding, t: Embedding, *, k: int, candidates: int | None = None) -> BothTopK:
        """The k best texts of each image and images of each text, in one pass without the matrix. [I, k], [T, k]

        ``candidates``: so many of each are found first and scored again in float16 (bfloat16 for an adapter too large
        for it); by default 3·k with float8, and none with the others.
        """
        k = counted(k, "k", ask="ask for k=10")
        if len(t.mean) < len(v.mean):
            images, texts = self.topk_both(t, v, k=k, candidates=candidates)
            return BothTopK(texts, images)
        wanted = candidates or (None if self.own_order else _ROUGH * k)
        found = super().topk_both(v, t, k=max(k, wanted or k))
        if wanted is None:
            return found
        return BothTopK(self._again(found.texts, v, t, k=k), self._again(found.images, t, v, k=k))

    def _again(self, found: TopK, queries: Embedding, items: Embedding, *, k: int) -> TopK:
        """The k best of the candidates by this scorer's aligned scores. [Q, m] -> [Q, min(k, m)]"""
        return best_of(found.index, fine_scores(found.index, _pairs(self, queries, items)), k=k)


class FinderScorer(BlockScorer):
    """float32 in everything; only which items can be among the best is asked of the kernel first, in half precision.

    Of each query it finds 2·k items, k + 16 at least, and float32 scores and orders these. Where an item that was not
    found could belong to the best, float32 scores the query with all items. That is decided by the kernel's error: none
    is missed unless an item's is over 8 times (`rescore.MARGIN`) the largest among the items that the query was given.
    """

    def __init__(self, method: Vacsr, *, tile: Tile | None = None) -> None:
        super().__init__(method)
        self.finder = KernelScorer(method, dtype=finest_half(method.adapter.fold()), tile=tile)

    @torch.inference_mode()
    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction) -> TopK:
        """[I, min(k, T)] or [T, min(k, I)]"""
        queries, items = (v, t) if direction == "i2t" else (t, v)
        if not self._worth_finding(v, t) or _wanted(k) >= len(items.mean):
            return super().topk(v, t, k=k, direction=direction)
        return self._exact(self.finder.topk(v, t, k=_wanted(k), direction=direction), queries, items, k=k)

    @torch.inference_mode()
    def topk_both(self, v: Embedding, t: Embedding, *, k: int) -> BothTopK:
        """[I, min(k, T)], [T, min(k, I)], found in one pass of the kernel."""
        if not self._worth_finding(v, t) or _wanted(k) >= min(len(v.mean), len(t.mean)):
            return super().topk_both(v, t, k=k)
        found = self.finder.topk_both(v, t, k=_wanted(k))
        return BothTopK(self._exact(found.texts, v, t, k=k), self._exact(found.images, t, v, k=k))

    def _worth_finding(self, v: Embedding, t: Embedding) -> bool:
        return 2.0 * len(v.mean) * len(t.mean) * self.finder.kernel.packed.trunk.numel() >= _WORTH_FINDING

    def _exact(self, found: TopK, queries: Embedding, items: Embedding, *, k: int) -> TopK:
        """What float32 says of the candidates, and of all items where these may not be enough. [Q, m] -> [Q, k]

        v⊙t does not care which side is which: queries may be texts.
        """
        fine = fine_scores(found.index, _pairs(self, queries, items))
        best = best_of(found.index, fine, k=k)
        if found.index.shape[1] == len(items.mean):
            return best
        unsure = (~surely_best(found.score, fine, k=k)).nonzero().flatten()  # the only wait for the GPU
        if len(unsure):
            again = super().topk(take(queries, unsure), items, k=k, direction="i2t")
            best.score[unsure], best.index[unsure] = again
        return best


def _wanted(k: int) -> int:
    """Candidates for the k best."""
    return k + max(k, _SPARE)


def _pairs(scorer: BlockScorer, queries: Embedding, items: Embedding) -> Callable[[Tensor, Tensor], Tensor]:
    """Aligned scores of (query[n], item[n]), by their indices."""
    return lambda query, item: scorer.aligned(take(queries, query), take(items, item))


def _tell(error: NoRoom) -> None:
    """Once: afterwards the kernel has no tiles left."""
    warnings.warn(f"{error}; scoring goes on in plain torch, slower", stacklevel=3)


def finest_half(folded: FoldedAdapter) -> torch.dtype:
    """float16, or bfloat16 for an adapter whose hidden units or small matrix may leave float16's range."""
    hidden = folded.trunk.norm(dim=1) + folded.trunk_bias.abs()  # no unit is larger: the vectors have length 1
    largest = torch.maximum(hidden.amax(), folded.small.abs().amax())
    return torch.float16 if bool(largest < _SAFE) else torch.bfloat16


def kernel_scorer(method: Method, *, dtype: torch.dtype) -> BlockScorer | None:
    """With the kernel, where it runs and fits the method; None elsewhere."""
    if not isinstance(method, Vacsr) or not available(method.adapter.trunk.weight.device):
        return None
    with suppress(NotFoldable):
        if dtype == torch.float32:
            return FinderScorer(method)
        return KernelScorer(method, dtype=dtype) if dtype in DTYPES else None
    return None
