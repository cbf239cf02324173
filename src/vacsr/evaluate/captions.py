"""The field's protocols on COCO's test images: COCO 1K and 5K, CxC and ECCV Caption.

Who is relevant to whom comes from the public package ``eccv_caption``, and every figure equals what that package itself
computes. Items are known by COCO's image ids and caption annotation ids, written as strings.

- COCO 5K: 5,000 images, 25,000 captions; an image's own five captions are relevant, and nothing else.
- COCO 1K: the same in five galleries of 1,000 images, cut in the package's order; figures are means over the five.
- CxC adds the matches that Crisscrossed Captions' raters found; 28 captions have none and are not asked.
- ECCV Caption adds those that people confirmed among what machines had found, for 1,261 images and 1,332 captions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError, MissingExtra
from vacsr.evaluate.galleries import Gallery
from vacsr.evaluate.ranks import Positives

Source = Literal["coco", "cxc", "eccv"]
Matches = Mapping[int, Sequence[int]]
FOLDS = 5
_HOW = "name images by COCO's image ids and captions by its annotation ids, as coco:ROOT with split test does"


class CocoTest(NamedTuple):
    """The test list and what the package says is relevant."""

    captions: tuple[int, ...]
    """Annotation ids in the order that the folds are cut in."""
    matches: Mapping[Source, Mapping[str, Matches]]
    """By source and direction (``i2t``, ``t2i``): the relevant items of each query."""

    def image_of(self, caption: int) -> int:
        """The image that the caption was written for."""
        return self.matches["coco"]["t2i"][caption][0]


@cache
def coco_test() -> CocoTest:
    """Read the package's ground truth, once."""
    found = _package().Metrics()
    matches: dict[Source, Mapping[str, Matches]] = {
        "coco": found.coco_gts,
        "cxc": found.cxc_gts,
        "eccv": found.eccv_gts,
    }
    return CocoTest(tuple(int(name) for name in found.coco_ids), matches)


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it speaks of a faster JSON reader
            import eccv_caption
    except ImportError as error:
        raise MissingExtra("eccv_caption", "eval") from error
    return eccv_caption


def coco_galleries(
    pairs: LabelledPairs, *, source: Source, folds: int = 1, known: CocoTest | None = None
) -> tuple[Gallery, ...]:
    """The test images and captions as one gallery, or cut into several. Data that lack some are a DataError.

    Further images and captions of the data, such as an image's sixth caption, are left out of the galleries. ``known``:
    another test list, instead of the package's.
    """
    known, rows = known or coco_test(), _Rows(pairs)
    rows.check(known)
    step = len(known.captions) // folds
    parts = [known.captions[start : start + step] for start in range(0, step * folds, step)]
    return tuple(_gallery(part, known, source=source, rows=rows) for part in parts)


def coco_caption_image(image_ids: Sequence[str], caption_ids: Sequence[str]) -> Tensor:
    """The row of each caption's image, by COCO's own labels. -> [M] int64"""
    known, images = coco_test(), {name: row for row, name in enumerate(image_ids)}
    owners: list[int] = []
    for name in caption_ids:
        number = int(name) if name.isdecimal() else -1
        if number not in known.matches["coco"]["t2i"]:
            message = f"caption {name!r} is not one of COCO's test captions, which are annotation ids such as 770337"
            raise DataError(f"{message} — name captions so; for other data choose --protocol flickr with caption_image")
        owner = str(known.image_of(number))
        if owner not in images:
            raise DataError(f"caption {name!r} is of image {owner!r}, which is not among the images — add it")
        owners.append(images[owner])
    return torch.tensor(owners)


class _Rows:
    """Where the data hold COCO's images and captions."""

    def __init__(self, pairs: LabelledPairs) -> None:
        self.images = {name: row for row, name in enumerate(pairs.image_ids)}
        self.captions = {name: row for row, name in enumerate(pairs.caption_ids)}

    def check(self, known: CocoTest) -> None:
        """Name the first of the test images or captions that is missing."""
        images = dict.fromkeys(known.image_of(caption) for caption in known.captions)
        for kind, wanted, found in (("image", images, self.images), ("caption", known.captions, self.captions)):
            missing = [name for name in wanted if str(name) not in found]
            if missing:
                message = f"the data lack {len(missing):,} of COCO's {len(wanted):,} test {kind}s, first {kind}"
                given = f"'{missing[0]}'; the data begin with {next(iter(found), None)!r}"
                raise DataError(f"{message} {given} — {_HOW}, or choose --protocol flickr")


def _gallery(captions: Sequence[int], known: CocoTest, *, source: Source, rows: _Rows) -> Gallery:
    """These captions and their images, in the order of the data."""
    images = dict.fromkeys(known.image_of(caption) for caption in captions)
    image_rows = torch.tensor([rows.images[str(name)] for name in images]).sort()
    caption_rows = torch.tensor([rows.captions[str(name)] for name in captions]).sort()
    image_place = dict(zip(torch.tensor(list(images))[image_rows.indices].tolist(), range(len(images)), strict=True))
    ordered = torch.tensor(captions)[caption_rows.indices].tolist()
    caption_place = dict(zip(ordered, range(len(captions)), strict=True))
    matches = known.matches[source]
    return Gallery(
        i2t=_positives(matches["i2t"], queries=image_place, items=caption_place),
        t2i=_positives(matches["t2i"], queries=caption_place, items=image_place),
        images=None if len(images) == len(rows.images) else image_rows.values,
        captions=None if len(captions) == len(rows.captions) else caption_rows.values,
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
    found = Positives.from_pairs(*pairs, num_queries=len(queries), num_items=len(items))
    return replace(found, absent=absent) if bool(absent.any()) else found
