"""The few-shot loop: shots in, a trained method out. Ctrl-C stops it, and it goes on from there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.errors import DataError, NonFiniteLoss, OtherRun
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.feed import ShotFeed, ShotPixels
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch
from vacsr.fewshot.optim import build_optimizer, learning_rate
from vacsr.train.checkpoint import FILE, TrainState, has_checkpoint, load_checkpoint, save_checkpoint
from vacsr.train.interrupt import Interrupt
from vacsr.train.optim import set_learning_rate
from vacsr.train.precision import matmul_precision
from vacsr.train.progress import TrainProgress
from vacsr.train.trackers import Row, Tracker, open_trackers

_LINES = 10  # about so many lines of progress stay on the screen


@dataclass(frozen=True)
class ShotRun:
    """A finished (or interrupted) training."""

    method: FewshotMethod
    state: TrainState
    history: list[Row]

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C before the last step."""
        return bool(self.state.stopped)


class _Pending(NamedTuple):
    """A step whose figures have not been read from the device yet."""

    step: int
    lr: float
    values: Tensor


@dataclass
class ShotTrainer:
    """Everything a training holds while it runs. ``out`` None keeps no files, as a search does."""

    method: FewshotMethod
    feed: ShotFeed
    config: FewshotTrainConfig
    classes: ClassSet
    transform: PhotoTransform
    device: torch.device
    out: Path | None = None
    fingerprint: str = ""
    state: TrainState = field(default_factory=TrainState)
    history: list[Row] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.method.param_groups(), self.config)
        self.params = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.learned = Learned(self.method)
        self.labels = self.feed.shots.labels

    @property
    def total_steps(self) -> int:
        """Of the whole training."""
        return self.config.epochs * self.feed.steps_per_epoch

    def resume(self) -> None:
        """Take up the checkpoint in ``out``, where there is one; one of another run is refused."""
        if self.out is None:
            return
        folder = self.out / "checkpoint"
        found = load_checkpoint(folder, self.learned, self.optimizer, fingerprint=self.fingerprint)
        if found is not None:
            self.state = found

    def run(self, *, progress: bool, label: str = "shots") -> ShotRun:
        """From where the state stands to the end, or to Ctrl-C; then what the method does after training."""
        self.method.train()
        bar = TrainProgress(label, total=self.total_steps, done=self.state.step, show=progress)
        with matmul_precision(self.config.precision), ExitStack() as closing:
            self._open_trackers(closing)
            with Interrupt() as interrupt, bar:
                self._steps(interrupt, bar)
        if not self.state.stopped:
            self.method.finish()
        self.method.eval()
        return ShotRun(self.method, self.state, self.history)

    def _open_trackers(self, closing: ExitStack) -> None:
        if self.out is not None:
            dump = self.config.model_dump(mode="json")
            self.trackers = open_trackers(self.config.trackers, self.out, step=self.state.step, config=dump)
        for tracker in self.trackers:
            closing.callback(tracker.close)

    def _steps(self, interrupt: Interrupt, bar: TrainProgress) -> None:
        started, first = time.perf_counter(), self.state.step
        for pixels in self.feed.stream(self.state.step, self.total_steps):
            self._one_step(pixels, bar)
            ended = self.state.step % self.feed.steps_per_epoch == 0
            if ended:
                rate = (self.state.step - first) / max(time.perf_counter() - started, 1e-9)
                self._epoch_ended(self.state.step // self.feed.steps_per_epoch, rate, bar)
                started, first = time.perf_counter(), self.state.step
            if interrupt.asked and self.state.step < self.total_steps:
                self._save(bar)
                self.state.stopped = "interrupted"
                return

    def _one_step(self, pixels: ShotPixels, bar: TrainProgress) -> None:
        step = self.state.step
        lr = learning_rate(step, steps_per_epoch=self.feed.steps_per_epoch, config=self.config)
        set_learning_rate(self.optimizer, lr)
        self.pending.append(_Pending(step, lr, self._update(pixels, step)))
        # On a CPU every step is checked at once; on a GPU reading the figures would wait for it, so they are batched.
        if self.device.type == "cpu" or len(self.pending) >= self.config.log_every:
            self._flush(bar)
        self.state.step += 1
        bar.advance()

    def _update(self, pixels: ShotPixels, step: int) -> Tensor:
        """One step of the optimiser; the loss and its parts. -> [1 + parts]"""
        labels = self.labels[pixels.rows].to(self.device)
        second = None if pixels.second is None else self._normalized(pixels.second)
        batch = ShotBatch(
            self._normalized(pixels.first), labels, second, seed=self.config.seed, step=step, steps=self.total_steps
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            terms = self.method.loss(batch, self.classes)
        self.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()  # type: ignore[no-untyped-call]
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.params, self.config.clip_norm)
        self.optimizer.step()
        self.method.after_step(step, self.total_steps)
        self.names = ("loss", *terms.parts)
        return torch.stack([terms.total.detach(), *(part.detach() for part in terms.parts.values())]).float()

    def _normalized(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, S, S] -> float32, on the device"""
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        return self.transform.normalize(pixels.to(self.device, non_blocking=True))

    def _flush(self, bar: TrainProgress) -> None:
        """Read the pending figures: stop at the first that is not finite, log every ``log_every``-th."""
        if not self.pending:
            return
        table = torch.stack([pending.values for pending in self.pending]).tolist()
        for (step, lr, _), values in zip(self.pending, table, strict=True):
            figures = dict(zip(self.names, values, strict=True))
            broken = [name for name, value in figures.items() if not abs(value) < float("inf")]
            if broken:
                raise self._non_finite(step, broken[-1])
            if step % self.config.log_every == 0:
                self._log({"step": step, "epoch": step // self.feed.steps_per_epoch + 1, "lr": lr, **figures})
                bar.terms(figures)
        self.pending.clear()

    def _non_finite(self, step: int, part: str) -> NonFiniteLoss:
        photos = [self.feed.shots.photos.name(row) for row in self.feed.rows_of(step)]
        shown = ", ".join(photos[:4]) + (f" … ({len(photos)} photos)" if len(photos) > 4 else "")
        kept = self.out is not None and has_checkpoint(self.out / "checkpoint")
        where = f"; the last good checkpoint is in {self.out}/checkpoint" if kept else ""
        half = " or train.precision=fp32" if self.config.precision == "bf16" else ""
        return NonFiniteLoss(
            f"'{part}' is not finite at step {step} (epoch {step // self.feed.steps_per_epoch + 1}); the batch held: "
            f"{shown}{where} — lower train.lr (now {self.config.lr:g}){half}, or set train.clip_norm=1"
        )

    def _epoch_ended(self, epoch: int, rate: float, bar: TrainProgress) -> None:
        self._flush(bar)
        # Like every row, it names the last step it knows: a resumed run keeps the rows below its first.
        self._log({"step": self.state.step - 1, "epoch": epoch, "steps_per_second": round(rate, 3)})
        every, last = self.config.checkpoint_epochs, epoch == self.config.epochs
        if every and (last or epoch % every == 0):
            self._save(bar)
        if last or epoch % max(1, self.config.epochs // _LINES) == 0:
            bar.say(f"epoch {epoch}/{self.config.epochs}, {rate:.1f} steps/s")

    def _log(self, row: Row) -> None:
        self.history.append(row)
        for tracker in self.trackers:
            tracker.log(row)

    def _save(self, bar: TrainProgress) -> None:
        """Checkpoint; figures still pending are looked at first, so that no poisoned state is kept."""
        self._flush(bar)
        if self.out is not None:
            folder = self.out / "checkpoint"
            save_checkpoint(folder, self.learned, self.optimizer, state=self.state, fingerprint=self.fingerprint)


class Learned(nn.Module):
    """A method as checkpoints see it: what it stores, and its own buffers such as a running mean, without its CLIP."""

    def __init__(self, inner: FewshotMethod) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors by name."""
        return {**self.inner.weights(), **self._own_buffers()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """What it stores comes first: a method may start its buffers from that."""
        names = self._own_buffers().keys() - self.inner.weights().keys()
        self.inner.load_weights({name: tensor for name, tensor in state_dict.items() if name not in names})
        with torch.no_grad():
            for name, buffer in self._own_buffers().items():
                buffer.copy_(state_dict[name])

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.inner.named_buffers() if not name.startswith("clip.")}


def check_checkpoint(folder: Path, *, fingerprint: str) -> None:
    """Refuse a checkpoint of another run before anything beside it is written."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("fingerprint")
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a whole checkpoint ({error}) — delete {folder}, or choose a new --out"
        ) from error
    if found != fingerprint:
        message = f"{path} belongs to a run with another configuration or data"
        raise OtherRun(f"{message} — resume with the recipe of that run, or choose a new --out")
