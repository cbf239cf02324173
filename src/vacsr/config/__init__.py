"""Every choice as a typed, frozen field with its reason. Recipes are read and written by :mod:`vacsr.config.io`."""

from vacsr.config.base import Config as Config
from vacsr.config.base import MethodConfig as MethodConfig
from vacsr.config.recipe import AugmentConfig as AugmentConfig
from vacsr.config.recipe import BackboneConfig as BackboneConfig
from vacsr.config.recipe import DataConfig as DataConfig
from vacsr.config.recipe import EvaluateConfig as EvaluateConfig
from vacsr.config.recipe import HeadConfig as HeadConfig
from vacsr.config.recipe import LoraConfig as LoraConfig
from vacsr.config.recipe import MixConfig as MixConfig
from vacsr.config.recipe import NoiseConfig as NoiseConfig
from vacsr.config.recipe import Recipe as Recipe
from vacsr.config.recipe import Share as Share
from vacsr.config.recipe import TowersConfig as TowersConfig
from vacsr.config.recipe import TrainConfig as TrainConfig
