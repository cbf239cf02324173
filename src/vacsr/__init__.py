"""vacsr: image-text similarity with a grade and an uncertainty.

The public names below are loaded when first used, so that ``vacsr --help`` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vacsr.adapter import FoldedAdapter, VariationalAdapter
    from vacsr.compare import compare
    from vacsr.config import BackboneConfig, HeadConfig, Recipe, TrainConfig
    from vacsr.data import PairSet, Provenance, load_pairs
    from vacsr.evaluate.agreement import read_judgments
    from vacsr.evaluate.report import RetrievalReport, evaluate_retrieval
    from vacsr.model import MatchingModel, load_model
    from vacsr.objective import VacsrObjective
    from vacsr.scoring import PairScorer, PairScores, pair_scores
    from vacsr.search import Searcher, open_index
    from vacsr.search.audit import audit
    from vacsr.train import Run, fit, run_recipe

__version__ = "0.1.0"

_HOMES = {
    "adapter": ("FoldedAdapter", "VariationalAdapter"),
    "compare": ("compare",),
    "config": ("BackboneConfig", "HeadConfig", "Recipe", "TrainConfig"),
    "data": ("PairSet", "Provenance", "load_pairs"),
    "evaluate.agreement": ("read_judgments",),
    "evaluate.report": ("RetrievalReport", "evaluate_retrieval"),
    "model": ("MatchingModel", "load_model"),
    "objective": ("VacsrObjective",),
    "scoring": ("PairScorer", "PairScores", "pair_scores"),
    "search": ("Searcher", "open_index"),
    "search.audit": ("audit",),
    "train": ("Run", "fit", "run_recipe"),
}

_PACKAGES = ("backbones", "config", "data", "evaluate", "fewshot", "methods", "scoring", "search", "serve", "train")

__all__ = [
    "BackboneConfig", "FoldedAdapter", "HeadConfig", "MatchingModel", "PairScorer", "PairScores", "PairSet",
    "Provenance", "Recipe", "RetrievalReport", "Run", "Searcher", "TrainConfig", "VacsrObjective", "VariationalAdapter",
    "__version__", "audit", "compare", "evaluate_retrieval", "fit", "load_model", "load_pairs", "open_index",
    "pair_scores", "read_judgments", "run_recipe",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"vacsr.{module}"), name)
    if name in _PACKAGES:
        return import_module(f"vacsr.{name}")
    raise AttributeError(f"module 'vacsr' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
