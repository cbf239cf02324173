"""The pair matrix of a batch, whole or in blocks of rows, and what is known about its pairs.

Losses over a :class:`PairBlock` are normalised by the counts of the *whole* batch, so the terms of disjoint row blocks
add up to the terms of the batch. This lets ranks share a batch, and lets a large matrix be walked in strips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vacsr.noise import PairNoise


@dataclass(frozen=True)
class PairBlock:
    """Rows ``noise.rows`` of the batch's pair matrix."""

    relevance: Tensor  # [R, C] bool: is this pair labelled a match?
    batch: int  # rows of the whole batch, the B of the losses
    positives: Tensor  # 0-d, labelled matches in the whole batch
    noise: PairNoise
    captions: Tensor | None = None  # [C] the captions' rows in the training set
    epoch: Tensor | None = None  # 0-d, from 0, for losses that change during training; else None
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
        """The same pairs with only (i, i) called a match, a strict reading of binary labels."""
        diagonal = same_image(self.noise.rows, self.noise.cols)
        return replace(self, relevance=diagonal, positives=torch.full_like(self.positives, self.batch))


def same_image(row_ids: Tensor, col_ids: Tensor) -> Tensor:
    """Every caption of the same image is a match, never just the diagonal. [..., R], [..., C] -> [..., R, C] bool

    >>> same_image(torch.tensor([7, 8]), torch.tensor([8, 7, 7]))
    tensor([[False,  True,  True],
            [ True, False, False]])
    """
    return row_ids.unsqueeze(-1) == col_ids.unsqueeze(-2)


def cosines(v: Tensor, t: Tensor) -> Tensor:
    """Every pair's cosine of unit vectors, in float32 also under autocast: a large scale would show the rounding.

    [..., R, d], [..., C, d] -> [..., R, C]
    """
    with torch.autocast(v.device.type, enabled=False):
        return v.float() @ t.float().mT


def batch_block(
    image_ids: Tensor, *, seed: int | Tensor, step: int | Tensor, rows: slice = slice(None),
    captions: Tensor | None = None, epoch: Tensor | None = None,
) -> PairBlock:  # fmt: skip
    """The block of one training batch: caption j belongs to image ``image_ids[j]``, row i is caption i's image."""
    positions = torch.arange(len(image_ids), device=image_ids.device)
    whole = same_image(image_ids, image_ids)
    noise = PairNoise.create(seed=seed, step=step, rows=positions[rows], cols=positions, device=image_ids.device)
    return PairBlock(whole[rows], len(image_ids), whole.sum(), noise, captions, epoch)
