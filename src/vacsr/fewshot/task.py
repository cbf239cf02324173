"""Few-shot recognition as a task of the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.data.fewshot import LabelledPhotos
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.data import ShotLoader
from vacsr.fewshot.methods import ShotBatch
from vacsr.fewshot.model import FewshotModel
from vacsr.objective import LossTerms
from vacsr.train.callbacks import Callback
from vacsr.train.optim import build_optimizer
from vacsr.train.trainer import Task, Trainer


class FewshotTask(Task):
    """Trains a few-shot method on its shots. The final weights count: no epoch is chosen by a metric."""

    def __init__(
        self,
        model: FewshotModel,
        shots: LabelledPhotos,
        config: FewshotTrainConfig,
        *,
        label: str = "shots",
        description: dict[str, Any] | None = None,
    ) -> None:
        self.fewshot, self.shots, self.config, self.label = model, shots, config, label
        self.model = self.method = model.method
        self.device, self.description = model.device, description or {}
        self.loader = ShotLoader(shots, config, transform=model.transform, second=model.method.second_view)
        self.steps_per_epoch = self.loader.steps_per_epoch
        self.stream: Iterator[ShotBatch] = iter(())
        self.next_step = -1  # of the stream

    def build_optimizer(self) -> Optimizer:
        c, groups = self.config, self.method.param_groups()
        return build_optimizer(groups, c.optimizer, lr=c.lr, weight_decay=c.weight_decay, momentum=c.momentum)

    def learning_rate(self, step: int) -> float:
        steps = self.steps_per_epoch // self.config.accumulate
        return learning_rate(step, steps_per_epoch=steps, config=self.config)

    def callbacks(self) -> list[Callback]:
        """The method's own work after a step, such as a running mean of its weights."""
        return [_AfterStep(self)]

    def batches(self, epoch: int, start: int) -> Iterator[ShotBatch]:
        """From one stream for the whole run, so that threads prepare the next epoch's batches during this one."""
        first = epoch * self.steps_per_epoch + start
        if self.next_step != first:
            self.stream = self.loader.stream(first, self.config.epochs * self.steps_per_epoch)
        self.next_step = (epoch + 1) * self.steps_per_epoch
        return islice(self.stream, self.steps_per_epoch - start)

    def loss(self, batch: ShotBatch, step: Tensor) -> LossTerms:
        pixels, labels = self._normalised(batch.pixels), batch.labels.to(self.device)
        second = None if batch.second is None else self._normalised(batch.second)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return self.method.loss(batch._replace(pixels=pixels, labels=labels, second=second), self.fewshot.classes)

    def _normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, S, S] -> float32, on the device"""
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        return self.fewshot.transform.normalize(pixels.to(self.device, non_blocking=True))

    def batch_ids(self, step: int) -> list[str]:
        return [self.shots.photos.name(row) for row in self.loader.pass_and_rows(step)[1].tolist()]

    def finish(self) -> None:
        self.method.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """The method's parameters and buffers, such as a running mean, without what is frozen in its CLIP."""
        learned, state = self.method.trainable(), self.method.state_dict()
        return {name: x for name, x in state.items() if name in learned or not name.startswith("clip.")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.method.load_state_dict(state, strict=False)


class _AfterStep(Callback):
    """Calls the method after each optimiser step."""

    def __init__(self, task: FewshotTask) -> None:
        self.task = task

    def on_step(self, trainer: Trainer, step: int) -> None:
        group = self.task.config.accumulate
        if (step + 1) % group == 0:
            self.task.method.after_step(step // group, trainer.total_steps // group)


def learning_rate(step: int, *, steps_per_epoch: int, config: FewshotTrainConfig) -> float:
    """The scheduler: the base rate of an optimiser step.

    After the warm-up the cosine starts from its beginning and has a period of all epochs, so that it is cut off before
    its end by as many epochs as the warm-up took, as in the public code.

    >>> config = FewshotTrainConfig(epochs=4, lr=1.0, warmup_epochs=1)
    >>> [round(learning_rate(10 * epoch, steps_per_epoch=10, config=config), 3) for epoch in range(4)]
    [0.0, 1.0, 0.854, 0.5]
    """
    done = step - config.warmup_epochs * steps_per_epoch
    if done < 0:
        return config.warmup_lr
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine-epoch":
        done = done // steps_per_epoch * steps_per_epoch
    return 0.5 * config.lr * (1.0 + math.cos(math.pi * done / (config.epochs * steps_per_epoch)))
