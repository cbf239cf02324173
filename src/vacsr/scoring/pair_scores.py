"""All pairs of some images and texts, as a matrix that is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding
from vacsr.scoring.cascade import prefiltered_topk
from vacsr.scoring.counts import counted
from vacsr.scoring.kernel_topk import BothTopK, topk_both
from vacsr.scoring.topk import Direction, TopK, stable_topk

if TYPE_CHECKING:
    from vacsr.scoring import PairScorer

_ROWS = 64  # images a block of a matrix that is there


@dataclass(frozen=True)
class PairScores:
    """All pairs, computed when asked for: ``blocks``, ``topk`` and ``topk_both`` never hold the matrix."""

    scorer: PairScorer
    images: Embedding
    texts: Embedding

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the score matrix; without images one block [0, T]."""
        if "score" in vars(self):  # someone has asked for the whole matrix: do not compute it twice
            yield from torch.split(self.score, _ROWS)
        else:
            yield from self.scorer.blocks.stream(self.images, self.texts)

    @cached_property
    def score(self) -> Tensor:
        """The whole matrix. [I, T]"""
        return torch.cat(list(self.blocks()))

    def topk(self, k: int, *, direction: Direction = "i2t", prefilter: int | None = None) -> TopK:
        """Best texts of each image, or best images of each text, by (−score, index), streamed.

        Exact in float32, unless ``prefilter`` says how many items of the highest cosine are scored for each query: see
        :func:`choose_prefilter`. Where a kernel finds candidates on a GPU, that rests on its error for the other items
        being at most 8 times the largest on a query's candidates; a query that is closer is scored in float32 with all
        items. A scorer in a rougher arithmetic orders by that, in float8 the best of 3·k scored again in float16.
        [I, min(k, T)] or [T, min(k, I)]
        """
        k = counted(k, "k", ask="ask for topk(10)")
        if direction not in ("i2t", "t2i"):
            raise UsageError(f"no direction {direction!r} — use i2t (texts of an image) or t2i (images of a text)")
        if prefilter is not None:
            prefilter = counted(prefilter, "prefilter", ask=f"use prefilter={10 * k} or more, or leave it out")
            if prefilter < len(self.texts.mean if direction == "i2t" else self.images.mean):
                return prefiltered_topk(self, k, candidates=prefilter, direction=direction)
        if self._has_order:
            return stable_topk(self.score if direction == "i2t" else self.score.T, k)
        return self.scorer.blocks.topk(self.images, self.texts, k=k, direction=direction)

    def topk_both(self, k: int) -> BothTopK:
        """Best texts of each image and best images of each text, in one pass over all pairs; else as ``topk``.

        ``.texts``: [I, min(k, T)], ``.images``: [T, min(k, I)].
        """
        k = counted(k, "k", ask="ask for topk_both(10)")
        if self._has_order:
            return topk_both(self.blocks(), k)
        return self.scorer.blocks.topk_both(self.images, self.texts, k=k)

    @property
    def _has_order(self) -> bool:
        """Is the matrix there, and what the scorer ranks by?"""
        return "score" in vars(self) and self.scorer.blocks.own_order

    @torch.inference_mode()
    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the pairs (rows[n], cols[n]) only. [N], [N] -> [N]"""
        return self.scorer.uncertainty_of(self.images, self.texts, rows=rows, cols=cols)

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Of the pairs (rows[n], cols[n]) only, without the matrix. [N], [N] -> [N]"""
        return self.scorer.score_of(self.images, self.texts, rows=rows, cols=cols)

    @torch.inference_mode()
    def grade(self, score: Tensor) -> Tensor:
        """Scores as the method's grade in (0, 1). [...] -> [...]"""
        return self.scorer.model.method.grade(score)
