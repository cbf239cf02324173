"""Protocols: which images and captions are ranked against each other, and which pairs count as relevant.

A protocol is one gallery or several. A gallery keeps the order of the data, so that equal scores rank as they do there.
``flickr`` takes the data's own labels. The others are the field's protocols on COCO's test images. Their relevant pairs
come from the public package ``eccv_caption``, and every metric equals what that package itself computes; items are
known by COCO's image ids and caption annotation ids, written as strings.

- COCO 5K: 5,000 images, 25,000 captions; an image's own five captions are relevant, and nothing else.
- COCO 1K: the same in five galleries of 1,000 images, cut in the package's order; metrics are means over the five.
- CxC adds the matches that Crisscrossed Captions' raters found; 28 captions have none and are not evaluated.
- ECCV Caption adds those that people confirmed among machine-found candidates, for 1,261 images and 1,332 captions.
- CxC and ECCV Caption in a part of the test images, ``cxc-part`` and ``eccv-part``: matches within the part count, and
  queries that have one. A smaller gallery is easier, so these numbers compare systems on the same part only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, MissingExtra, UsageError
from vacsr.evaluate.ranks import BothRanks, Positives, Ties, positive_ranks
from vacsr.evaluate.score_files import Scores
from vacsr.scoring.topk import Direction, TopK, blocks_topk

Source = Literal["coco", "cxc", "eccv"]
Matches = Mapping[int, Sequence[int]]
FOLDS = 5
_MATRIX = 1 << 28  # scores that may be kept at once; more are streamed
_STRIP = 128  # rows counted at a time


def fits_in_memory(pairs: LabelledPairs) -> bool:
    """May the whole score matrix be kept?"""
    return len(pairs.image_ids) * len(pairs.caption_ids) <= _MATRIX


@dataclass(frozen=True, eq=False)
class Gallery:
    """N' images and M' captions of the data. Positives count within the gallery; the two directions may differ."""

    i2t: Positives
    t2i: Positives
    images: Tensor  # [N'] rows in the data, ascending
    captions: Tensor  # [M'] rows in the data, ascending
    whole: bool = True  # are these all images and captions of the data?

    @classmethod
    def of_labels(cls, pairs: LabelledPairs) -> Gallery:
        """Everything, each caption relevant to the image it was written for."""
        i2t = Positives.from_captions(pairs.caption_image.cpu(), len(pairs.image_ids))
        return cls(i2t, i2t.transposed(), torch.arange(i2t.num_queries), torch.arange(i2t.num_items))

    def queries(self, direction: Direction) -> Tensor:
        """Their rows in the data. -> [N'] or [M']"""
        return self.images if direction == "i2t" else self.captions

    def blocks(self, scores: Scores) -> Iterator[Tensor]:
        """Consecutive row blocks [b', M'] of the gallery's score matrix."""
        first = 0
        for block in scores.blocks():
            if self.whole:
                yield block
                continue
            low, high = torch.searchsorted(self.images, torch.tensor([first, first + len(block)])).tolist()
            if high > low:
                rows = (self.images[low:high] - first).to(block.device)
                yield block[rows[:, None], self.captions.to(block.device)]
            first += len(block)

    def ranks(self, scores: Scores, *, ties: Ties = "stable") -> BothRanks:
        """Ranks of every positive, both directions; streamed where the matrix is too large to keep."""
        if len(self.images) * len(self.captions) > _MATRIX:
            return positive_ranks(lambda: self.blocks(scores), self.i2t, self.t2i, ties=ties)
        # Counting is many small steps: a processor does them without waiting for a GPU. Strips of rows serve both
        # directions while they are in its cache, which takes half the time of the matrix and then its transpose.
        matrix = (scores.score if self.whole else torch.cat(list(self.blocks(scores)))).cpu()
        return positive_ranks(lambda: torch.split(matrix, _STRIP), self.i2t, self.t2i, ties=ties)

    def topk(self, scores: Scores, k: int, *, direction: Direction) -> TopK:
        """The best k answers to each query, by (−score, index); indices are rows of the data. -> [Q, min(k, items)]"""
        (top,) = blocks_topk(self.blocks(scores), k, directions=[direction])
        items = self.captions if direction == "i2t" else self.images
        return TopK(top.score, items.to(top.index.device)[top.index])


class CocoTest(NamedTuple):
    """The test list and what the package says is relevant."""

    captions: tuple[int, ...]  # annotation ids in the order that the folds are cut in
    matches: Mapping[Source, Mapping[str, Matches]]
    """By source and direction (``i2t``, ``t2i``): the relevant items of each query."""

    def image_of(self, caption: int) -> int:
        """The image that the caption was written for."""
        return self.matches["coco"]["t2i"][caption][0]


@cache
def coco_test() -> CocoTest:
    """Read the package's ground truth, once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends a faster JSON reader
            import eccv_caption
    except ImportError as error:
        raise MissingExtra("eccv_caption", "eval") from error
    truth = eccv_caption.Metrics()
    matches: dict[Source, Mapping[str, Matches]] = {
        "coco": truth.coco_gts,
        "cxc": truth.cxc_gts,
        "eccv": truth.eccv_gts,
    }
    return CocoTest(tuple(int(name) for name in truth.coco_ids), matches)


def coco_galleries(
    pairs: LabelledPairs, *, source: Source, folds: int = 1, known: CocoTest | None = None
) -> tuple[Gallery, ...]:
    """The test images and captions as one gallery, or cut into several. Data that lack some are a DataError.

    Further images and captions of the data, such as an image's sixth caption, are left out of the galleries. ``known``:
    another test list, instead of the package's.
    """
    known = known or coco_test()
    image_rows = {name: row for row, name in enumerate(pairs.image_ids)}
    caption_rows = {name: row for row, name in enumerate(pairs.caption_ids)}
    images = dict.fromkeys(known.image_of(caption) for caption in known.captions)
    for kind, names, rows in (("image", images, image_rows), ("caption", known.captions, caption_rows)):
        missing = [name for name in names if str(name) not in rows]
        if missing:
            message = f"the data lack {len(missing):,} of COCO's {len(names):,} test {kind}s, first '{missing[0]}'"
            action = "name images by COCO's image ids and captions by its annotation ids, or choose --protocol flickr"
            raise DataError(f"{message}; the data begin with {next(iter(rows), None)!r} — {action}")
    step = len(known.captions) // folds
    parts = [known.captions[start : start + step] for start in range(0, step * folds, step)]
    return tuple(_gallery(part, known, source=source, rows=(image_rows, caption_rows)) for part in parts)


def part_gallery(pairs: LabelledPairs, *, source: Source, known: CocoTest | None = None) -> tuple[Gallery, ...]:
    """One gallery of those test captions that the data have, and their images. Data without any are a DataError.

    Captions are known by their annotation ids, images by their captions, so an image may have any id. Relevant items
    outside the gallery do not count, and queries without another one are not evaluated.
    """
    known = known or coco_test()
    listed, image_rows, caption_rows = set(known.captions), dict[str, int](), dict[str, int]()
    for row, (name, image) in enumerate(zip(pairs.caption_ids, pairs.caption_image.tolist(), strict=True)):
        if name.isdecimal() and int(name) in listed:
            caption_rows[name] = row
            if image_rows.setdefault(str(known.image_of(int(name))), image) != image:
                message = f"caption '{name}' belongs to another image than the others of its COCO image"
                raise DataError(f"{message} — correct its label, or choose --protocol flickr")
    if not caption_rows:
        message = f"the data have none of COCO's test captions, they begin with {pairs.caption_ids[0]!r}"
        raise DataError(f"{message} — name captions by COCO's annotation ids, or choose --protocol flickr")
    captions = [int(name) for name in caption_rows]
    part = _gallery(captions, known, source=source, rows=(image_rows, caption_rows))
    whole = (len(part.images), len(part.captions)) == (len(pairs.image_ids), len(pairs))
    return (replace(part, i2t=replace(part.i2t, absent=None), t2i=replace(part.t2i, absent=None), whole=whole),)


def coco_owners() -> dict[str, str]:
    """The image id of each of COCO's test captions."""
    known = coco_test()
    return {str(caption): str(known.image_of(caption)) for caption in known.captions}


def _gallery(
    captions: Sequence[int], known: CocoTest, *, source: Source, rows: tuple[Mapping[str, int], Mapping[str, int]]
) -> Gallery:
    """These captions and their images, in the order of the data; ``rows`` of images and captions by their ids."""
    image_rows, caption_rows = rows
    images = sorted({known.image_of(caption) for caption in captions}, key=lambda name: image_rows[str(name)])
    captions = sorted(captions, key=lambda name: caption_rows[str(name)])
    image_index = {name: index for index, name in enumerate(images)}
    caption_index = {name: index for index, name in enumerate(captions)}
    matches = known.matches[source]
    return Gallery(
        i2t=_positives(matches["i2t"], queries=image_index, items=caption_index),
        t2i=_positives(matches["t2i"], queries=caption_index, items=image_index),
        images=torch.tensor([image_rows[str(name)] for name in images]),
        captions=torch.tensor([caption_rows[str(name)] for name in captions]),
        whole=(len(images), len(captions)) == (len(image_rows), len(caption_rows)),
    )


def _positives(matches: Matches, *, queries: Mapping[int, int], items: Mapping[int, int]) -> Positives:
    """The relevant pairs within the gallery; a relevant item that is not in it still counts in R.

    ECCV Caption names two captions that are not in the test list, and counts them.
    """
    query: list[int] = []
    item: list[int] = []
    absent = torch.zeros(len(queries), dtype=torch.int64)
    for name, row in queries.items():
        for match in set(matches.get(name, ())):
            if match in items:
                query.append(row)
                item.append(items[match])
            else:
                absent[row] += 1
    pairs = torch.tensor(query), torch.tensor(item)
    return replace(Positives.from_pairs(*pairs, num_queries=len(queries), num_items=len(items)), absent=absent)


PROTOCOLS: Mapping[str, Callable[[LabelledPairs], tuple[Gallery, ...]]] = {
    "flickr": lambda pairs: (Gallery.of_labels(pairs),),
    "coco-1k": partial(coco_galleries, source="coco", folds=FOLDS),
    "coco-5k": partial(coco_galleries, source="coco"),
    "cxc": partial(coco_galleries, source="cxc"),
    "eccv": partial(coco_galleries, source="eccv"),
    "cxc-part": partial(part_gallery, source="cxc"),
    "eccv-part": partial(part_gallery, source="eccv"),
}
"""By name."""


def check_protocols(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in PROTOCOLS]
    if unknown:
        raise UsageError(f"unknown protocol '{unknown[0]}' — choose from: {', '.join(PROTOCOLS)}")


def protocol_galleries(names: Sequence[str], pairs: LabelledPairs) -> dict[str, tuple[Gallery, ...]]:
    """Each protocol's galleries in the data; data that a protocol does not fit are a DataError."""
    check_protocols(names)
    return {name: PROTOCOLS[name](pairs) for name in names}


def fitting_protocols(names: Sequence[str], pairs: LabelledPairs) -> tuple[str, ...]:
    """Those that are known and whose images the data hold; ``flickr``, which fits all data, where none is."""
    fitting = []
    for name in names:
        with suppress(DataError, UsageError):
            protocol_galleries([name], pairs)
            fitting.append(name)
    return tuple(fitting) or ("flickr",)
