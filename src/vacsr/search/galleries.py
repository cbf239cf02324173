"""Labelled queries searched in galleries of many sizes: lists of candidates with known answers.

A gallery is simulated: each query keeps its own image and a random part of the others. An index can stand in as a
larger gallery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.data import PairSet, PhotoSet
from vacsr.data.photos import content_fingerprint
from vacsr.errors import DataError
from vacsr.evaluate.uncertainty import Array
from vacsr.files import read_tensors, write_tensors
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer, PairScores
from vacsr.scoring.topk import Direction
from vacsr.search.certify import Graded
from vacsr.search.index import Entry, Hits, VectorIndex
from vacsr.search.probabilities import HitModel, Mask

_STEP = 10**0.2  # from one size to the next
QUERIES = 5_000  # that are searched with, spread over the images
_PRODUCTS = 2e9  # queries times items at most: keeps a calibration on a million items under a minute
_MATRIX = 5e7  # scores in memory
_GALLERY = 5_000  # labelled images that are searched at most
_SMALLEST = 20
_SAME = 1e-4  # two roundings of one cosine differ by less


class Lists(NamedTuple):
    """Candidates of queries with known answers, best score first."""

    score: Array  # [Q, m]
    right: Mask  # [Q, m]
    image: NDArray[np.int64]  # [Q] the image that a query is, or belongs to
    size: int  # items that were searched

    def graded(self, hits: HitModel) -> Graded:
        return Graded(hits.apply(self.score), self.right, self.image)

    def without_matches(self) -> Lists:
        """As if no right item were in the gallery; all cut to the length of the shortest."""
        wrong, order = ~self.right, self.right.argsort(axis=1, kind="stable")
        score = np.take_along_axis(self.score, order, 1)[:, : int(wrong.sum(1).min())]
        return self._replace(score=score, right=np.zeros_like(score, dtype=bool))


class Labelled(NamedTuple):
    """Labelled pairs as a model embeds them: all that a calibration is fitted to, and can be fitted to again."""

    images: Tensor  # [I, d]
    texts: Tensor  # [M, d]
    owner: NDArray[np.int64]  # [M] the image of each caption
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    split: str

    @classmethod
    def of(cls, scorer: PairScorer, pairs: PairSet | PhotoSet) -> Labelled:
        scores, owner = scorer.score_set(pairs), pairs.caption_image.cpu().numpy()
        names = tuple(pairs.image_ids), tuple(pairs.caption_ids), pairs.split
        return cls(scores.images.mean, scores.texts.mean, owner, *names)

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Labelled:
        tensors, metadata = read_tensors(path)
        try:
            images, texts = (tensors[name].to(device) for name in ("images", "texts"))
            image_ids, caption_ids = (tuple(json.loads(metadata[name])) for name in ("image_ids", "caption_ids"))
            return cls(images, texts, tensors["owner"].numpy(), image_ids, caption_ids, metadata["split"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} holds no labelled pairs ({error!r}) — run vacsr calibrate again") from error

    def write(self, path: Path) -> None:
        metadata = {name: json.dumps(getattr(self, name)) for name in ("image_ids", "caption_ids")}
        tensors = {"images": self.images, "texts": self.texts, "owner": torch.from_numpy(self.owner)}
        write_tensors(path, tensors, metadata={**metadata, "split": self.split})

    def digest(self) -> str:
        return content_fingerprint(*self.image_ids, *self.caption_ids, self.owner.tobytes())


@torch.inference_mode()
def simulated_lists(
    scorer: PairScorer, pairs: Labelled, *, candidates: int, seed: int, direction: Direction
) -> Iterator[Lists]:
    """The labelled items as their own gallery, from few of the images to all; the same queries in each."""
    rng, owner = np.random.default_rng(seed), pairs.owner
    images = np.unique(owner)  # an image without captions asks nothing, and is an item of the largest gallery alone
    images = np.sort(rng.permutation(images)[:_GALLERY])
    items = np.flatnonzero(np.isin(owner, images))
    held, group = (images, images) if direction == "t2i" else (items, owner[items])
    queries, image = (items, owner[items]) if direction == "t2i" else (images, images)
    some = spread_over(image, min(QUERIES, int(_MATRIX / len(held))), rng)
    queries, image = queries[some], image[some]
    asked, answers = (pairs.texts, pairs.images) if direction == "t2i" else (pairs.images, pairs.texts)
    chosen = (Embedding(asked[torch.from_numpy(queries)]), Embedding(answers[torch.from_numpy(held)]))
    block = PairScores(scorer, *(chosen if direction == "i2t" else chosen[::-1]))
    score = (block.score if direction == "i2t" else block.score.T).cpu()
    cosine = (chosen[0].mean @ chosen[1].mean.T).cpu()
    column = np.searchsorted(images, group)  # of the image that an item is, or belongs to
    own = np.searchsorted(images, image)
    for size in _sizes(len(images)):
        keys = rng.random((len(queries), len(images)), dtype=np.float32)
        keys[np.arange(len(queries)), own] = -1  # its own image is always there
        kept = np.zeros(keys.shape, dtype=bool)
        np.put_along_axis(kept, np.argpartition(keys, size - 1, axis=1)[:, :size], True, axis=1)
        there = torch.from_numpy(kept[:, column])
        width = min(candidates, int(there.sum(1).min()))
        near = cosine.masked_fill(~there, -torch.inf).topk(width, dim=1).indices
        best = score.gather(1, near).sort(dim=1, descending=True, stable=True)
        right = group[near.gather(1, best.indices).numpy()] == image[:, None]
        yield Lists(best.values.double().numpy(), right, image, round(float(there.sum(1).double().mean())))


def _sizes(most: int) -> list[int]:
    """Rising to ``most``, five to a power of ten."""
    sizes = [most]
    while sizes[0] / _STEP >= _SMALLEST:
        sizes.insert(0, round(sizes[0] / _STEP))
    return sizes


def spread_over(image: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Some queries, as many of each image as possible are alike: one of each, then another. [Q] -> positions [≤ count]

    >>> image = np.array([0, 0, 0, 1, 2, 2])
    >>> sorted(image[spread_over(image, 5, np.random.default_rng(0))].tolist())
    [0, 0, 1, 2, 2]
    """
    order = rng.permutation(len(image))
    order = order[image[order].argsort(kind="stable")]
    first = np.r_[0, [n + 1 for n, (a, b) in enumerate(pairwise(image[order])) if a != b]].astype(np.int64)
    turn = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    return np.sort(order[(turn + rng.random(len(order)) * 0.5).argsort(kind="stable")][:count])


@torch.inference_mode()
def searched_lists(
    scorer: PairScorer, pairs: Labelled, index: VectorIndex, *, candidates: int, seed: int, direction: Direction
) -> tuple[Lists, bool]:
    """Labelled queries on an index, as if it held their right items too; does it hold most of them indeed?"""
    size, rng = len(index), np.random.default_rng(seed)
    if size < _SMALLEST:
        raise DataError(f"the index holds {size} items, expected {_SMALLEST} or more — calibrate without --index")
    owner = pairs.owner
    image = owner if direction == "t2i" else np.unique(owner)
    queries = spread_over(image, min(QUERIES, int(_PRODUCTS / size)), rng)
    image = image[queries]
    rows = queries if direction == "t2i" else image  # of captions, or of images
    groups = [[one] if direction == "t2i" else np.flatnonzero(owner == one).tolist() for one in image.tolist()]
    width = min(map(len, groups))
    own = torch.tensor([group[:width] for group in groups])  # the right items of each query [Q, c]
    names = pairs.image_ids if direction == "t2i" else pairs.caption_ids
    asked, answers = (pairs.texts, pairs.images) if direction == "t2i" else (pairs.images, pairs.texts)
    own_names = {names[item] for group in groups for item in group}
    stored = index.get(sorted(own_names))
    score, right = [], []
    for part in torch.split(torch.arange(len(rows)), 256):
        query, held = asked[torch.from_numpy(rows)[part]], answers[own[part]]  # [q, d], [q, c, d]
        hits = index.search(query, candidates + width)
        labels = [{names[item] for item in groups[row]} for row in part.tolist()]
        is_own = _find_labels(hits, query.cpu(), labels, stored)
        wrong = is_own.long().argsort(dim=1, stable=True)[:, : min(candidates, hits.scores.shape[1] - width)]
        vectors = hits.vectors.to(scorer.device).gather(1, wrong.to(scorer.device)[..., None].expand(-1, -1, index.dim))
        cosine = hits.scores.cpu().gather(1, wrong)
        there = (query[:, None] * held).sum(2).cpu() >= cosine[:, -1:]
        value = _score_lists(scorer, Embedding(query), torch.cat((vectors, held), dim=1), direction=direction)
        # A right item that is not among the candidates is no hit: it ends the list.
        floor = value[:, : wrong.shape[1]].amin(dim=1, keepdim=True)
        score.append(torch.cat((value[:, : wrong.shape[1]], value[:, wrong.shape[1] :].where(there, floor)), dim=1))
        right.append(torch.cat((torch.zeros_like(wrong, dtype=torch.bool), there), dim=1))
    best, matches = torch.cat(score).sort(dim=1, descending=True, stable=True), torch.cat(right)
    lists = Lists(best.values.double().numpy(), matches.gather(1, best.indices).numpy(), image, size)
    return lists, len(stored) > len(own_names) / 2


def _find_labels(hits: Hits, queries: Tensor, labels: Sequence[set[str]], stored: Mapping[str, Entry]) -> Tensor:
    """Which hits have an id among their query's labels. -> [Q, k]

    Ids are read only where the score is that of a stored label: reading them all takes longer than the search.
    """
    found = torch.zeros(hits.scores.shape, dtype=torch.bool)
    for row, label in enumerate(labels):
        for name in label & stored.keys():
            alike = (hits.scores[row].cpu() - queries[row] @ stored[name].vector).abs() < _SAME
            for place in alike.nonzero().flatten().tolist():
                found[row, place] |= hits.ids[row][place] == name
    return found


def _score_lists(scorer: PairScorer, queries: Embedding, items: Tensor, *, direction: Direction) -> Tensor:
    """Scores of each query with its own items. [Q, d], [Q, m, d] -> [Q, m]"""
    held = Embedding(items.flatten(0, 1))
    scores = PairScores(scorer, *((held, queries) if direction == "t2i" else (queries, held)))
    rows = torch.arange(items[..., 0].numel()).view(items.shape[:2])
    return scores.score_lists(torch.arange(len(items)), rows, direction=direction).cpu()


def pairs_of(queries: Tensor, items: Tensor, *, direction: Direction) -> tuple[Tensor, Tensor]:
    """Image rows and caption columns of all pairs. [Q], [Q, m] -> [Q·m], [Q·m]"""
    repeated, flat = queries.repeat_interleave(items.shape[1]), items.flatten()
    return (repeated, flat) if direction == "i2t" else (flat, repeated)


class Rescored(NamedTuple):
    """Q queries with w items each, best score first."""

    order: Tensor  # [Q, w] positions in the order that was given
    score: Tensor  # [Q, w]
    sigma: Tensor | None  # [Q, depth]
    disagreement: Tensor | None  # [Q, depth], of members


def rescore(
    scores: PairScores, queries: Tensor, items: Tensor, *, direction: Direction, candidates: int, depth: int
) -> Rescored:
    """Order items by (−score, given order): the first ``candidates`` of each query, then any others. [Q], [Q, w]

    All pairs are scored in one pass. The uncertainties are of the first ``depth``.
    """
    score = scores.score_lists(queries, items, direction=direction).cpu()
    parts = [part.argsort(dim=1, descending=True, stable=True) for part in torch.split(score, candidates, dim=1)]
    order = torch.cat([part + number * candidates for number, part in enumerate(parts)], dim=1)
    top = items.gather(1, order[:, :depth])
    pairs = pairs_of(queries, top, direction=direction)
    unsure = (scores.uncertainty(*pairs), scores.disagreement(*pairs))
    sigma, disagreement = (None if one is None else one.cpu().view(top.shape) for one in unsure)
    return Rescored(order, score.gather(1, order), sigma, disagreement)
