"""The methods that the paper compares with, all methods together, and their presets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vacsr.config.base import Config
from vacsr.config.vacsr import VacsrConfig


class SigmoidConfig(Config):
    """Sigmoid loss on a·cos+b over all pairs (SigLIP)."""

    name: Literal["sigmoid"] = "sigmoid"
    """Tells the methods apart."""
    scale: float = 10.0
    """a at the start."""
    bias: float = -10.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""


class InfoNCEConfig(Config):
    """Two-way cross entropy over scaled cosines (CLIP)."""

    name: Literal["infonce"] = "infonce"
    """Tells the methods apart."""
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, 1/0.07; the paper's preset starts at 1."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    positives: Literal["diagonal", "ids"] = "diagonal"
    """CLIP's target is the row's own caption; `ids` spreads it over all captions of the image."""


AnyMethodConfig = VacsrConfig | SigmoidConfig | InfoNCEConfig
MethodConfig = Annotated[AnyMethodConfig, Field(discriminator="name")]


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "vacsr": {
        "default": {},
        "paper": {"adapter": {"residual": "none"}, "objective": {"cosine_weight": 0.0, "correction": 0.0}},
    },
    "sigmoid": {"default": {}, "paper": {}},
    "infonce": {"default": {}, "paper": {"scale": 1.0}},
}
"""Fields a preset sets on top of the class defaults; `method: {name: vacsr, preset: paper}` in a recipe."""
