"""Pairs of images and captions, by name: ``load_pairs("features:FILE,captions=FILE", split="train")``.

Or images alone: ``load_images("photos:DIR")``.
"""

from __future__ import annotations

import os
from pathlib import Path

from vacsr.data import coco, features, flickr, scenes, shards, synthetic, tables  # noqa: F401, each registers its formats
from vacsr.data.formats import FORMATS, OnError, parse_spec
from vacsr.data.pairs import PairSet
from vacsr.data.photos import PhotoSet, check_photos, without
from vacsr.data.shards import write_shards
from vacsr.errors import UsageError
from vacsr.provenance import Provenance

__all__ = [
    "PairSet",
    "PhotoSet",
    "Provenance",
    "check_captioned",
    "check_photos",
    "images_spec",
    "load_images",
    "load_pairs",
    "parse_spec",
    "without",
    "write_shards",
]


def load_pairs(
    spec: str, *, captions: str | Path | None = None, split: str | None = None, on_error: OnError = "fail"
) -> PairSet | PhotoSet:
    """Load the pairs that a SPEC names; ``captions`` and ``split`` add to its options or replace them.

    Features (:class:`PairSet`): ``features:FILE[,captions=FILE][,text=FILE]`` reads cached embeddings, ``synthetic:``
    generates a small world of them. Photos (:class:`PhotoSet`): ``coco:ROOT``, ``flickr8k:ROOT``, ``csv:FILE``,
    ``jsonl:FILE``, ``folder:DIR``, ``shards:PATTERN``, and ``scenes:``, which are drawn; each is told of in the module
    that loads it. ``split`` None or "all" gives everything. ``photos:DIR`` has no captions and is refused, see
    :func:`load_images`.

    ``on_error``: photos that are absent and captions without text are an error that counts them, or with "skip" are
    left out with a warning and listed in ``PhotoSet.skipped``. What a photo's file holds shows when it is decoded, see
    :func:`check_photos`. Features know no such problems.

    >>> load_pairs("synthetic:images=40,seed=1", split="train").describe()
    'train: 40 images (64 dims), 200 captions (48 dims), 5 per image, backbone synthetic:seed=1'
    """
    given = {"captions": None if captions is None else str(captions), "split": split}
    parsed = parse_spec(spec).with_options(given)
    check_captioned(spec)
    pairs: PairSet | PhotoSet = parsed.format.load(parsed, on_error)
    return pairs


def check_captioned(spec: str) -> None:
    """Refuse a SPEC of photos without captions, where these are needed."""
    parsed = parse_spec(spec)
    if not parsed.format.captioned:
        message = f"{spec} are photos without captions, and captions are needed here"
        action = f"write them beside the photos (a.jpg, a.txt), then folder:{parsed.path}"
        raise UsageError(
            f"{message} — {action}; photos: is for an index: vacsr index add INDEX --run RUN --pairs {spec}"
        )


def load_images(spec: str, *, split: str | None = None, on_error: OnError = "fail") -> PairSet | PhotoSet:
    """Load the images that a SPEC names, for those who need no captions: an index, a page.

    All that :func:`load_pairs` knows, with its captions; and ``photos:DIR``, or just ``DIR``, which has none.
    """
    parsed = parse_spec(images_spec(spec)).with_options({"split": split})
    pairs: PairSet | PhotoSet = parsed.format.load(parsed, on_error)
    return pairs


def images_spec(spec: str) -> str:
    """A folder's plain path as ``photos:PATH``; a SPEC as it is.

    >>> images_spec("."), images_spec("scenes:images=4")
    ('photos:.', 'scenes:images=4')
    """
    scheme, colon, _ = spec.partition(":")
    return f"photos:{spec}" if os.path.isdir(spec) and not (colon and scheme in FORMATS) else spec
