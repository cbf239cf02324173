"""Few-shot methods by name, all on the same frozen CLIP. To add one, write its file and import it here."""

from __future__ import annotations

import torch

from vacsr.config.base import MethodConfig, method_entry
from vacsr.fewshot.methods import clipood, mma, mmrl, prompts, vacsr  # noqa: F401  they register themselves
from vacsr.fewshot.methods.base import ClassSet as ClassSet
from vacsr.fewshot.methods.base import FewshotMethod as FewshotMethod
from vacsr.fewshot.methods.base import ShotBatch as ShotBatch
from vacsr.fewshot.methods.clip import ClipModel as ClipModel


def build_fewshot(
    clip: ClipModel, config: MethodConfig, *, classes: ClassSet, generator: torch.Generator
) -> FewshotMethod:
    """The method that a config describes, to train on ``classes``; new weights are drawn from ``generator``."""
    kind = method_entry(config.name, task="fewshot").method
    method: FewshotMethod = kind(clip, config, classes=classes, generator=generator)
    return method
