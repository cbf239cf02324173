"""Few-shot recognition by name: all methods on the same frozen CLIP."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from vacsr.config.base import Config
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch
from vacsr.methods.fewshot.clip import ClipModel

__all__ = ["METHODS", "ClassSet", "ClipModel", "FewshotMethod", "ShotBatch", "build_fewshot"]

METHODS = {
    "zeroshot": "Zeroshot",
    "coop": "Coop",
    "cocoop": "Cocoop",
    "maple": "Maple",
    "coprompt": "Coprompt",
    "mma": "Mma",
    "mmrl": "Mmrl",
    "clipood": "Clipood",
    "vacsr": "FewshotVacsr",
}
"""A config's ``name``, which is also the file, and the class in it."""


def build_fewshot(clip: ClipModel, config: Config, *, classes: ClassSet, generator: torch.Generator) -> FewshotMethod:
    """The method that a config describes, ready to train on ``classes``; fresh weights are drawn from ``generator``."""
    name: str = getattr(config, "name", "")
    kind: Any = getattr(import_module(f"{__name__}.{name}"), METHODS[name])
    method: FewshotMethod = kind(clip, config, classes=classes, generator=generator)
    return method
