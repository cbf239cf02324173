"""The lists that a search would look at, for queries whose right answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.uncertainty import Array
from vacsr.scoring import PairScores
from vacsr.scoring.topk import Direction, stable_topk

CANDIDATES = 200
"""Nearest by cosine that the method scores again."""
DEPTH = 20
"""Best by score whose uncertainty is looked at; beyond the first ranks its sign flips (the paper's appendix H)."""

_DRAWS = 5  # of galleries smaller than the whole


class Candidates(NamedTuple):
    """Q queries with m candidates each, best score first."""

    score: Array  # [Q, m]
    cosine: Array  # [Q, m]
    sigma: Array | None  # [Q, depth]
    right: NDArray[np.bool_]  # [Q, m]
    image: NDArray[np.int64]  # [Q] row of the image that a query is, or belongs to
    query: NDArray[np.int64]  # [Q] row of the image or caption that asks; it repeats where galleries do
    gallery: int  # items that were searched
    first: NDArray[np.int64] | None = None  # [Q] row of the caption or image that came first, where it is known

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Candidates:
        """Some queries."""
        sigma = None if self.sigma is None else self.sigma[rows]
        first = None if self.first is None else self.first[rows]
        return Candidates(
            self.score[rows], self.cosine[rows], sigma, self.right[rows], self.image[rows], self.query[rows],
            gallery=self.gallery, first=first,
        )  # fmt: skip


def random_galleries(images: int, *, size: int, generator: torch.Generator) -> list[Tensor]:
    """Images in galleries of one size; those left over are in none of a draw. -> rows [size] each

    All is drawn several times over, for what a query's neighbours happen to be is luck. Galleries of one draw share no
    image.
    """
    if not 2 <= size <= images:
        message = f"a gallery of {size:,} images cannot be made of {images:,}"
        raise DataError(f"{message} — give more pairs, or a smaller gallery: --gallery {images}")
    draws = [torch.randperm(images, generator=generator) for _ in range(_DRAWS if size < images else 1)]
    return [rows for order in draws for rows in order[: images - images % size].view(-1, size)]


def labelled_candidates(
    scores: PairScores,
    pairs: LabelledPairs,
    galleries: Sequence[Tensor],
    *,
    direction: Direction,
    limit: int = CANDIDATES,
    depth: int = DEPTH,
) -> Candidates:
    """Search each gallery with its own images or captions, as :class:`vacsr.search.engine.Searcher` does."""
    parts = [_gallery(pairs, rows, direction) for rows in galleries]
    width = min([limit, *(len(items) for _, items in parts)])
    found = [_search(scores, queries, items, direction=direction, width=width, depth=depth) for queries, items in parts]
    query, item, score, cosine = (torch.cat(part) for part in zip(*(one.plain() for one in found), strict=True))
    sigmas = [one.sigma for one in found if one.sigma is not None]
    sigma = torch.cat(sigmas).double().numpy() if sigmas else None
    owner = pairs.caption_image.cpu()
    if direction == "i2t":
        right, image = owner[item] == query[:, None], query
    else:
        right, image = item == owner[query][:, None], owner[query]
    size = round(sum(len(items) for _, items in parts) / len(parts))
    return Candidates(
        score.double().numpy(), cosine.double().numpy(), sigma, right.numpy(), image.numpy(), query.numpy(),
        gallery=size, first=item[:, 0].numpy(),
    )  # fmt: skip


def _gallery(pairs: LabelledPairs, rows: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """Queries and items of one gallery; an image without captions is an item, and no query."""
    owner = pairs.caption_image.cpu()
    captions = torch.isin(owner, rows).nonzero().flatten()
    if direction == "t2i":
        return captions, rows
    return rows[torch.isin(rows, owner[captions])], captions


class _Found(NamedTuple):
    query: Tensor  # [Q]
    item: Tensor  # [Q, width]
    score: Tensor  # [Q, width]
    cosine: Tensor  # [Q, width]
    sigma: Tensor | None  # [Q, depth]

    def plain(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All but σ, which a method may not have."""
        return self.query, self.item, self.score, self.cosine


def _search(
    scores: PairScores, queries: Tensor, items: Tensor, *, direction: Direction, width: int, depth: int
) -> _Found:
    """queries [Q], items [N] of one gallery"""
    asked, held = (scores.images, scores.texts) if direction == "i2t" else (scores.texts, scores.images)
    cosine, near = stable_topk((asked.mean[queries] @ held.mean[items].T).cpu(), width)
    item = items[near]
    score = scores.score_of(*_oriented(queries, item, direction)).cpu().view(item.shape)
    score, order = score.sort(dim=1, descending=True, stable=True)
    item, cosine = item.gather(1, order), cosine.gather(1, order)
    top = item[:, :depth]
    sigma = scores.uncertainty(*_oriented(queries, top, direction))
    return _Found(queries, item, score, cosine, None if sigma is None else sigma.cpu().view(top.shape))


def _oriented(queries: Tensor, item: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """Image rows and caption columns of all pairs. [Q], [Q, m] -> [Q·m], [Q·m]"""
    repeated, flat = queries.repeat_interleave(item.shape[1]), item.flatten()
    return (repeated, flat) if direction == "i2t" else (flat, repeated)
