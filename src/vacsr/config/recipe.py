"""A whole run, and what it reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vacsr.config.backbone import BackboneConfig
from vacsr.config.base import Config, RetrievalMethod, method_entry
from vacsr.config.data import DataConfig
from vacsr.config.train import TrainConfig


class EvaluateConfig(Config):
    """What `report.json` holds after training."""

    splits: tuple[str, ...] = ("dev", "test")
    """Splits of data.pairs to report; those absent are left out."""
    protocols: tuple[str, ...] = ("flickr",)
    """`flickr`: the whole split in one gallery. On COCO's test images: `coco-1k`, `coco-5k`, `cxc`, `eccv`."""
    judgments: tuple[str, ...] = ()
    """Files of human grades for the report."""
    ties: Literal["stable", "pessimistic"] = "stable"
    """Equal scores in index order, or every wrong item before the right one."""
    bins: Literal["count", "equal"] = "count"
    """Ten uncertainty bins of equal count, as the paper's own figure has them, or of equal width, as it says."""
    posthoc: Literal["none", "laplace", "laplace-coupled", "cosine"] = "none"
    """Uncertainty for a method that scores by a cosine: from a Laplace approximation of its heads, or 1 − cosine."""


class Recipe(Config):
    """A whole run."""

    data: DataConfig = DataConfig()
    """What to learn from."""
    backbone: BackboneConfig = BackboneConfig()
    """From inputs to the shared space."""
    method: RetrievalMethod = Field(default_factory=lambda: method_entry("vacsr").config(name="vacsr"))
    """Head and loss; in a recipe also `preset`."""
    train: TrainConfig = TrainConfig()
    """How to learn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What to report."""
