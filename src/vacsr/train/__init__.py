"""Training: ``fit`` and what it returns; ``run_recipe`` for a whole run folder."""

from vacsr.train.loop import Run, fit
from vacsr.train.recipe import run_recipe

__all__ = ["Run", "fit", "run_recipe"]
