"""Every choice as a typed, frozen field with its reason. Recipes are read and written by :mod:`vacsr.config.io`."""

from vacsr.config.base import Config, MethodConfig
from vacsr.config.recipe import (
    AugmentConfig,
    BackboneConfig,
    DataConfig,
    EvaluateConfig,
    HeadConfig,
    MixConfig,
    NoiseConfig,
    Recipe,
    Share,
    TowersConfig,
    TrainConfig,
)

__all__ = [
    "AugmentConfig",
    "BackboneConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "HeadConfig",
    "MethodConfig",
    "MixConfig",
    "NoiseConfig",
    "Recipe",
    "Share",
    "TowersConfig",
    "TrainConfig",
]
