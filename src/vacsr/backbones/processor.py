"""The photo transform a checkpoint's own image processor would apply, read from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vacsr.backbones.hub import processor_settings
from vacsr.backbones.preprocess import IMAGENET_MEAN, IMAGENET_STD, PhotoTransform
from vacsr.backbones.resample import Resample
from vacsr.config import BackboneConfig

_PIL_FILTERS: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers, as the settings hold them


def own_transform(source: str, config: BackboneConfig, *, usual: PhotoTransform) -> PhotoTransform:
    """The transform of a folder or id, ``usual`` where it says nothing, changed as ``config`` asks."""
    return transform_from(processor_settings(source) if source else {}, config, usual=usual)


def transform_from(settings: Mapping[str, Any], config: BackboneConfig, *, usual: PhotoTransform) -> PhotoTransform:
    """The same from settings at hand. A square is cut from a shorter side only where the processor does so."""
    crop, size = settings.get("crop_size"), settings.get("size")
    cut = crop is not None and settings.get("do_center_crop", True)
    own = _side(crop if cut else size) or usual.size
    mean, std = settings.get("image_mean") or usual.mean, settings.get("image_std") or usual.std
    if config.pixel_stats == "imagenet":
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    side = config.image_size or own
    short = max(side, round(side * _side(size) / own)) if cut else 0
    return replace(
        usual,
        size=side,
        mean=tuple(mean),
        std=tuple(std),
        resample=_PIL_FILTERS.get(settings.get("resample", 0), usual.resample),
        resize=config.resize,
        short=short if config.resize == "center" else 0,
    )


def _side(size: Any) -> int:
    """A processor's notion of a size, as one number; 0 for none."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or size.get("height")
    return int(size or 0)
