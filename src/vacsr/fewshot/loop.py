"""Few-shot training as a task of the trainer: shots in, a trained method out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.feed import ShotFeed, ShotPixels
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch
from vacsr.fewshot.optim import learning_rate
from vacsr.objective import LossTerms
from vacsr.train.callbacks import Callback
from vacsr.train.optim import build_optimizer
from vacsr.train.trainer import Task, Trainer


class ShotTask(Task):
    """Train a few-shot method on its shots. The last weights count: no epoch is chosen by a metric."""

    def __init__(
        self,
        method: FewshotMethod,
        feed: ShotFeed,
        config: FewshotTrainConfig,
        *,
        classes: ClassSet,
        transform: PhotoTransform,
        device: torch.device,
        label: str = "shots",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model: FewshotMethod = method
        self.feed, self.config, self.classes, self.transform = feed, config, classes, transform
        self.device, self.label, self.settings = device, label, dict(settings or {})
        self.steps_per_epoch = feed.steps_per_epoch
        self.stream: Iterator[ShotPixels] = iter(())
        self.coming = -1  # the step of the stream's next batch

    def build_optimizer(self) -> Optimizer:
        """SGD or AdamW over the method's groups."""
        config = self.config
        return build_optimizer(
            self.model.param_groups(), config.optimizer,
            lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum,
        )  # fmt: skip

    def learning_rate(self, step: int) -> float:
        """The base rate at a step."""
        return learning_rate(step, steps_per_epoch=self.steps_per_epoch, config=self.config)

    def callbacks(self) -> list[Callback]:
        """The method's own work after a step, such as a running mean of its weights."""
        return [_AfterStep(self.model)]

    def batches(self, epoch: int, start: int) -> Iterator[ShotPixels]:
        """One stream of batches for the whole run, so that those of the next epoch are made during this one."""
        first = epoch * self.steps_per_epoch + start
        if self.coming != first:
            self.stream = self.feed.stream(first, self.config.epochs * self.steps_per_epoch)
        self.coming = (epoch + 1) * self.steps_per_epoch
        return islice(self.stream, self.steps_per_epoch - start)

    def loss(self, batch: ShotPixels, step: Tensor) -> LossTerms:
        """The method's loss of a batch."""
        second = None if batch.second is None else self._normalized(batch.second)
        labels = self.feed.shots.labels[batch.rows].to(self.device)
        steps = self.config.epochs * self.steps_per_epoch
        shots = ShotBatch(
            self._normalized(batch.first), labels, second, seed=self.config.seed, step=batch.step, steps=steps
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return self.model.loss(shots, self.classes)

    def _normalized(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, S, S] -> float32, on the device"""
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        return self.transform.normalize(pixels.to(self.device, non_blocking=True))

    def batch_ids(self, step: int) -> list[str]:
        """The photos of a step's batch."""
        return [self.feed.shots.photos.name(row) for row in self.feed.rows_of(step)]

    def finish(self) -> None:
        """What the method does after training."""
        self.model.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """What the method stores, and its own buffers such as a running mean, without its CLIP."""
        return {**self.model.weights(), **self._buffers()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What the method stores comes first: it may start its buffers from that."""
        names = self._buffers().keys() - self.model.weights().keys()
        self.model.load_weights({name: tensor for name, tensor in state.items() if name not in names})
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(state[name])

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if not name.startswith("clip.")}

    def description(self) -> dict[str, Any]:
        """As the run describes itself."""
        return self.settings


class _AfterStep(Callback):
    """Calls the method after each step."""

    def __init__(self, method: FewshotMethod) -> None:
        self.method = method

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.method.after_step(step, trainer.total_steps)
