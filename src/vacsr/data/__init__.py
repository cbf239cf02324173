"""Pairs of images and captions, by SPEC: ``load_pairs("csv:FILE", split="train")``, ``load_images("photos:DIR")``.

A recipe's data section says how they are read: :func:`read_split`.
"""

import os
import warnings
from pathlib import Path

from vacsr.config import DataConfig
from vacsr.config.io import parse
from vacsr.data import arrow, coco, features, flickr, scenes, shards, synthetic, tables  # noqa: F401, each registers its formats
from vacsr.data.formats import FORMATS, OnError, parse_spec
from vacsr.data.pairs import PairSet
from vacsr.data.photos import PhotoSet, without_unreadable
from vacsr.data.shards import write_shards
from vacsr.errors import NoSuchSplit, UsageError
from vacsr.provenance import Provenance

__all__ = [
    "PairSet", "PhotoSet", "Provenance", "check_captioned", "images_spec", "load_images", "load_pairs", "parse_spec",
    "read_named", "read_split", "read_split_or_all", "without_unreadable", "write_shards",
]  # fmt: skip


def load_pairs(
    spec: str, *, captions: str | Path | None = None, split: str | None = None, on_error: OnError = "fail"
) -> PairSet | PhotoSet:
    """Load the pairs that a SPEC names; ``captions`` and ``split`` add to its options or replace them.

    Features (:class:`PairSet`): ``features:FILE[,captions=FILE][,text=FILE]`` reads cached embeddings, ``synthetic:``
    generates them. Photos (:class:`PhotoSet`): ``coco:ROOT``, ``flickr8k:ROOT``, ``csv:FILE``, ``jsonl:FILE``,
    ``parquet:FILE``, ``hf:DATASET``, ``folder:DIR``, ``shards:PATTERN``, and ``scenes:``, which are drawn. ``split``
    None or "all" gives everything.
    ``photos:DIR`` has no captions and is refused, see :func:`load_images`.

    ``on_error``: missing photos and blank captions are an error, or with "skip" are left out with a warning and listed
    in ``PhotoSet.skipped``. Photos are decoded later; :func:`without_unreadable` drops those that cannot be.

    >>> load_pairs("synthetic:images=40,seed=1", split="train").describe()
    'train: 40 images (64 dims), 200 captions (48 dims), 5 per image, backbone synthetic:seed=1'
    """
    parsed = parse_spec(spec).with_options({"captions": None if captions is None else str(captions), "split": split})
    check_captioned(spec)
    pairs: PairSet | PhotoSet = parsed.format.load(parsed, on_error)
    return pairs


def check_captioned(spec: str) -> None:
    """Refuse a SPEC of photos without captions, where these are needed."""
    parsed = parse_spec(spec)
    if not parsed.format.captioned:
        message = f"{spec} has photos without captions, and captions are needed here"
        action = f"write them beside the photos (a.jpg, a.txt), then folder:{parsed.path}; to index photos alone"
        raise UsageError(f"{message} — {action}: vacsr index add INDEX --run RUN --pairs {spec}")


def read_split(config: DataConfig, split: str) -> PairSet | PhotoSet:
    """One split of the data. Under `skip` every photo is decoded once, so that none fails in the middle of training."""
    pairs = load_pairs(config.pairs, split=split, on_error=config.on_error)
    if isinstance(pairs, PairSet) or config.on_error == "fail":
        return pairs
    return without_unreadable(pairs, workers=config.workers)


def read_split_or_all(config: DataConfig, split: str | None, *, default: str) -> PairSet | PhotoSet:
    """The split that is named; without a name ``default``, or everything, with a warning, if the data lack it."""
    if split:
        return read_split(config, split)
    try:
        return read_split(config, default)
    except NoSuchSplit:
        pairs = read_split(config, "all")
    message = f"the data have no split '{default}': taking all {len(pairs.image_ids):,} images"
    warnings.warn(f"{message}, including any that the model was trained on — choose one with --split", stacklevel=2)
    return pairs


def read_named(pairs: str, split: str | None, *, default: str, on_error: OnError = "fail") -> PairSet | PhotoSet:
    """Data that a user names: the split asked for, else the SPEC's own, else ``default``, else everything."""
    chosen = split or parse_spec(pairs).options.get("split")
    return read_split_or_all(parse(DataConfig, {"pairs": pairs, "on_error": on_error}), chosen, default=default)


def load_images(spec: str, *, split: str | None = None, on_error: OnError = "fail") -> PairSet | PhotoSet:
    """Load the images that a SPEC names, with captions if it has any: also ``photos:DIR``, or just ``DIR``."""
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
