"""Pairs of images and captions, by name: ``load_pairs("features:FILE,captions=FILE", split="train")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vacsr.data.coco import load_coco
from vacsr.data.features import load_features
from vacsr.data.flickr import load_flickr8k
from vacsr.data.own import load_folder, load_table
from vacsr.data.pairs import PairSet, Provenance
from vacsr.data.photos import PhotoSet, check_photos, without
from vacsr.data.problems import OnError
from vacsr.data.shards import load_shards, write_shards
from vacsr.data.spec import Spec, parse_spec
from vacsr.data.synthetic import load_synthetic

__all__ = [
    "PairSet",
    "PhotoSet",
    "Provenance",
    "check_photos",
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
    that loads it. ``split`` None or "all" gives everything.

    ``on_error``: photos that are absent and captions without text are an error that counts them, or with "skip" are
    left out with a warning and listed in ``PhotoSet.skipped``. What a photo's file holds shows when it is decoded, see
    :func:`check_photos`. Features know no such problems.

    >>> load_pairs("synthetic:images=40,seed=1", split="train").describe()
    'train: 40 images (64 dims), 200 captions (48 dims), 5 per image, backbone synthetic:seed=1'
    """
    given = {"captions": None if captions is None else str(captions), "split": split}
    parsed = parse_spec(spec).with_options(given)
    return _LOADERS[parsed.scheme](parsed, on_error)


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
    "shards": load_shards,
    "scenes": _load_scenes,
}
