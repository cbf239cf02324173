"""How well each caption agrees with an image *and the image's other captions*: the measure that an audit ranks by.

An image's prototype is its own vector plus those of its captions, each weighted by the grade that the model gives it
(:func:`weights`), so that a caption which does not fit pulls little. A wrong caption disagrees with the prototype of
the rest; an unlabelled caption that agrees with it is likely a match that nobody noted. docs/results-audit.md compares
it with other signals; the model's uncertainty was not among the good ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.scoring.topk import stable_topk

RIVAL_SHARE = 0.5
"""Weight of the best other image's agreement in the suspicion: a caption that fits elsewhere is suspected sooner.
Chosen on seed 0 of Flickr8k with 20% noise, where it adds 0.33 points of precision at n; with seeds 1 and 2 it adds
0.25 and 0.45."""
_ELEMENTS = 1 << 25  # cosines alive at a time: 128 MB, whatever the data set's size


class Neighbours(NamedTuple):
    """Of each caption its best other image, of each image its best captions without a label; by agreement."""

    image: Tensor  # [M] row of the best image that is not the caption's own; −1 with one image only
    image_agreement: Tensor  # [M], −inf where there is none
    caption: Tensor  # [N, k] rows of captions, best first
    caption_agreement: Tensor  # [N, k], −inf where there are fewer


def weights(grade: Tensor) -> Tensor:
    """Grades as shares of the median grade, 1 at most: methods differ in how high they grade a match. [M] -> [M]

    >>> weights(torch.tensor([0.01, 0.1, 0.2]))
    tensor([0.1000, 1.0000, 1.0000])
    """
    return (grade / grade.median().clamp_min(1e-12)).clamp(max=1.0)


def caption_sums(texts: Tensor, owner: Tensor, weight: Tensor, *, images: int) -> Tensor:
    """Σ over an image's captions of weight · vector. [M, d], [M], [M] -> [N, d]"""
    return texts.new_zeros(images, texts.shape[1]).index_add_(0, owner, weight.unsqueeze(1) * texts)


def prototypes(images: Tensor, sums: Tensor) -> Tensor:
    """Unit vectors of image plus captions. [N, d], [N, d] -> [N, d]"""
    return functional.normalize(images + sums, dim=1)


def own_agreement(images: Tensor, texts: Tensor, owner: Tensor, *, weight: Tensor, sums: Tensor) -> Tensor:
    """Cosine of each caption with its image's prototype *without this caption*. -> [M]

    An image's only caption is compared with the image alone.
    """
    found = torch.empty(len(texts), device=texts.device)
    step = max(1, _ELEMENTS // texts.shape[1])
    for start in range(0, len(texts), step):
        here = slice(start, start + step)
        t, row = texts[here], owner[here]
        rest = prototypes(images[row], sums[row] - weight[here].unsqueeze(1) * t)
        found[here] = (rest * t).sum(dim=1)
    return found


def suspicion(own: Tensor, rival: Tensor) -> Tensor:
    """Of a labelled pair: how much better the caption would fit elsewhere. Larger is worse. [M], [M] -> [M]

    >>> suspicion(torch.tensor([0.8, 0.1]), torch.tensor([0.4, float("-inf")]))
    tensor([-0.6000, -0.1000])
    """
    return RIVAL_SHARE * torch.where(rival.isfinite(), rival, 0.0) - own


def find_neighbours(
    prototype: Tensor,
    texts: Tensor,
    owner: Tensor,
    *,
    captions: int,
    progress: Callable[[int, int], None] | None = None,
) -> Neighbours:
    """One walk over all pairs in blocks of images; labelled pairs are left out. [N, d], [M, d], [M]

    Keeps the best image of each caption and ``captions`` captions of each image. Equal ones go by row.
    """
    best = torch.full((len(texts),), float("-inf"), device=texts.device)
    at = torch.full((len(texts),), -1, dtype=torch.int64, device=texts.device)
    kept = []
    for start, block in _blocks(prototype, texts, owner):
        top, row = block.max(dim=0)
        better = top > best
        best, at = torch.where(better, top, best), torch.where(better, row + start, at)
        kept.append(stable_topk(block, captions))
        if progress is not None:
            progress(start + len(block), len(prototype))
    return Neighbours(at, best, torch.cat([top.index for top in kept]), torch.cat([top.score for top in kept]))


def _blocks(prototype: Tensor, texts: Tensor, owner: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cosines of some images with every caption, −inf where labelled. -> first row, [b, M]"""
    order = owner.argsort(stable=True)
    first = torch.searchsorted(owner[order], torch.arange(len(prototype) + 1, device=owner.device))
    step = max(1, _ELEMENTS // max(1, len(texts)))
    for start in range(0, len(prototype), step):
        block = prototype[start : start + step] @ texts.T
        labelled = order[int(first[start]) : int(first[start + len(block)])]
        block[owner[labelled] - start, labelled] = float("-inf")
        yield start, block
