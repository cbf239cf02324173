"""What goes into an index: the images of a data set, or its captions. An id each, facts, and a way to a vector."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.images import PhotoReader
from vacsr.data import PairSet, PhotoSet
from vacsr.data.sources import StoredPhotos
from vacsr.scoring import PairScorer
from vacsr.search.index import Metadata
from vacsr.search.marks import content_mark, features_mark, photo_mark
from vacsr.search.sources import source_key, without_split

KEPT = ("source", "from", "mark")
"""Metadata that tell where an item comes from, and are of no use to who searches."""

_PHOTOS = {"cpu": 32, "cuda": 256}  # through the tower at a time


class Fact(NamedTuple):
    """Of one item."""

    source: str
    """A photo's own name if it has one, else the data set's."""
    mark: str
    """Changes when the item does; "" where nothing can be said."""


@dataclass(frozen=True, eq=False)
class Items:
    """N images or texts."""

    kind: str
    """"images" or "texts"."""
    ids: tuple[str, ...]
    """[N]"""
    facts: list[Fact]
    """[N], as they were before anything was embedded: a change meanwhile shows the next time."""
    told: Callable[[int], Metadata]
    """What a searcher is shown beside a row's id."""
    embed: Callable[[Sequence[Sequence[int]]], Iterator[Tensor]]
    """Vectors [b, d] of each batch of rows."""
    origin: str
    """The key of the source that all come from."""

    def metadata(self, row: int) -> Metadata:
        """All that is stored with an item."""
        fact = self.facts[row]
        return {"source": fact.source, **self.told(row), "from": self.origin, "mark": fact.mark}


def image_items(scorer: PairScorer, pairs: PairSet | PhotoSet, *, source: str = "", workers: int = 0) -> Items:
    """The images; each tells its captions."""
    captions: dict[int, list[str]] = {}
    for row, words in zip(pairs.caption_image.tolist(), pairs.captions or (), strict=False):
        captions.setdefault(row, []).append(words)
    if isinstance(pairs, PairSet):
        whole = without_split(source)
        facts = [Fact(whole, features_mark(row)) for row in pairs.images]
    else:
        facts = [Fact(_name(pairs, row), photo_mark(pairs.photos, row)) for row in range(len(pairs.image_ids))]
    return Items(
        kind="images",
        ids=pairs.image_ids,
        facts=facts,
        told=lambda row: {"captions": captions.get(row, [])},
        embed=lambda batches: _images(scorer, pairs, batches, workers=workers),
        origin=source_key(source),
    )


def text_items(scorer: PairScorer, pairs: PairSet | PhotoSet, *, source: str = "") -> Items:
    """The captions; each tells its words, where they are known, and the id of its image."""
    words = pairs.captions or ("",) * len(pairs.caption_ids)
    images = [pairs.image_ids[row] for row in pairs.caption_image.tolist()]
    marks = [content_mark(*both) for both in zip(words, images, strict=True)]
    if isinstance(pairs, PairSet):
        marks = [f"{mark} {features_mark(row)}" for mark, row in zip(marks, pairs.texts, strict=True)]
    whole = without_split(source)
    return Items(
        kind="texts",
        ids=pairs.caption_ids,
        facts=[Fact(whole, mark) for mark in marks],
        told=lambda row: {"text": words[row], "image": images[row]},
        embed=lambda batches: _texts(scorer, pairs, batches),
        origin=source_key(source),
    )


def cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Rows in batches."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _name(pairs: PhotoSet, row: int) -> str:
    """A photo's own; a path from the root, so that it means the same in any folder."""
    name = pairs.photos.name(row)
    return os.path.abspath(name) if isinstance(pairs.photos, StoredPhotos) else name


@torch.inference_mode()
def _images(
    scorer: PairScorer, pairs: PairSet | PhotoSet, batches: Sequence[Sequence[int]], *, workers: int
) -> Iterator[Tensor]:
    """Photos are decoded ahead, also while a batch is being stored."""
    if isinstance(pairs, PairSet):
        for rows in batches:
            yield scorer.model.embed_images(pairs.images[torch.tensor(rows)].to(scorer.device)).mean
        return
    backbone = scorer.model.backbone
    size = _PHOTOS[scorer.device.type]
    small = [some for rows in batches for some in cut(rows, size)]
    pixels = PhotoReader(pairs.photos, backbone.transform, workers=workers).stream(small)
    for rows in batches:
        yield torch.cat([scorer.model.embed_images(next(pixels).to(scorer.device)).mean for _ in cut(rows, size)])


def _texts(scorer: PairScorer, pairs: PairSet | PhotoSet, batches: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    for rows in batches:
        if isinstance(pairs, PairSet):
            yield scorer.embed_texts(pairs.texts[torch.tensor(rows)]).mean
        else:
            yield scorer.embed_texts([pairs.captions[row] for row in rows]).mean
