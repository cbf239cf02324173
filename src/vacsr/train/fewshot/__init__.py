"""Few-shot training: ``run_fewshot`` for a whole run folder, ``load_fewshot`` to use what it left."""

from vacsr.train.fewshot.reading import fewshot_from, layered_fewshot, read_fewshot
from vacsr.train.fewshot.run import FewshotRecipeRun, evaluate_fewshot, run_fewshot
from vacsr.train.fewshot.saved import LoadedFewshot, Predicted, load_fewshot

__all__ = [
    "FewshotRecipeRun",
    "LoadedFewshot",
    "Predicted",
    "evaluate_fewshot",
    "fewshot_from",
    "layered_fewshot",
    "load_fewshot",
    "read_fewshot",
    "run_fewshot",
]
