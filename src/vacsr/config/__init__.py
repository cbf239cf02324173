"""Every choice as a typed, frozen field with its reason. How recipes are read is in :mod:`vacsr.recipes`."""

from vacsr.config.backbone import AugmentConfig, BackboneConfig, HeadConfig
from vacsr.config.base import Config, MethodConfig
from vacsr.config.data import DataConfig, NoiseConfig
from vacsr.config.gaussians import MixConfig, PcmeConfig, PcmeppConfig
from vacsr.config.methods import (
    DaaConfig,
    InfoNCEConfig,
    SigmoidConfig,
    VseConfig,
)
from vacsr.config.noisy import BicroConfig, NcrConfig, NpcConfig
from vacsr.config.recipe import EvaluateConfig, Recipe
from vacsr.config.train import TowersConfig, TrainConfig
from vacsr.config.vacsr import AdapterConfig, ObjectiveConfig, VacsrConfig

__all__ = [
    "AdapterConfig",
    "AugmentConfig",
    "BackboneConfig",
    "BicroConfig",
    "Config",
    "DaaConfig",
    "DataConfig",
    "EvaluateConfig",
    "HeadConfig",
    "InfoNCEConfig",
    "MethodConfig",
    "MixConfig",
    "NcrConfig",
    "NoiseConfig",
    "NpcConfig",
    "ObjectiveConfig",
    "PcmeConfig",
    "PcmeppConfig",
    "Recipe",
    "SigmoidConfig",
    "TowersConfig",
    "TrainConfig",
    "VacsrConfig",
    "VseConfig",
]
