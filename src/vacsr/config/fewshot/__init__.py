"""Recipes of few-shot recognition, every choice a typed field with its reason."""

from vacsr.config.fewshot.adapters import MmaConfig, MmrlConfig
from vacsr.config.fewshot.data import FewshotDataConfig
from vacsr.config.fewshot.methods import FEWSHOT_METHODS, AnyFewshotConfig, FewshotMethodConfig
from vacsr.config.fewshot.prompts import CocoopConfig, CoopConfig, ZeroshotConfig
from vacsr.config.fewshot.published import published
from vacsr.config.fewshot.recipe import FewshotRecipe
from vacsr.config.fewshot.search import SearchConfig
from vacsr.config.fewshot.train import FewshotEvaluateConfig, FewshotTrainConfig
from vacsr.config.fewshot.tuning import ClipoodConfig, CopromptConfig, MapleConfig
from vacsr.config.fewshot.vacsr import VACSR_READINGS, FewshotVacsrConfig

__all__ = [
    "FEWSHOT_METHODS",
    "VACSR_READINGS",
    "AnyFewshotConfig",
    "ClipoodConfig",
    "CocoopConfig",
    "CoopConfig",
    "CopromptConfig",
    "FewshotDataConfig",
    "FewshotEvaluateConfig",
    "FewshotMethodConfig",
    "FewshotRecipe",
    "FewshotTrainConfig",
    "FewshotVacsrConfig",
    "MapleConfig",
    "MmaConfig",
    "MmrlConfig",
    "SearchConfig",
    "ZeroshotConfig",
    "published",
]
