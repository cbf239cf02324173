"""The demo's training: one process a method, one display for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from vacsr.config import Recipe
from vacsr.demo.workers import Job, Tell, run_jobs
from vacsr.model import MatchingModel
from vacsr.train.callbacks import Callback, Row
from vacsr.train.data import training_data
from vacsr.train.retrieval import retrieval_task
from vacsr.train.trainer import Trainer

_TELL_EVERY = 10  # steps


class Progress(NamedTuple):
    """How far a method has come."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all."""
    epoch: int
    epochs: int
    dev_rsum: float | None = None
    """At the end of an epoch."""
    rate: float | None = None
    """Steps a second, at the end of an epoch."""


START = "start"
"""What the towers' first training is called in the display."""


def train_methods(
    recipes: Mapping[str, Recipe], *, start: Recipe | None = None, listen: Callable[[str, Progress], None]
) -> dict[str, MatchingModel]:
    """Train every recipe at once, from where ``start`` ended if it is given; ``listen`` hears the progress of each.

    All start together, even on fewer cores, which ends sooner than a queue. vacsr's steps take twice as long as the
    others', so these give way to it: it has a core to itself, and they share the other.
    """
    with TemporaryDirectory(prefix="vacsr-demo-") as scratch:
        folders = {name: Path(scratch) / name for name in (START, *recipes)}
        if start is not None:
            run_jobs([Job(START, train_in_worker, (start, folders[START]), threads=2)], listen=listen)
            recipes = {name: starting_from(folders[START], recipe) for name, recipe in recipes.items()}
        jobs = [
            Job(name, train_in_worker, (recipe, folders[name]), gives_way=recipe.method.name != "vacsr")
            for name, recipe in recipes.items()
        ]
        run_jobs(jobs, listen=listen)
        return {name: MatchingModel.from_pretrained(folders[name]) for name in recipes}


def starting_from(folder: Path, recipe: Recipe) -> Recipe:
    """The same recipe on the towers in ``folder``."""
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"start": str(folder)})})


def train_in_worker(recipe: Recipe, folder: Path, *, tell: Tell) -> None:
    """Train one recipe and leave the model in ``folder``; dev RSUM on the official labels chooses the epoch."""
    data = training_data(recipe.data)
    config = recipe.train.model_copy(update={"log_every": _TELL_EVERY})
    task = retrieval_task(
        recipe.method, data.train, config, backbone=recipe.backbone, dev=data.dev, reading=recipe.data
    )
    run = Trainer(task, config, callbacks=[_Report(tell)]).run(progress=False)
    if run.interrupted:
        raise KeyboardInterrupt
    run.model.save_pretrained(folder)


class _Report(Callback):
    """Sends the progress to the display."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """Rows at the end of an epoch have its rate, the others the loss."""
        rate, rsum = row.get("steps_per_second"), row.get("dev_rsum")
        steps, epochs = trainer.total_steps, trainer.config.epochs
        self.tell(Progress(row["step"] + 1, steps, row["epoch"], epochs, dev_rsum=rsum, rate=rate))
