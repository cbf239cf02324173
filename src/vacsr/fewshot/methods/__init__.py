"""Few-shot methods by name, all on the same frozen CLIP. To add one, write its file and add its line here."""

from __future__ import annotations

import torch

from vacsr.config.base import MethodConfig, method_entry
from vacsr.fewshot.methods.base import ClassSet as ClassSet
from vacsr.fewshot.methods.base import FewshotMethod as FewshotMethod
from vacsr.fewshot.methods.base import ShotBatch as ShotBatch
from vacsr.fewshot.methods.base import Zeroshot as Zeroshot
from vacsr.fewshot.methods.clip import ClipModel as ClipModel
from vacsr.fewshot.methods.clipood import Clipood as Clipood
from vacsr.fewshot.methods.coop import Cocoop as Cocoop
from vacsr.fewshot.methods.coop import Coop as Coop
from vacsr.fewshot.methods.maple import Coprompt as Coprompt
from vacsr.fewshot.methods.maple import Maple as Maple
from vacsr.fewshot.methods.mma import Mma as Mma
from vacsr.fewshot.methods.mmrl import Mmrl as Mmrl
from vacsr.fewshot.methods.vacsr import FewshotVacsr as FewshotVacsr


def build_fewshot(
    clip: ClipModel, config: MethodConfig, *, classes: ClassSet, generator: torch.Generator
) -> FewshotMethod:
    """The method that a config describes, to train on ``classes``; new weights are drawn from ``generator``."""
    kind = method_entry(config.name, task="fewshot").method
    method: FewshotMethod = kind(clip, config, classes=classes, generator=generator)
    return method
