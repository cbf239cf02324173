"""Pairs of images and captions, by name: ``load_pairs("features:FILE,captions=FILE", split="train")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vacsr.data.features import load_features
from vacsr.data.pairs import PairSet, Provenance
from vacsr.data.photos import PhotoSet
from vacsr.data.spec import Spec, parse_spec
from vacsr.data.synthetic import load_synthetic

__all__ = ["PairSet", "PhotoSet", "Provenance", "load_pairs", "parse_spec"]


def load_pairs(spec: str, *, captions: str | Path | None = None, split: str | None = None) -> PairSet:
    """Load the pairs that a SPEC names; ``captions`` and ``split`` add to its options or replace them.

    ``features:FILE[,captions=FILE][,text=FILE][,split=S]`` reads cached embeddings;
    ``synthetic:[images=N][,held_out=N][,per_image=N][,noise=X][,seed=N][,split=S]`` generates a small world.
    ``split`` None or "all" gives everything.

    >>> load_pairs("synthetic:images=40,seed=1", split="train").describe()
    'train: 40 images (64 dims), 200 captions (48 dims), 5 per image, backbone synthetic:seed=1'
    """
    given = {"captions": None if captions is None else str(captions), "split": split}
    parsed = parse_spec(spec).with_options(given)
    return _LOADERS[parsed.scheme](parsed)


def _load_features(spec: Spec) -> PairSet:
    options = spec.options
    return load_features(
        spec.path, captions=options.get("captions"), text=options.get("text"), split=options.get("split")
    )


_LOADERS: Mapping[str, Callable[[Spec], PairSet]] = {
    "features": _load_features,
    "synthetic": lambda spec: load_synthetic(spec).pairs,
}
