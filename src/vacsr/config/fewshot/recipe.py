"""A whole few-shot run."""

from __future__ import annotations

from typing import Literal

from vacsr.config import BackboneConfig
from vacsr.config.base import Config
from vacsr.config.fewshot.data import FewshotDataConfig
from vacsr.config.fewshot.methods import FewshotMethodConfig
from vacsr.config.fewshot.search import SearchConfig
from vacsr.config.fewshot.train import FewshotEvaluateConfig, FewshotTrainConfig
from vacsr.config.fewshot.vacsr import FewshotVacsrConfig


class FewshotRecipe(Config):
    """A whole few-shot run."""

    task: Literal["fewshot"] = "fewshot"
    """Tells these recipes from those of `vacsr train`."""
    preset: Literal["paper", "none"] = "paper"
    """`paper` takes what each method's paper sets for this data set and protocol; fields that the recipe writes win."""
    data: FewshotDataConfig = FewshotDataConfig()
    """What to learn from and where to test."""
    backbone: BackboneConfig = BackboneConfig(spec="clip:vit-b16")
    """A CLIP (`spec: clip:…`), or a run of `vacsr train` (`start: RUN`). Pooling and outputs are CLIP's own."""
    method: FewshotMethodConfig = FewshotVacsrConfig()
    """What learns; in a recipe also `preset: paper`, which for vacsr is the adapter and the loss as printed."""
    search: SearchConfig = SearchConfig()
    """What is chosen on the validation shots before the run proper."""
    train: FewshotTrainConfig = FewshotTrainConfig()
    """How it learns."""
    evaluate: FewshotEvaluateConfig = FewshotEvaluateConfig()
    """What is reported."""
