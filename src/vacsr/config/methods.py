"""The methods that the paper compares with, all methods together, and their presets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vacsr.config.base import Config
from vacsr.config.gaussians import PcmeConfig, PcmeppConfig
from vacsr.config.noisy import BicroConfig, NcrConfig, NpcConfig
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


class VseConfig(Config):
    """Hinge loss with the hardest negatives (VSE∞)."""

    name: Literal["vse"] = "vse"
    """Tells the methods apart."""
    margin: Annotated[float, Field(ge=0)] = 0.2
    """By how much a match should score above every other pair."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs in which all negatives count, not the hardest alone."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over the batch's images and captions: summed, or summed and divided by B."""


class DaaConfig(Config):
    """Another method's loss, and ranks that agree with the words of the captions (DAA)."""

    name: Literal["daa"] = "daa"
    """Tells the methods apart."""
    base: Annotated[PcmeConfig | VseConfig | InfoNCEConfig | SigmoidConfig, Field(discriminator="name")] = PcmeConfig()
    """The method that is trained beside it and that scores."""
    weight: Annotated[float, Field(ge=0)] = 1000.0
    """w of w·(1 − ASP), in each direction."""
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """T of the soft ranks."""
    rarity: Literal["captions", "images"] = "captions"
    """A word is rare that few captions have (smoothed, as the public code counts), or that few images have (CIDEr)."""


AnyMethodConfig = (
    VacsrConfig
    | SigmoidConfig
    | InfoNCEConfig
    | VseConfig
    | PcmeConfig
    | PcmeppConfig
    | DaaConfig
    | NcrConfig
    | BicroConfig
    | NpcConfig
)
MethodConfig = Annotated[AnyMethodConfig, Field(discriminator="name")]


_DAA_BASE = {
    **{"name": "pcme", "samples": 5, "scale": 15.0, "shift": 15.0},
    **{"vib_weight": 1e-5, "vib_reduction": "sum"},
}
"""PCME as DAA's own code has it."""
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "vacsr": {
        "default": {},
        "paper": {"adapter": {"residual": "none"}, "objective": {"cosine_weight": 0.0, "correction": 0.0}},
    },
    "sigmoid": {"default": {}, "paper": {}},
    "infonce": {"default": {}, "paper": {"scale": 1.0}},
    "vse": {"default": {}, "paper": {"warmup_epochs": 2}},
    "pcme": {"default": {}, "paper": {}},
    "pcmepp": {"default": {}, "paper": {"reduction": "mean"}},
    "daa": {"default": {}, "paper": {"base": _DAA_BASE}},
    "ncr": {"default": {}, "paper": {"warmup": 0.35, "noisy_from": 0.5}},
    "bicro": {
        "default": {},
        "paper": {"warmup": 0.35, "warmup_keep": 0.3, "noisy_from": 0.5, "mixture": "beta", "discard": False},
    },
    "npc": {"default": {}, "paper": {"refresh": False, "look_ahead": 0.02}},
}
"""Fields a preset sets on top of the class defaults; `method: {name: vacsr, preset: paper}` in a recipe."""
