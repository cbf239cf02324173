"""Captions and their images as a table of names, and the photos that go with it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from vacsr.data.archives import StoredPhotos
from vacsr.data.formats import OnError
from vacsr.data.pairs import LabelledPairs, check_split, check_unique
from vacsr.data.photos import SKIP, PhotoSet, warn_left_out
from vacsr.errors import DataError, NoSuchSplit, UsageError

_NAMED = 5  # problems that an error names


@dataclass(frozen=True, eq=False)
class CaptionTable(LabelledPairs):
    """Names for N image rows and M caption rows."""

    source: str  # the file, for messages
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    caption_image: Tensor
    captions: tuple[str, ...] | None = None  # [M], perhaps blank
    splits: tuple[str, ...] | None = None  # [N], the split of each image
    files: tuple[str, ...] | None = None  # [N], the photo of each image, where the ids are not its name
    apart: str | None = None  # an image whose captions are not adjacent, where no image_row names the rows

    def __post_init__(self) -> None:
        check_unique(self.image_ids, kind="image")
        check_unique(self.caption_ids, kind="caption")

    def taken(self, images: Tensor, captions: Tensor) -> dict[str, Any]:
        columns = {"splits": self.splits, "files": self.files}
        return {name: values and tuple(values[row] for row in images.tolist()) for name, values in columns.items()}

    def rows_of(self, split: str | None) -> list[int]:
        """The images of one split; None or "all" for everything."""
        if split is None or split == "all":
            return list(range(len(self.image_ids)))
        if self.splits is None:
            raise NoSuchSplit(
                f"split {split!r} was asked for, {self.source} has no splits — name one for every image, "
                "or take all: --split all; to train, data.train=all and data.dev_share=0.1"
            )
        check_split(split, Counter(self.splits), source=self.source)
        return [row for row, name in enumerate(self.splits) if name == split]


def table_of(
    source: object,
    image_ids: Sequence[str],
    captions: Sequence[Sequence[str]],
    *,
    caption_ids: Sequence[Sequence[str]] | None = None,
    splits: Sequence[str] | None = None,
) -> CaptionTable:
    """A table from the captions of each image [N]; caption ids are ``image#index`` unless given."""
    rows = [row for row, texts in enumerate(captions) for _ in texts]
    names = None if caption_ids is None else tuple(name for some in caption_ids for name in some)
    return CaptionTable(
        source=str(source),
        image_ids=tuple(image_ids),
        caption_ids=names or number_captions([image_ids[row] for row in rows]),
        caption_image=torch.tensor(rows, dtype=torch.int64),
        captions=tuple(text for texts in captions for text in texts),
        splits=None if splits is None else tuple(splits),
    )


def number_captions(images: Sequence[str]) -> tuple[str, ...]:
    """Caption ids from each caption's image id [M]: the image and a count.

    >>> number_captions(["a", "b", "a"])
    ('a#0', 'b#0', 'a#1')
    """
    counters: dict[str, count[int]] = defaultdict(count)
    return tuple(f"{image}#{next(counters[image])}" for image in images)


def photo_set(
    table: CaptionTable,
    photos: StoredPhotos,
    *,
    split: str | None,
    on_error: OnError,
    problems: Sequence[str] = (),
    captioned: bool = True,
    uncaptioned: str = "",
) -> PhotoSet:
    """The pairs of one split of a table [N images] and its photos [N]; problems are an error, or left out and reported.

    A missing photo goes with its captions; a blank caption goes alone, or with its photo if it was the last one.
    ``problems`` are the reader's own, one line each. If ``captioned``, a photo without captions is a problem;
    ``uncaptioned`` is what else to do about it.
    """
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {on_error!r}, expected fail or skip — write on_error=skip to skip broken ones")
    chosen = table.rows_of(split)
    table, photos = table.subset(chosen), photos.take(chosen)
    images, texts = table.caption_image.tolist(), table.captions or ()
    lost = {row: f"{item.name()}: no such file" for row, item in enumerate(photos.items) if not item.exists()}
    blank = {
        row: f"{table.caption_ids[row]}: the caption has no text"
        for row, text in enumerate(texts)
        if not text.strip() and images[row] not in lost
    }
    described = {image for row, image in enumerate(images) if row not in blank} | lost.keys()
    bare = {row: f"{photos.name(row)}: no caption" for row in range(len(photos)) if captioned and row not in described}
    lines = [*problems, *lost.values(), *blank.values(), *bare.values()]
    usable = [row for row in range(len(photos)) if row not in lost and row not in bare]
    also = f"; {uncaptioned}" if bare and uncaptioned else ""
    if lines and on_error == "fail":
        first = "; ".join(lines[:_NAMED]) + (" …" if len(lines) > _NAMED else "")
        things = "photo or caption" if len(lines) == 1 else "photos or captions"
        message = f"{table.source}: {len(lines):,} {things} cannot be used: {first}"
        raise DataError(f"{message} — correct them, or {SKIP}{also}")
    if not usable:
        first = f", first {lines[0]}" if lines else ""
        raise DataError(f"{table.source}: none of {len(photos):,} photos can be used{first} — check their path{also}")
    if lines:
        warn_left_out(lines, source=table.source)
    worded = [row for row in range(len(texts)) if row not in blank]
    rest = replace(
        table,
        caption_ids=tuple(table.caption_ids[row] for row in worded),
        caption_image=table.caption_image[worded],
        captions=tuple(texts[row] for row in worded),
    ).subset(usable)
    photos = photos.take(usable)
    return PhotoSet(photos, **rest.labels(), split=split or "all", splits=rest.splits, skipped=tuple(lines))
