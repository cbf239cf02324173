"""A method on its CLIP, on the right device."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.config import BackboneConfig
from vacsr.config.fewshot import AnyFewshotConfig
from vacsr.methods.fewshot import ClassSet, ClipModel, FewshotMethod, build_fewshot


class Built(NamedTuple):
    """A method, ready to train or to load weights into."""

    method: FewshotMethod
    transform: PhotoTransform
    """How photos are made for its image tower: the shorter side to the tower's size, then the centre."""
    origin: dict[str, str]
    """The CLIP it stands on: name, preprocessing and a hash of the weights before anything learned."""


def build(
    method: AnyFewshotConfig, backbone: BackboneConfig, *, classes: ClassSet, seed: int, device: torch.device
) -> Built:
    """Fresh weights come from ``seed``; torch's own generator is not touched."""
    clip = ClipModel.from_config(backbone)
    origin = asdict(clip.backbone.provenance())
    transform = replace(clip.backbone.transform, resize="center")
    generator = torch.Generator().manual_seed(seed)
    made = build_fewshot(clip.to(device), method, classes=classes, generator=generator)
    return Built(made.to(device), transform, origin)
