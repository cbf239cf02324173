"""What happens around the steps of a run: trackers, progress, frozen towers, Ctrl-C. A callback overrides hooks.

A callback that keeps tensors returns them from ``state_dict``, so that they are part of the checkpoint.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vacsr.config import TowersConfig
from vacsr.errors import MissingExtra
from vacsr.files import disk_errors, write_text
from vacsr.progress import Bars

if TYPE_CHECKING:
    from vacsr.model import MatchingModel
    from vacsr.train.trainer import Trainer

Row = dict[str, Any]  # one line of the log. Every row has a ``step``: the last one that it knows of

_LINES = 10  # of progress, about, that stay on the screen where epochs have no metrics


class Callback:
    """Hooks around the steps of a run; each does nothing unless overridden. Steps and epochs count from 0."""

    name = ""  # of its tensors in a checkpoint, where it has any

    def on_train_start(self, trainer: Trainer) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Before an epoch's first batch, and before the first one after resuming within an epoch."""

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        """Before a batch."""

    def on_step(self, trainer: Trainer, step: int) -> None:
        """After a batch, and after the optimiser's update where the batch ends one."""

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """A row of the log is ready."""

    def on_epoch(self, trainer: Trainer, epoch: int, row: Row) -> None:
        """After an epoch; ``row`` holds its metrics and its speed."""

    def on_train_end(self, trainer: Trainer) -> None:
        """However the training ended, also by an error."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must carry for it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What :meth:`state_dict` gave."""


class JsonlTracker(Callback):
    """``metrics.jsonl``: one JSON object per line. Reports and tables read it, so every run folder has it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def on_train_start(self, trainer: Trainer) -> None:
        """A resumed run repeats the steps since its checkpoint: their rows are removed, and a line that a kill cut."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []:
            with suppress(ValueError):
                rows += [line] if json.loads(line)["step"] < trainer.state.step else []
        write_text(self.path, "".join(f"{line}\n" for line in rows))

    def on_log(self, trainer: Trainer, row: Row) -> None:
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class TensorBoardTracker(Callback):
    """Scalars for TensorBoard (extra ``tensorboard``)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder / "tensorboard", _require("torch.utils.tensorboard", "tensorboard")

    def on_train_start(self, trainer: Trainer) -> None:
        self.writer = self.package.SummaryWriter(str(self.folder))

    def on_log(self, trainer: Trainer, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def on_train_end(self, trainer: Trainer) -> None:
        self.writer.close()


class WandbTracker(Callback):
    """Rows to Weights & Biases (extra ``wandb``)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder, _require("wandb", "wandb")

    def on_train_start(self, trainer: Trainer) -> None:
        config = trainer.config.model_dump(mode="json")
        self.run = self.package.init(project="vacsr", dir=str(self.folder), config=config)

    def on_log(self, trainer: Trainer, row: Row) -> None:
        self.run.log(row, step=row["step"])

    def on_train_end(self, trainer: Trainer) -> None:
        self.run.finish()


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(extra, extra) from error


TRACKERS: dict[str, Callable[[Path], Callback]] = {
    "jsonl": JsonlTracker, "tensorboard": TensorBoardTracker, "wandb": WandbTracker,
}  # fmt: skip
"""By their names in a recipe. One whose extra is missing is refused when it is built, before a run writes anything."""


class ProgressBar(Callback, Bars):
    """A bar over the steps with the newest loss terms behind it, and a line that stays after an epoch."""

    def __init__(self, label: str, *, show: bool) -> None:
        Bars.__init__(self, show=show)
        self.label = label

    def on_train_start(self, trainer: Trainer) -> None:
        self.task = self.bar.add_task(self.label, total=trainer.total_steps, completed=trainer.state.step, note="")
        self.bar.start()

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.bar.advance(self.task)

    def on_log(self, trainer: Trainer, row: Row) -> None:
        if "loss" in row:
            self.bar.update(self.task, note=" ".join(f"{name} {row[name]:.3g}" for name in trainer.step.names))

    def on_epoch(self, trainer: Trainer, epoch: int, row: Row) -> None:
        epochs, metric = trainer.config.epochs, trainer.task.metric
        if metric in row or epoch + 1 == epochs or (epoch + 1) % max(1, epochs // _LINES) == 0:
            value = f", {metric.replace('_rsum', ' RSUM')} {row[metric]:.1f}" if metric in row else ""
            rate = max(row["steps_per_second"], 1e-9)
            speed = f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"
            steps_left = trainer.total_steps - trainer.state.step
            left = f", {timedelta(seconds=round(steps_left / rate))} left" if steps_left else ""
            self.say(f"{self.label}: epoch {epoch + 1}/{epochs}{value}, {speed}{left}")

    def on_train_end(self, trainer: Trainer) -> None:
        self.bar.stop()


class WeightAverage(Callback):
    """An exponential moving average of the weights, in a copy of the model. It is part of the checkpoint."""

    name = "average"

    def __init__(self, model: MatchingModel, decay: float) -> None:
        self.model: MatchingModel = deepcopy(model).eval().requires_grad_(False)
        self.source, self.decay = model, decay

    @torch.no_grad()
    def on_step(self, trainer: Trainer, step: int) -> None:
        updates, rest = divmod(step + 1, trainer.config.accumulate)
        if rest == 0:
            decay = min(self.decay, (1 + updates) / (10 + updates))
            torch._foreach_lerp_(list(self.model.parameters()), list(self.source.parameters()), 1.0 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.trained_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_trained_state(state)


class FreezeTowers(Callback):
    """Freezes towers in their first epochs, and warms the loss up in the epoch that unfreezes one."""

    def __init__(self, model: MatchingModel, config: TowersConfig) -> None:
        self.model, self.config = model, config
        self.frozen: frozenset[str] | None = None

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        towers = frozen_towers(epoch, self.config)
        if towers != self.frozen:
            self.model.freeze(towers)
            trainer.step.reset()
            self.frozen = towers

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        scale = loss_warmup(step, steps_per_epoch=trainer.task.steps_per_epoch, config=self.config)
        trainer.step.loss_scale.fill_(scale)


def frozen_towers(epoch: int, config: TowersConfig) -> frozenset[str]:
    """Towers without gradient in this epoch, counted from 0."""
    towers = {"image": (config.image_lr, config.freeze_image), "text": (config.text_lr, config.freeze_text)}
    return frozenset(name for name, (rate, epochs) in towers.items() if rate == 0 or epoch < epochs)


def loss_warmup(step: int, *, steps_per_epoch: int, config: TowersConfig) -> float:
    """The factor of the loss at a step: 1, but rising linearly to 1 in an epoch that unfreezes a tower."""
    epoch, index = divmod(step, steps_per_epoch)
    unfreezes = epoch > 0 and frozen_towers(epoch, config) != frozen_towers(epoch - 1, config)
    return (index + 1) / steps_per_epoch if config.ramp and unfreezes else 1.0


@contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """The first SIGINT or SIGTERM sets the event, so that the step at work can be finished and saved.

    A second one stops at once. Outside the main thread nothing is caught.
    """
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def ask(number: int, frame: FrameType | None) -> None:
        # A worker may be told twice: by its parent, and by whoever ends all processes. It can still be killed.
        if interrupt.is_set() and not (number == signal.SIGTERM and multiprocessing.parent_process() is not None):
            raise KeyboardInterrupt
        interrupt.set()

    handlers = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
