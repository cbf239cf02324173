"""Every choice as a typed, frozen field with its reason. How recipes are read is in :mod:`vacsr.recipes`."""

from vacsr.config.backbone import AugmentConfig, BackboneConfig, HeadConfig
from vacsr.config.base import Config
from vacsr.config.data import DataConfig, NoiseConfig
from vacsr.config.methods import PRESETS, AnyMethodConfig, InfoNCEConfig, MethodConfig, SigmoidConfig
from vacsr.config.recipe import EvaluateConfig, Recipe
from vacsr.config.train import TowersConfig, TrainConfig
from vacsr.config.vacsr import AdapterConfig, ObjectiveConfig, VacsrConfig

__all__ = [
    "PRESETS",
    "AdapterConfig",
    "AnyMethodConfig",
    "AugmentConfig",
    "BackboneConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "HeadConfig",
    "InfoNCEConfig",
    "MethodConfig",
    "NoiseConfig",
    "ObjectiveConfig",
    "Recipe",
    "SigmoidConfig",
    "TowersConfig",
    "TrainConfig",
    "VacsrConfig",
]
