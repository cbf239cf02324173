"""Pairs of images and captions, by name: ``load_pairs("features:FILE,captions=FILE", split="train")``.

Or images alone: ``load_images("photos:DIR")``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from vacsr.data.coco import load_coco
from vacsr.data.features import load_features
from vacsr.data.flickr import load_flickr8k
from vacsr.data.own import load_folder, load_plain, load_table
from vacsr.data.pairs import PairSet, Provenance
from vacsr.data.photos import PhotoSet, check_photos, without
from vacsr.data.problems import OnError
from vacsr.data.shards import load_shards, write_shards
from vacsr.data.spec import SCHEMES, Spec, parse_spec
from vacsr.data.synthetic import load_synthetic
from vacsr.errors import UsageError

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
    return _LOADERS[parsed.scheme](parsed, on_error)


def check_captioned(spec: str) -> None:
    """Refuse a SPEC of photos without captions, where these are needed."""
    parsed = parse_spec(spec)
    if parsed.scheme == "photos":
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
    return _LOADERS[parsed.scheme](parsed, on_error)


def images_spec(spec: str) -> str:
    """A folder's plain path as ``photos:PATH``; a SPEC as it is.

    >>> images_spec("."), images_spec("scenes:images=4")
    ('photos:.', 'scenes:images=4')
    """
    return spec if spec.partition(":")[0] in SCHEMES or not os.path.isdir(spec) else f"photos:{spec}"


def _load_features(spec: Spec, _on_error: OnError) -> PairSet:
    options = spec.options
    return load_features(
        spec.path, captions=options.get("captions"), text=options.get("text"), split=options.get("split")
    )


def _load_scenes(spec: Spec, _on_error: OnError) -> PhotoSet:
    from vacsr.data.scenes import load_scenes

    return load_scenes(spec).pairs


_LOADERS: Mapping[str, Callable[[Spec, OnError], PairSet | PhotoSet]] = {
    "features": _load_features,
    "synthetic": lambda spec, _on_error: load_synthetic(spec).pairs,
    "coco": load_coco,
    "flickr8k": load_flickr8k,
    "csv": load_table,
    "jsonl": load_table,
    "folder": load_folder,
    "photos": load_plain,
    "shards": load_shards,
    "scenes": _load_scenes,
}
