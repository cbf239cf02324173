"""The one training loop: it knows batches, epochs, logs and checkpoints, and not which method runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vacsr.config import BackboneConfig, Config, TrainConfig, method_config
from vacsr.data.pairs import PairSet
from vacsr.errors import DataError, NonFiniteLoss, UsageError
from vacsr.evaluate.retrieval import dev_rsum
from vacsr.methods.model import MatchingModel
from vacsr.scoring import PairScorer, choose_device
from vacsr.train.checkpoint import TrainState, load_checkpoint, save_checkpoint
from vacsr.train.distributed import World, barrier, join_world
from vacsr.train.interrupt import Interrupt
from vacsr.train.optim import build_optimizer, lr_factor, set_learning_rate
from vacsr.train.progress import TrainProgress
from vacsr.train.step import GraphedStep, TrainStep, TrainTensors
from vacsr.train.trackers import Row, Tracker, open_trackers


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


def fit(
    method: str | Mapping[str, Any] | Config | nn.Module,
    pairs: PairSet,
    config: TrainConfig | None = None,
    *,
    dev: PairSet | None = None,
    backbone: BackboneConfig | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Run:
    """Train ``method`` (a name such as "vacsr" or "vacsr-paper", a config, or a Method object) on ``pairs``.

    ``dev`` gives model choice by RSUM; ``out`` is where log and checkpoint go; ``resume`` continues from it.
    """
    config, backbone = config or TrainConfig(), backbone or BackboneConfig()
    chosen = method if isinstance(method, nn.Module) else method_config(method)
    trainer = Trainer.create(chosen, pairs, config, backbone=backbone, dev=dev, out=out)
    return trainer.run(resume=resume, progress=progress)


def batch_order(count: int, *, batch: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """The caption rows of each batch of an epoch: a function of (seed, epoch), so that resuming needs no state.

    A last, smaller batch is left out: its pair matrix would weigh differently. It comes round in other epochs.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator)
    for start in range(0, count - batch + 1, batch):
        yield order[start : start + batch]


@dataclass
class Trainer:
    """Everything a run holds while it runs."""

    model: MatchingModel
    pairs: PairSet
    config: TrainConfig
    dev: PairSet | None
    out: Path | None
    world: World
    device: torch.device
    step: TrainStep
    fingerprint: str
    state: TrainState = field(default_factory=TrainState)
    history: list[Row] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=list)
    pending: list[tuple[int, Tensor]] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        method: Any,
        pairs: PairSet,
        config: TrainConfig,
        *,
        backbone: BackboneConfig,
        dev: PairSet | None,
        out: str | Path | None,
    ) -> Trainer:
        """Build model, optimiser and step on the right device."""
        if len(pairs) < config.batch_size:
            raise DataError(
                f"{len(pairs)} captions do not fill one batch of {config.batch_size} — "
                f"set train.batch_size={max(2, len(pairs) // 2)} or give more data"
            )
        device = choose_device(config.device)
        world = join_world(device)
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        dims = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}
        model = MatchingModel.build(method, backbone, **dims, provenance=pairs.provenance, seed=config.seed)
        model.backbone.fit(pairs.images, pairs.texts)
        model.to(device).train()
        graphed = config.cuda_graph and device.type == "cuda"
        if graphed and (world.size > 1 or config.accumulate > 1 or config.optimizer == "adamp"):
            raise UsageError("train.cuda_graph needs one rank, accumulate=1 and adamw — set train.cuda_graph=false")
        optimizer = build_optimizer(model.param_groups(), config, capturable=graphed)
        data = TrainTensors(pairs.images.to(device), pairs.texts.to(device), pairs.caption_image.to(device))
        step = (GraphedStep if graphed else TrainStep)(model, optimizer, data, config=config, world=world)
        return cls(
            model, pairs, config, dev, Path(out) if out else None, world, device, step,
            _fingerprint(method, pairs, config, backbone),
        )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """Full batches of an epoch."""
        return len(self.pairs) // self.config.batch_size

    @property
    def total_steps(self) -> int:
        """Batches of the whole run."""
        return self.steps_per_epoch * self.config.epochs

    def run(self, *, resume: bool, progress: bool) -> Run:
        """From the start or the checkpoint to the end, or to Ctrl-C."""
        if resume and self.out is not None:
            self._resume()
        if self.out is not None and self.world.is_main:
            dump = self.config.model_dump(mode="json")
            self.trackers = open_trackers(self.config.trackers, self.out, step=self.state.step, config=dump)
        name = type(self.model.method).__name__.lower()
        show = progress and self.world.is_main
        bar = TrainProgress(name, total=self.total_steps, done=self.state.step, show=show)
        with Interrupt() as interrupt, bar:
            while self.state.step < self.total_steps and not interrupt.asked:
                self._epoch(interrupt, bar)
            self.state.stopped = "interrupted" if self.state.step < self.total_steps else ""
            if interrupt.asked:
                self._save()
        for tracker in self.trackers:
            tracker.close()
        if not self.state.stopped and self.config.select == "best" and self.state.best_weights:
            self.model.load_state_dict(self.state.best_weights)
        self.model.eval()
        return Run(self.model, self.state, self.history, self.out)

    def _epoch(self, interrupt: Interrupt, bar: TrainProgress) -> None:
        """The rest of the epoch in which the state stands."""
        epoch, done = divmod(self.state.step, self.steps_per_epoch)
        started, first = time.perf_counter(), self.state.step
        order = batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)
        for number, rows in enumerate(order):
            if number < done:
                continue
            self._one_step(rows, bar)
            if interrupt.asked:
                return
            every = self.config.checkpoint_every
            if every and self.state.step % every == 0 and self.state.step % self.steps_per_epoch:
                self._save()
        self._flush(bar)
        rate = (self.state.step - first) / max(time.perf_counter() - started, 1e-9)
        self._evaluate(epoch + 1, rate, bar)
        self._save()

    def _one_step(self, rows: Tensor, bar: TrainProgress) -> None:
        step = self.state.step
        optimizer_step = step // self.config.accumulate
        factor = lr_factor(
            optimizer_step, steps_per_epoch=max(1, self.steps_per_epoch // self.config.accumulate), config=self.config
        )
        set_learning_rate(self.step.optimizer, self.config.lr * factor)
        self.pending.append((step, self.step(rows.to(self.device), step)))
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
        for (step, _), values in zip(
            self.pending, torch.stack([v for _, v in self.pending]).double().tolist(), strict=True
        ):
            figures = dict(zip(names, values, strict=True))
            broken = [name for name, value in figures.items() if not abs(value) < float("inf")]
            if broken:
                raise self._non_finite(step, broken)
            if step % self.config.log_every == 0:
                self._log({"step": step, "epoch": step // self.steps_per_epoch, "lr": self._lr(), **figures})
                bar.terms({k: v for k, v in figures.items() if k != "grad_norm"})
        self.pending.clear()

    def _lr(self) -> float:
        return float(self.step.optimizer.param_groups[0]["lr"])

    def _non_finite(self, step: int, broken: list[str]) -> NonFiniteLoss:
        epoch, number = divmod(step, self.steps_per_epoch)
        order = batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)
        rows = next(rows for at, rows in enumerate(order) if at == number)
        ids = [self.pairs.caption_ids[row] for row in rows.tolist()]
        shown = ", ".join(ids[:8]) + (f" … ({len(ids)} captions)" if len(ids) > 8 else "")
        part = next((name for name in broken if name != "loss"), broken[0])
        where = f" — the last good checkpoint is in {self.out / 'checkpoint'}" if self.out else ""
        return NonFiniteLoss(
            f"'{part}' is not finite at step {step} (epoch {epoch}); the batch held: {shown}{where}; "
            "look at these features, or lower train.lr"
        )

    def _evaluate(self, epoch: int, rate: float, bar: TrainProgress) -> None:
        """Dev RSUM, and the best weights so far."""
        row: Row = {"step": self.state.step, "epoch": epoch, "steps_per_second": round(rate, 3)}
        every = self.config.eval_every
        if self.dev is not None and every and (epoch % every == 0 or epoch == self.config.epochs):
            scorer = PairScorer(self.model, device=self.device)
            row["dev_rsum"] = dev_rsum(scorer.score_set(self.dev), self.dev)
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

    def _save(self) -> None:
        if self.out is None:
            return
        if self.world.is_main:
            folder = self.out / "checkpoint"
            save_checkpoint(folder, self.model, self.step.optimizer, state=self.state, fingerprint=self.fingerprint)
        barrier(self.world)

    def _resume(self) -> None:
        assert self.out is not None
        folder = self.out / "checkpoint"
        found = load_checkpoint(folder, self.model, self.step.optimizer, fingerprint=self.fingerprint)
        if found is not None:
            self.state = found
            self.state.best_weights = {k: v.to(self.device) for k, v in found.best_weights.items()}


def _fingerprint(method: Any, pairs: PairSet, config: TrainConfig, backbone: BackboneConfig) -> str:
    """What must be equal for a checkpoint to fit: method, backbone, training fields and data."""
    described = method if isinstance(method, Config) else getattr(method, "config", None)
    fields = config.model_dump(mode="json", exclude={"device", "log_every", "checkpoint_every", "trackers"})
    data = hashlib.sha256()
    for tensor in (pairs.images, pairs.texts, pairs.caption_image):
        data.update(tensor.contiguous().numpy().tobytes())
    whole = {
        "method": described.model_dump(mode="json") if isinstance(described, Config) else type(method).__name__,
        "backbone": backbone.model_dump(mode="json"),
        "train": fields,
        "data": data.hexdigest(),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
