"""A data set's images into an index, in batches that are each stored before the next is embedded.

So a stop at any moment costs one batch: the same call goes on, since it leaves out what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vacsr.backbones import TowerBackbone
from vacsr.backbones.inputs import PhotoReader
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search.index import Metadata, VectorIndex

_PHOTOS = {"cpu": 32, "cuda": 256}  # through the tower at a time
_LOOKUP = 4096  # ids whose metadata are in memory at a time


@runtime_checkable
class Describes(Protocol):
    """An index that can say what is stored with an id, beside what :class:`VectorIndex` asks for."""

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Of those that are there."""


class Filled(NamedTuple):
    """Images so far."""

    added: int = 0
    replaced: int = 0
    skipped: int = 0
    """They were there already."""
    of: int = 0

    @property
    def embedded(self) -> int:
        """What took time."""
        return self.added + self.replaced


def fill_index(
    index: VectorIndex,
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    source: str = "",
    batch: int = 1024,
    replace: bool = False,
    workers: int = 0,
    committed: Callable[[Filled], None] | None = None,
) -> Filled:
    """Embed the images that the index lacks, or all with ``replace``, and add them ``batch`` at a time.

    Each gets as metadata its ``source``, a photo's own name if it has one, and its captions. An id that is there with
    another source is an error before anything is embedded: it is another image. ``committed`` is told after each batch
    that is stored.
    """
    if batch < 1:
        raise UsageError(f"batch is {batch}, expected 1 or more — try 1024")
    scorer.check_set(pairs)
    total = len(pairs.image_ids)
    rows = list(range(total))
    if not replace:
        _check_sources(index, pairs, source=source)
        rows = [row for row, there in zip(rows, index.known(pairs.image_ids), strict=True) if not there]
    done = Filled(skipped=total - len(rows), of=total)
    captions = _captions_of(pairs)
    for some, vectors in _embedded(scorer, pairs, _cut(rows, batch), workers=workers):
        metadata = [_metadata(pairs, row, source=source, captions=captions.get(row, [])) for row in some]
        result = index.add([pairs.image_ids[row] for row in some], vectors, metadata)
        done = done._replace(added=done.added + result.added, replaced=done.replaced + result.replaced)
        if committed is not None:
            committed(done)
    return done


def _check_sources(index: VectorIndex, pairs: PairSet | PhotoSet, *, source: str) -> None:
    """Raise where an id is there from another source; who did not say where an image is from fits anything."""
    if not isinstance(index, Describes):
        return
    for some in _cut(range(len(pairs.image_ids)), _LOOKUP):
        stored = index.metadata([pairs.image_ids[row] for row in some])
        for row in some:
            name = pairs.image_ids[row]
            old, new = stored.get(name, {}).get("source"), _source(pairs, row, source=source)
            if old and new and old != new:
                message = f"{name!r} is in the index from {old!r}, this one is from {new!r}"
                action = "write the SPEC as it was, add --replace to take the new one, or fill another index"
                raise DataError(f"{message}: the same id for another image? — {action}")


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@torch.inference_mode()
def _embedded(
    scorer: PairScorer, pairs: PairSet | PhotoSet, batches: Sequence[Sequence[int]], *, workers: int
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Each batch with its vectors [b, d]. Photos are decoded ahead, also while a batch is being stored."""
    if isinstance(pairs, PairSet):
        for rows in batches:
            yield rows, scorer.model.embed_images(pairs.images[torch.tensor(rows)].to(scorer.device)).mean
        return
    backbone = scorer.model.backbone
    assert isinstance(backbone, TowerBackbone), "the check has refused other backbones"
    small = [some for rows in batches for some in _cut(rows, _PHOTOS[scorer.device.type])]
    pixels = PhotoReader(pairs.photos, backbone.transform, workers=workers).stream(small)
    for rows in batches:
        parts = [
            scorer.model.embed_images(next(pixels).to(scorer.device)).mean
            for _ in _cut(rows, _PHOTOS[scorer.device.type])
        ]
        yield rows, torch.cat(parts)


def _captions_of(pairs: PairSet | PhotoSet) -> dict[int, list[str]]:
    """Of each image row that has some."""
    found: dict[int, list[str]] = {}
    for row, words in zip(pairs.caption_image.tolist(), pairs.captions or (), strict=False):
        found.setdefault(row, []).append(words)
    return found


def _metadata(pairs: PairSet | PhotoSet, row: int, *, source: str, captions: Sequence[str]) -> Metadata:
    return {"source": _source(pairs, row, source=source), "captions": list(captions)}


def _source(pairs: PairSet | PhotoSet, row: int, *, source: str) -> str:
    return pairs.photos.name(row) if isinstance(pairs, PhotoSet) else source
