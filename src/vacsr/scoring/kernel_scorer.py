"""Block scorers that have the kernel under them: in its own precision, or as a quick finder of what float32 scores."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from vacsr.adapter import FoldedAdapter
from vacsr.errors import NotFoldable, UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import DTYPES, NoRoom, PairKernel, available
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_tiles import Tile
from vacsr.scoring.kernel_topk import BothTopK, rescored, topk_both
from vacsr.scoring.topk import Direction, TopK

_SAFE_NORM = 1e4  # of the trunk's rows: with unit vectors no hidden unit then leaves float16's range
_FEW = 64  # texts up to which a side so short scales the weights also where scores are streamed
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

        Fewer texts than a tile has would leave most of it empty: they scale the weights instead, all images at once.
        """
        if len(t.mean) < min(len(v.mean), _FEW):
            yield self.block(v, t)
            return
        if self.kernel.tiles:
            try:
                yield from self.kernel.blocks(v.mean, self.kernel.texts(t.mean))
                return
            except NoRoom as error:  # the first block's or never: all are of one kind
                _tell(error)
        yield from super().stream(v, t)

    @torch.inference_mode()
    def topk_both(self, v: Embedding, t: Embedding, *, k: int, candidates: int | None = None) -> BothTopK:
        """The k best texts of each image and images of each text, in one pass without the matrix. [I, k], [T, k]

        ``candidates``: so many of each are found first and scored again in float16 (bfloat16 for a trunk too large for
        it); by default 3·k with float8, whose own order is too rough, and none with the others.
        """
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — ask for k=10")
        if len(t.mean) < len(v.mean):
            images, texts = self.topk_both(t, v, k=k, candidates=candidates)
            return BothTopK(texts, images)
        wanted = candidates or (3 * k if self.kernel.dtype == FP8 else None)
        found = topk_both(self.stream(v, t), max(k, wanted or k))
        if wanted is None:
            return found

        def aligned(image: Tensor, text: Tensor) -> Tensor:
            return self.aligned(Embedding(v.mean[image]), Embedding(t.mean[text]))

        return BothTopK(
            rescored(found.texts, k, score=aligned),
            rescored(found.images, k, score=lambda text, image: aligned(image, text)),
        )


class FinderScorer(BlockScorer):
    """float32 in everything; only which items can be among the best is asked of the kernel first, in half precision.

    Of each query it finds 2·k items, k + 16 at least, and float32 scores and orders these. What is missed would have to
    lie k or 16 places off by the rounding of the kernel's operands.
    """

    def __init__(self, method: Vacsr, *, tile: Tile | None = None) -> None:
        super().__init__(method)
        self.finder = KernelScorer(method, dtype=finest_half(method.adapter.fold()), tile=tile)

    @torch.inference_mode()
    def topk(self, v: Embedding, t: Embedding, *, k: int, direction: Direction) -> TopK:
        """[I, min(k, T)] or [T, min(k, I)]"""
        wanted, items = k + max(k, _SPARE), len(t.mean if direction == "i2t" else v.mean)
        work = 2.0 * len(v.mean) * len(t.mean) * self.finder.kernel.packed.trunk.numel()
        if work < _WORTH_FINDING or wanted >= items:
            return super().topk(v, t, k=k, direction=direction)

        def exact(query: Tensor, item: Tensor) -> Tensor:
            image, text = (query, item) if direction == "i2t" else (item, query)
            return self.aligned(Embedding(v.mean[image]), Embedding(t.mean[text]))

        return rescored(self.finder.topk(v, t, k=wanted, direction=direction), k, score=exact)


def _tell(error: NoRoom) -> None:
    """Once: afterwards the kernel has no tiles left."""
    warnings.warn(f"{error}; scoring goes on in plain torch, slower", stacklevel=3)


def finest_half(folded: FoldedAdapter) -> torch.dtype:
    """float16, or bfloat16 for a trunk whose hidden units may leave float16's range."""
    return torch.float16 if bool(folded.trunk.norm(dim=1).amax() < _SAFE_NORM) else torch.bfloat16


def kernel_scorer(method: Method, *, dtype: torch.dtype) -> BlockScorer | None:
    """With the kernel, where it runs and fits the method; None elsewhere."""
    if not isinstance(method, Vacsr) or not available(method.adapter.trunk.weight.device):
        return None
    with suppress(NotFoldable):
        if dtype == torch.float32:
            return FinderScorer(method)
        return KernelScorer(method, dtype=dtype) if dtype in DTYPES else None
    return None
