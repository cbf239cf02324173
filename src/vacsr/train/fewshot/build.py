"""A method on its CLIP, on the right device."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import nn

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
    """The CLIP it stands on: name, preprocessing and a hash of its weights and scale before anything learned."""


def build(
    method: AnyFewshotConfig, backbone: BackboneConfig, *, classes: ClassSet, seed: int, device: torch.device
) -> Built:
    """Fresh weights come from ``seed``; torch's own generator is not touched."""
    clip = ClipModel.from_config(backbone)
    origin = _origin(clip)
    transform = replace(clip.backbone.transform, resize="center")
    generator = torch.Generator().manual_seed(seed)
    made = build_fewshot(clip.to(device), method, classes=classes, generator=generator)
    return Built(made.to(device), transform, origin)


def _origin(clip: ClipModel) -> dict[str, str]:
    """Where the towers are from; with heads of a trained start, the hash is of these and of its scale too."""
    origin = asdict(clip.backbone.provenance())
    heads = sorted(nn.ModuleList([clip.image_map, clip.text_map]).state_dict().items())
    if not heads:
        return origin
    digest = hashlib.sha256(f"{origin['revision']} {clip.scale!r}".encode())
    for name, tensor in heads:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return {**origin, "revision": digest.hexdigest()[:12]}
