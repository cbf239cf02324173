"""The methods that the paper compares with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import MethodConfig
from vacsr.config.gaussians import PcmeConfig


class SigmoidConfig(MethodConfig):
    """Sigmoid loss on a·cos+b over all pairs (SigLIP)."""

    name: Literal["sigmoid"] = "sigmoid"
    """Of the method."""
    scale: float = 10.0
    """a at the start."""
    bias: float = -10.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""


class InfoNCEConfig(MethodConfig):
    """Two-way cross entropy over scaled cosines (CLIP)."""

    name: Literal["infonce"] = "infonce"
    """Of the method."""
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, 1/0.07; the paper's preset starts at 1."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    positives: Literal["diagonal", "ids"] = "diagonal"
    """CLIP's target is the row's own caption; `ids` spreads it over all captions of the image."""


class VseConfig(MethodConfig):
    """Hinge loss with the hardest negatives (VSE∞)."""

    name: Literal["vse"] = "vse"
    """Of the method."""
    margin: Annotated[float, Field(ge=0)] = 0.2
    """By how much a match should score above every other pair."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs in which all negatives count, not the hardest alone."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over the batch's images and captions: summed, or summed and divided by B."""


class DaaConfig(MethodConfig):
    """Another method's loss, and ranks that agree with the words of the captions (DAA)."""

    name: Literal["daa"] = "daa"
    """Of the method."""
    base: Annotated[PcmeConfig | VseConfig | InfoNCEConfig | SigmoidConfig, Field(discriminator="name")] = PcmeConfig()
    """The method that is trained beside it and that scores."""
    weight: Annotated[float, Field(ge=0)] = 1000.0
    """w of w·(1 − ASP), in each direction."""
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """T of the soft ranks."""
    rarity: Literal["captions", "images"] = "captions"
    """A word is rare that few captions have (smoothed, as the public code counts), or that few images have (CIDEr)."""
