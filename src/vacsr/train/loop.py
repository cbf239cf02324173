"""The one training loop: it knows batches, epochs, logs and checkpoints, and not which method runs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.config import BackboneConfig, DataConfig, TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import NonFiniteLoss
from vacsr.evaluate.retrieval import dev_rsum
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.train.assemble import Parts, assemble
from vacsr.train.batches import batch_order, check_batches
from vacsr.train.checkpoint import TrainState, fingerprint, has_checkpoint, load_checkpoint, save_checkpoint
from vacsr.train.distributed import World, barrier, check_ranks_agree, sum_over_ranks
from vacsr.train.feed import Batch
from vacsr.train.folder import check_place
from vacsr.train.interrupt import Interrupt
from vacsr.train.optim import lr_factor, set_learning_rate
from vacsr.train.precision import matmul_precision
from vacsr.train.progress import TrainProgress
from vacsr.train.step import TrainStep
from vacsr.train.survey import take_stock
from vacsr.train.towers import loss_ramp, resting
from vacsr.train.trackers import Row, Tracker, check_trackers, open_trackers


@dataclass(frozen=True)
class Run:
    """A finished (or interrupted) training run."""

    model: MatchingModel
    state: TrainState
    history: list[Row]
    folder: Path | None = None

    @property
    def method(self) -> MatchingModel:
        """The trained method with its heads: what ``save_pretrained`` writes and :class:`PairScorer` reads."""
        return self.model

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C before the last step."""
        return bool(self.state.stopped)


class PendingStep(NamedTuple):
    """A step whose figures have not been read from the device yet."""

    step: int
    lr: float
    values: Tensor


@dataclass
class Trainer:
    """Everything a run holds while it runs."""

    parts: Parts
    pairs: PairSet | PhotoSet
    config: TrainConfig
    dev: PairSet | PhotoSet | None
    out: Path | None
    fingerprint: str
    state: TrainState = field(default_factory=TrainState)
    history: list[Row] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=list)
    pending: list[PendingStep] = field(default_factory=list)
    resting: frozenset[str] | None = None

    @classmethod
    def create(
        cls,
        method: Any,
        pairs: PairSet | PhotoSet,
        config: TrainConfig,
        *,
        backbone: BackboneConfig,
        dev: PairSet | PhotoSet | None,
        out: str | Path | None,
        reading: DataConfig | None = None,
        progress: bool = False,
    ) -> Trainer:
        """Build model, optimiser and step on the right device."""
        check_batches(pairs, config)
        if out is not None:
            check_place(Path(out))
            check_trackers(config.trackers)
        reading = reading or DataConfig()
        if dev is not None and 0 < config.dev_images < len(dev.image_ids):
            dev = dev.subset(range(config.dev_images))
        parts = assemble(method, pairs, config, backbone=backbone, dev=dev, reading=reading, progress=progress)
        print_of_run = fingerprint(
            method, pairs, dev=dev, config=config, backbone=backbone, photo_size=reading.photo_size
        )
        check_ranks_agree(print_of_run, parts.world)
        return cls(parts, pairs, config, dev, Path(out) if out else None, print_of_run)

    @property
    def model(self) -> MatchingModel:
        """What is trained."""
        return self.parts.model

    @property
    def step(self) -> TrainStep:
        """What a batch goes through."""
        return self.parts.step

    @property
    def world(self) -> World:
        """This process's place among all."""
        return self.parts.world

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.parts.device

    @property
    def steps_per_epoch(self) -> int:
        """Full batches of an epoch; an optimiser step never reaches into the next epoch."""
        batches, group = len(self.pairs) // self.config.batch_size, self.config.accumulate
        return batches // group * group

    @property
    def total_steps(self) -> int:
        """Batches of the whole run."""
        return self.steps_per_epoch * self.config.epochs

    def resume(self) -> None:
        """Take up the checkpoint in ``out``, where there is one; one of another run is refused."""
        if self.out is None:
            return
        folder = self.out / "checkpoint"
        found = load_checkpoint(folder, self.model, self.step.optimizer, fingerprint=self.fingerprint)
        if found is not None:
            self.state = found
            self.state.best_weights = {k: v.to(self.device) for k, v in found.best_weights.items()}

    def run(self, *, progress: bool) -> Run:
        """From where the state stands to the end, or to Ctrl-C; the trackers are closed either way."""
        with matmul_precision(self.config.precision), ExitStack() as closing:
            self._open_trackers(closing)
            self._epochs(progress=progress)
        if not self.state.stopped and self.config.select == "best" and self.state.best_weights:
            self.model.load_state_dict(self.state.best_weights)
        self.model.compile_blocks(False)
        self.model.eval()
        return Run(self.model, self.state, self.history, self.out)

    def _open_trackers(self, closing: ExitStack) -> None:
        if self.out is not None and self.world.is_main:
            dump = self.config.model_dump(mode="json")
            self.trackers = open_trackers(self.config.trackers, self.out, step=self.state.step, config=dump)
        for tracker in self.trackers:
            closing.callback(tracker.close)

    def _epochs(self, *, progress: bool) -> None:
        name = type(self.model.method).__name__.lower()
        show = progress and self.world.is_main
        bar = TrainProgress(name, total=self.total_steps, done=self.state.step, show=show)
        with Interrupt() as interrupt, bar:
            while self.state.step < self.total_steps and not self.state.stopped:
                self._epoch(interrupt, bar)

    def _epoch(self, interrupt: Interrupt, bar: TrainProgress) -> None:
        """The rest of the epoch in which the state stands."""
        epoch, done = divmod(self.state.step, self.steps_per_epoch)
        if done == 0:  # a run that resumes within an epoch has its notes from the checkpoint
            take_stock(self.model, self.parts.feed, config=self.config, epoch=epoch, images=len(self.pairs.image_ids))
        started, first = time.perf_counter(), self.state.step
        order = batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)
        self._set_resting(epoch)
        for batch in self.parts.feed.batches(islice(order, done, self.steps_per_epoch)):
            self._one_step(batch, bar)
            if self.state.step % self.steps_per_epoch == 0 or self.state.step % self.config.accumulate:
                continue  # the epoch's end has its own checkpoint; gradients half gathered are in none
            stop = self._agreed(interrupt)
            if stop or self._checkpoint_due():
                self._save(bar)
            if stop:
                self.state.stopped = "interrupted"
                return
        self._flush(bar)
        rate = (self.state.step - first) / max(time.perf_counter() - started, 1e-9)
        self._evaluate(epoch + 1, rate, bar)
        every, last = self.config.checkpoint_epochs, self.state.step == self.total_steps
        stop = not last and self._agreed(interrupt)
        if stop or (every and (last or (epoch + 1) % every == 0)):
            self._save(bar)
        if stop:
            self.state.stopped = "interrupted"

    def _set_resting(self, epoch: int) -> None:
        """Wake or rest the towers as the plan has it; only a change touches the step."""
        towers = resting(epoch, self.config.towers) if self.model.has_towers else frozenset()
        if towers != self.resting:
            self.step.rest(towers)
            self.resting = towers

    def _agreed(self, interrupt: Interrupt) -> bool:
        """Has any rank been asked to stop? All stop at the same step; a GPU is asked only when it waits anyway."""
        if self.world.size == 1:
            return interrupt.asked
        if self.pending:
            return False
        return bool(sum_over_ranks(torch.tensor(float(interrupt.asked), device=self.device), self.world))

    def _checkpoint_due(self) -> bool:
        """Every ``checkpoint_every`` steps, rounded up to whole optimiser steps."""
        group = self.config.accumulate
        every = -(-self.config.checkpoint_every // group) * group
        return every > 0 and self.state.step % every == 0

    def _one_step(self, batch: Batch, bar: TrainProgress) -> None:
        step = self.state.step
        optimizer_step = step // self.config.accumulate
        factor = lr_factor(
            optimizer_step, steps_per_epoch=max(1, self.steps_per_epoch // self.config.accumulate), config=self.config
        )
        lr = self.config.lr * factor
        set_learning_rate(self.step.optimizer, lr)
        ramp = loss_ramp(step, steps_per_epoch=self.steps_per_epoch, config=self.config.towers)
        epoch = step // self.steps_per_epoch
        values = self.step(batch, step, epoch=epoch, ramp=ramp if self.model.has_towers else 1.0)
        self.pending.append(PendingStep(step, lr, values))
        # On a CPU every step is checked at once; on a GPU reading the figures would wait for it, so they are batched.
        if self.device.type == "cpu" or len(self.pending) >= self.config.log_every:
            self._flush(bar)
        self.state.step += 1
        bar.advance()

    def _flush(self, bar: TrainProgress) -> None:
        """Read the pending figures: stop at the first that is not finite, log every ``log_every``-th."""
        if not self.pending:
            return
        names = (*self.step.names, "grad_norm")
        table = torch.stack([pending.values for pending in self.pending]).double().tolist()
        for (step, lr, _), values in zip(self.pending, table, strict=True):
            figures = dict(zip(names, values, strict=True))
            broken = [name for name, value in figures.items() if not abs(value) < float("inf")]
            if broken:
                raise self._non_finite(step, broken)
            if step % self.config.log_every == 0:
                self._log({"step": step, "epoch": step // self.steps_per_epoch + 1, "lr": lr, **figures})
                bar.terms({k: v for k, v in figures.items() if k != "grad_norm"})
        self.pending.clear()

    def _non_finite(self, step: int, broken: list[str]) -> NonFiniteLoss:
        epoch, number = divmod(step, self.steps_per_epoch)
        order = batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)
        rows = next(rows for at, rows in enumerate(order) if at == number)
        ids = [self.pairs.caption_ids[row] for row in rows.tolist()]
        shown = ", ".join(ids[:8]) + (f" … ({len(ids)} captions)" if len(ids) > 8 else "")
        part = next((name for name in broken if name not in ("loss", "grad_norm")), broken[0])
        kept = self.out is not None and has_checkpoint(self.out / "checkpoint")
        where = f" — the last good checkpoint is in {self.out}/checkpoint" if kept else ""
        return NonFiniteLoss(
            f"'{part}' is not finite at step {step} (epoch {epoch + 1}); the batch held: {shown}{where}; "
            "look at these features, or lower train.lr"
        )

    def _evaluate(self, epoch: int, rate: float, bar: TrainProgress) -> None:
        """Dev RSUM, and the best weights so far."""
        # Like every row, it names the last batch it knows: a resumed run keeps the rows below its first.
        row: Row = {"step": self.state.step - 1, "epoch": epoch, "steps_per_second": round(rate, 3)}
        every = self.config.eval_every
        if self.dev is not None and every and (epoch % every == 0 or epoch == self.config.epochs):
            with self.model.plain_blocks():
                scorer = PairScorer(self.model, device=self.device)
                row["dev_rsum"] = dev_rsum(scorer.score_set(self.dev, inputs=self.parts.dev_inputs), self.dev)
            self.model.train()
            if self.state.best is None or row["dev_rsum"] > self.state.best:
                weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
                self.state.best, self.state.best_step = row["dev_rsum"], self.state.step
                self.state.best_weights = weights
        self._log(row)
        shown = f", dev RSUM {row['dev_rsum']:.1f}" if "dev_rsum" in row else ""
        bar.say(f"epoch {epoch}/{self.config.epochs}{shown}, {rate:.1f} steps/s")

    def _log(self, row: Row) -> None:
        self.history.append(row)
        for tracker in self.trackers:
            tracker.log(row)

    def _save(self, bar: TrainProgress) -> None:
        """Checkpoint; figures still pending are looked at first, so that no poisoned state is kept."""
        self._flush(bar)
        if self.out is None:
            return
        if self.world.is_main:
            folder = self.out / "checkpoint"
            save_checkpoint(folder, self.model, self.step.optimizer, state=self.state, fingerprint=self.fingerprint)
        barrier(self.world)
