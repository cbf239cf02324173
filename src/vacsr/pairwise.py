"""The pair matrix of a batch, whole, in row blocks or in tiles, and what is known about its pairs.

Losses over a :class:`PairBlock` are normalised by the *whole* batch's counts, so that the terms of disjoint row blocks
add up to the terms of the batch. That is what lets each rank own its rows, and a matrix be walked in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vacsr.draws import PairNoise


@dataclass(frozen=True)
class PairBlock:
    """Rows ``noise.rows`` of the batch's pair matrix."""

    relevance: Tensor  # [R, C] bool: is this pair labelled a match?
    batch: int  # rows of the whole batch, the B of the losses
    positives: Tensor  # 0-d, labelled matches in the whole batch
    noise: PairNoise
    captions: Tensor | None = None  # [C] each column's caption as a row of the training set, for what is known of it
    epoch: Tensor | None = None  # 0-d, counted from 0, for losses that change on the way; None outside of training
    targets: Tensor | None = None  # [R, C] soft labels in [0, 1], where the step has mixed images; else None

    @property
    def pairs(self) -> int:
        """Pairs of the whole batch."""
        return self.batch * self.relevance.shape[1]

    def rows(self, rows: slice) -> Self:
        """A block of this block's rows; the counts stay those of the whole batch."""
        targets = None if self.targets is None else self.targets[rows]
        noise = self.noise.block(rows, slice(None))
        return replace(self, relevance=self.relevance[rows], noise=noise, targets=targets)

    def diagonal(self) -> Self:
        """The same pairs with only (i, i) called a match, as a strict reading of binary labels has it."""
        own = same_image(self.noise.rows, self.noise.cols)
        return replace(self, relevance=own, positives=torch.full_like(self.positives, self.batch))

    def tile(self, rows: slice, cols: slice, *, matches: Tensor) -> PairTile:
        """Some rows and columns of this block, which has all columns; ``matches`` [R]: labelled matches of its rows."""
        return PairTile(
            relevance=self.relevance[rows, cols].contiguous(),
            batch=self.batch,
            positives=self.positives,
            noise=self.noise.block(rows, cols),
            captions=None if self.captions is None else self.captions[cols],
            epoch=self.epoch,
            targets=None if self.targets is None else self.targets[rows, cols].contiguous(),
            columns=self.relevance.shape[1],
            matches=matches[rows],
        )


@dataclass(frozen=True, kw_only=True)
class PairTile(PairBlock):
    """A block that lacks columns, with what a loss must know of those it lacks."""

    columns: int  # of the whole batch
    matches: Tensor  # [R] labelled matches in all of each row

    @property
    def pairs(self) -> int:
        """Pairs of the whole batch."""
        return self.batch * self.columns

    def rows(self, rows: slice) -> Self:
        """A block of this tile's rows."""
        return replace(super().rows(rows), matches=self.matches[rows])

    def diagonal(self) -> Self:
        """The same pairs with only (i, i) called a match."""
        return replace(super().diagonal(), matches=torch.ones_like(self.matches))


@dataclass(frozen=True)
class AlignedNoise:
    """The draws of single pairs, the same numbers that a block has at their places."""

    noise: PairNoise

    @classmethod
    def of(cls, noise: PairNoise, rows: Tensor, cols: Tensor) -> AlignedNoise:
        """Pairs (rows[n], cols[n]) of a block. [N], [N]"""
        # A [1, N] list of places makes keys [1, 1, N] where an [N] one would make those of all N² pairs.
        return cls(replace(noise, rows=noise.rows[rows].unsqueeze(0), cols=noise.cols[cols].unsqueeze(0)))

    def normal_keys(self) -> Tensor:
        """Where each pair's stream of :meth:`normal` begins. [N] int64"""
        return self.noise.normal_keys()[0, 0]

    def gumbel(self, lanes: int) -> Tensor:
        """Standard Gumbel draws. [N, lanes]"""
        return self.noise.gumbel(lanes)[0, 0]

    def normal(self, lanes: int) -> Tensor:
        """Standard normal draws. [N, lanes]"""
        return self.noise.normal(lanes)[0, 0]


def same_image(row_ids: Tensor, col_ids: Tensor) -> Tensor:
    """Every caption of the same image is a match, never just the diagonal. [R], [C] -> [R, C] bool

    >>> same_image(torch.tensor([7, 8]), torch.tensor([8, 7, 7]))
    tensor([[False,  True,  True],
            [ True, False, False]])
    """
    return row_ids.unsqueeze(1) == col_ids.unsqueeze(0)


def cosines(v: Tensor, t: Tensor) -> Tensor:
    """Every pair's cosine of unit vectors, in float32 also under autocast: a large scale would show the rounding.

    [R, d], [C, d] -> [R, C]
    """
    with torch.autocast(v.device.type, enabled=False):
        return v.float() @ t.float().T


def batch_block(
    image_ids: Tensor,
    *,
    seed: int | Tensor,
    step: int | Tensor,
    rows: slice = slice(None),
    captions: Tensor | None = None,
    epoch: Tensor | None = None,
) -> PairBlock:
    """The block of one training batch: caption j belongs to image ``image_ids[j]``, row i is caption i's image."""
    places = torch.arange(len(image_ids), device=image_ids.device)
    whole = same_image(image_ids, image_ids)
    noise = PairNoise.create(seed=seed, step=step, rows=places[rows], cols=places, device=image_ids.device)
    return PairBlock(whole[rows], len(image_ids), whole.sum(), noise, captions, epoch)
