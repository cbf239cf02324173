"""The one training loop. It knows epochs, steps, logs and checkpoints; a :class:`Task` says what is trained."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vacsr.errors import DataError, NonFiniteLoss
from vacsr.objective import LossTerms
from vacsr.train.callbacks import TRACKERS, Callback, ProgressBar, Row, catch_interrupt
from vacsr.train.checkpoint import TrainState, has_checkpoint, load_checkpoint, save_checkpoint
from vacsr.train.distributed import World, barrier, check_ranks_agree, sum_over_ranks
from vacsr.train.optim import set_learning_rate
from vacsr.train.step import GraphedStep, TrainStep, matmul_precision

_SHOWN = 8  # ids of a batch in a message


class Task(ABC):
    """What a :class:`Trainer` trains: batches, a loss, an optimiser, and perhaps an evaluation after each epoch."""

    model: nn.Module
    device: torch.device
    world: World = World()
    label: str = "train"  # of the progress bar
    steps_per_epoch: int  # batches, of full optimiser steps only
    metric: str = ""  # of evaluate(): chooses the best weights
    eval_every: int = 0  # epochs between evaluations; 0 for never
    select_best: bool = False  # the best weights count, not the last
    members: int = 1  # independent parts whose mean is the loss: clip_norm bounds the gradient of each
    compiled: bool = False  # steps use compile()
    falls_back: bool = False  # where the compiler fails, steps continue without it
    graphed: bool = False  # steps are replayed as a CUDA graph
    description: dict[str, Any]  # named parts, as JSON can hold them, that must be equal for a checkpoint to fit

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """With a ``lr_scale`` in every group, see :func:`vacsr.train.optim.build_optimizer`."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The base rate of an optimiser step."""

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from number ``start`` on: a function of these two, so that resuming needs no state.

        With ``start`` 0 an epoch begins; otherwise the run was resumed within it.
        """

    @abstractmethod
    def loss(self, batch: Any, step: Tensor) -> LossTerms:
        """This rank's share of the loss of a batch. ``step`` is 0-d, on the device."""

    @abstractmethod
    def batch_ids(self, step: int) -> list[str]:
        """What the batch of a step held, for messages."""

    def evaluate(self) -> dict[str, float]:
        """Metrics after an epoch; nothing by default."""
        return {}

    def callbacks(self) -> list[Callback]:
        """What the task itself needs done around its steps."""
        return []

    def finish(self) -> None:  # noqa: B027
        """After the last step of a run that was not interrupted; the weights to keep are loaded."""

    def compile(self) -> Callable[[Any, Tensor], LossTerms]:
        """:meth:`loss`, compiled as far as that pays."""
        return torch.compile(self.loss, dynamic=False)

    def uncompile(self) -> None:  # noqa: B027
        """Undo what :meth:`compile` changed in the model."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, for checkpoints and for the best epoch."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def result_state(self) -> dict[str, Tensor]:
        """The weights that evaluation sees and that a run ends with, if they are not those being trained."""
        return self.state_dict()

    def training_state(self) -> dict[str, Tensor]:
        """What else a checkpoint must carry."""
        return {}

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """What :meth:`training_state` gave."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished (or interrupted) training run."""

    model: Any  # a MatchingModel, or a few-shot method
    state: TrainState
    history: list[Row]
    path: Path | None = None
    report: Any = None  # of a recipe that was trained to its end

    def __repr__(self) -> str:
        method = type(getattr(self.model, "method", self.model)).__name__
        return f"Run({method}, {self.state.step:,} steps, path={str(self.path) if self.path else None!r})"

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C before the last step."""
        return self.state.stopped

    def to_dict(self) -> dict[str, Any]:
        report = None if self.report is None else self.report.to_dict()
        path = None if self.path is None else str(self.path)
        return {"path": path, "interrupted": self.interrupted, "history": list(self.history), "report": report}


@dataclass
class Trainer:
    """Trains a task. ``out`` is where log and checkpoint go; None keeps no files.

    ``config`` is a recipe's ``train`` section, of retrieval or of few-shot recognition.
    """

    task: Task
    config: Any
    out: Path | None = None
    callbacks: list[Callback] = field(default_factory=list)
    state: TrainState = field(default_factory=TrainState)
    history: list[Row] = field(default_factory=list)
    pending: list[tuple[int, float, Tensor]] = field(default_factory=list)
    """Step, learning rate and values of steps that have not been read from the device yet."""

    def __post_init__(self) -> None:
        check_ranks_agree(self.task.description, self.task.world)
        self.folder = None if self.out is None else self.out / "checkpoint"
        self.optimizer = self.task.build_optimizer()
        self.step = (GraphedStep if self.task.graphed else TrainStep)(self.task, self.optimizer, self.config)
        self.callbacks = [*self.task.callbacks(), *self.callbacks]
        if self.out is not None and self.task.world.is_main:
            names = dict.fromkeys(("jsonl", *self.config.trackers))
            self.callbacks += [TRACKERS[name](self.out) for name in names]

    @property
    def total_steps(self) -> int:
        return self.task.steps_per_epoch * int(self.config.epochs)

    def resume(self) -> None:
        """Load the checkpoint in ``out``, if there is one; one of another run is refused."""
        if self.folder is None or not has_checkpoint(self.folder):
            return
        try:
            self.state, groups = load_checkpoint(
                self.folder, self.optimizer, description=self.task.description, device=self.task.device
            )
            self.task.load_state_dict(groups["model"])
            self.task.load_training_state(groups.get("training", {}))
            for callback in self.callbacks:
                callback.load_state_dict(groups.get(f"callback-{callback.name}", {}))
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            message = f"the checkpoint in {self.folder} is damaged ({error!r:.200})"
            raise DataError(f"{message} — start the run again in another folder") from error

    def run(self, *, progress: bool = True) -> Run:
        """From the present state to the last step, or to Ctrl-C."""
        self.task.model.train()
        self.callbacks.append(ProgressBar(self.task.label, show=progress and self.task.world.is_main))
        with matmul_precision(self.config.precision), ExitStack() as stack:
            for callback in self.callbacks:
                callback.on_train_start(self)
                stack.callback(callback.on_train_end, self)
            interrupt = stack.enter_context(catch_interrupt())
            while self.state.step < self.total_steps and not self.state.stopped:
                self._epoch(interrupt)
        if not self.state.stopped:
            best = self.state.best_weights if self.task.select_best else {}
            self.task.load_state_dict(best or self.task.result_state())
            self.task.finish()
        self.task.uncompile()
        self.task.model.eval()
        return Run(self.task.model, self.state, self.history, self.out)

    def _epoch(self, interrupt: Event) -> None:
        """The rest of the current epoch."""
        epoch, done = divmod(self.state.step, self.task.steps_per_epoch)
        for callback in self.callbacks:
            callback.on_epoch_start(self, epoch)
        batches = self.task.batches(epoch, done)
        started, first = time.perf_counter(), self.state.step
        group = self.config.accumulate
        every = -(-self.config.checkpoint_every // group) * group  # rounded up to whole optimiser steps
        for batch in batches:
            self._one_step(batch)
            if self.state.step % self.task.steps_per_epoch == 0 or self.state.step % group:
                continue  # an epoch's end has its own checkpoint; half-accumulated gradients are in none
            self._checkpoint(due=every > 0 and self.state.step % every == 0, stop=self._stop_requested(interrupt))
            if self.state.stopped:
                return
        self._flush()
        self._end_epoch(epoch, (self.state.step - first) / max(time.perf_counter() - started, 1e-9))
        epochs, last = self.config.checkpoint_epochs, self.state.step == self.total_steps
        due = epochs > 0 and (last or (epoch + 1) % epochs == 0)
        self._checkpoint(due=due, stop=not last and self._stop_requested(interrupt))

    def _one_step(self, batch: Any) -> None:
        step = self.state.step
        lr = self.task.learning_rate(step // self.config.accumulate)
        set_learning_rate(self.optimizer, lr)
        for callback in self.callbacks:
            callback.on_step_start(self, step)
        self.pending.append((step, lr, self.step(batch, step)))
        # A CPU checks every step at once; reading values from a GPU would wait for it, so they are read in groups.
        if self.task.device.type == "cpu" or len(self.pending) >= self.config.log_every:
            self._flush()
        self.state.step += 1
        for callback in self.callbacks:
            callback.on_step(self, step)

    def _flush(self) -> None:
        """Read the pending values: stop at the first that is not finite, log every ``log_every``-th step."""
        if not self.pending:
            return
        names = (*self.step.names, "grad_norm")
        table = torch.stack([values for _, _, values in self.pending]).double().tolist()
        for (step, lr, _), values in zip(self.pending, table, strict=True):
            numbers = dict(zip(names, values, strict=True))
            broken = [name for name, value in numbers.items() if not abs(value) < float("inf")]
            if broken:
                raise self._non_finite(step, broken)
            if step % self.config.log_every == 0:
                self._log({"step": step, "epoch": step // self.task.steps_per_epoch + 1, "lr": lr, **numbers})
        self.pending.clear()

    def _non_finite(self, step: int, broken: Sequence[str]) -> NonFiniteLoss:
        """Name the term, the batch, and what to do."""
        ids = self.task.batch_ids(step)
        shown = ", ".join(ids[:_SHOWN]) + (f" … ({len(ids)} in all)" if len(ids) > _SHOWN else "")
        term = next((name for name in broken if name not in ("loss", "grad_norm")), broken[0])
        saved = self.folder is not None and has_checkpoint(self.folder)
        where = f"; the last good checkpoint is in {self.folder}" if saved else ""
        half = " or set train.precision=fp32" if self.config.precision == "bf16" else ""
        return NonFiniteLoss(
            f"'{term}' is not finite at step {step} (epoch {step // self.task.steps_per_epoch + 1}); the batch held: "
            f"{shown}{where} — look at these inputs, lower train.lr{half}, or set train.clip_norm=1"
        )

    def _end_epoch(self, epoch: int, rate: float) -> None:
        """Evaluate, keep the best weights so far, and log. The row's step is the last one that it knows of."""
        row: Row = {"step": self.state.step - 1, "epoch": epoch + 1, "steps_per_second": float(f"{rate:.4g}")}
        every, last = self.task.eval_every, epoch + 1 == self.config.epochs
        if every and (last or (epoch + 1) % every == 0):
            row |= self.task.evaluate()
            self.task.model.train()
        value = row.get(self.task.metric)
        if value is not None and (self.state.best is None or value > self.state.best):
            self.state.best, self.state.best_step = value, self.state.step
            self.state.best_weights = {name: x.detach().clone() for name, x in self.task.result_state().items()}
        self._log(row)
        for callback in self.callbacks:
            callback.on_epoch(self, epoch, row)

    def _log(self, row: Row) -> None:
        self.history.append(row)
        for callback in self.callbacks:
            callback.on_log(self, row)

    def _stop_requested(self, interrupt: Event) -> bool:
        """Has any rank been asked to stop? All stop at the same step; a GPU is asked only when it waits anyway."""
        if self.task.world.size == 1:
            return interrupt.is_set()
        if self.pending:
            return False
        requested = torch.tensor(float(interrupt.is_set()), device=self.task.device)
        return bool(sum_over_ranks(requested, self.task.world))

    def _checkpoint(self, *, due: bool, stop: bool) -> None:
        """Save where it is due or the run stops; pending values are read first, so that no broken state is saved."""
        if not due and not stop:
            return
        self._flush()
        self.state.stopped = stop
        if self.folder is None:
            return
        if self.task.world.is_main:
            groups = {"model": self.task.state_dict(), "training": self.task.training_state()}
            groups |= {f"callback-{callback.name}": callback.state_dict() for callback in self.callbacks}
            save_checkpoint(
                self.folder, groups, self.optimizer,
                state=self.state, description=self.task.description, device=self.task.device,
            )  # fmt: skip
        barrier(self.task.world)
