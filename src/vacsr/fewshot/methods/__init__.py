"""Few-shot methods by name, all on the same frozen CLIP. To add one, write its file and add its line here."""

from __future__ import annotations

import torch

from vacsr.config.base import Config
from vacsr.fewshot.methods.base import ClassSet, FewshotMethod, ShotBatch, Zeroshot
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.clipood import Clipood
from vacsr.fewshot.methods.cocoop import Cocoop
from vacsr.fewshot.methods.coop import Coop
from vacsr.fewshot.methods.coprompt import Coprompt
from vacsr.fewshot.methods.maple import Maple
from vacsr.fewshot.methods.mma import Mma
from vacsr.fewshot.methods.mmrl import Mmrl
from vacsr.fewshot.methods.vacsr import FewshotVacsr

__all__ = ["METHODS", "ClassSet", "ClipModel", "FewshotMethod", "ShotBatch", "build_fewshot"]

METHODS: dict[str, type[FewshotMethod]] = {
    "zeroshot": Zeroshot,
    "coop": Coop,
    "cocoop": Cocoop,
    "maple": Maple,
    "coprompt": Coprompt,
    "mma": Mma,
    "mmrl": Mmrl,
    "clipood": Clipood,
    "vacsr": FewshotVacsr,
}


def build_fewshot(clip: ClipModel, config: Config, *, classes: ClassSet, generator: torch.Generator) -> FewshotMethod:
    """The method that a config describes, to train on ``classes``; new weights are drawn from ``generator``."""
    return METHODS[config.name](clip, config, classes=classes, generator=generator)  # type: ignore[attr-defined]
