"""Training: ``fit`` and what it returns; ``run_recipe`` for a whole run folder."""

from vacsr.train.callbacks import Callback
from vacsr.train.run import fit, run_recipe
from vacsr.train.trainer import Run, Task, Trainer

__all__ = ["Callback", "Run", "Task", "Trainer", "fit", "run_recipe"]
