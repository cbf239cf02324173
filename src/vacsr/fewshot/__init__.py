"""Few-shot recognition: ``run_fewshot`` fills a run folder, ``load_fewshot`` loads the model that it left."""

from vacsr.fewshot.config import FewshotRecipe, fewshot_from, layered_fewshot, read_fewshot
from vacsr.fewshot.model import FewshotModel, Predicted, load_fewshot
from vacsr.fewshot.run import FewshotRun, check_fewshot, evaluate_fewshot, run_fewshot

__all__ = [
    "FewshotModel",
    "FewshotRecipe",
    "FewshotRun",
    "Predicted",
    "check_fewshot",
    "evaluate_fewshot",
    "fewshot_from",
    "layered_fewshot",
    "load_fewshot",
    "read_fewshot",
    "run_fewshot",
]
