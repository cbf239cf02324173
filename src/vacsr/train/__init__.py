"""Training: ``fit`` and what it returns; ``run_recipe`` for a whole run folder."""

from vacsr.train.api import fit
from vacsr.train.loop import Run
from vacsr.train.recipe import run_recipe

__all__ = ["Run", "fit", "run_recipe"]
