"""Few-shot recognition as a task: what a protocol trains, validates and tests on, and how the trainer trains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.data.fewshot import (
    FewshotSource,
    LabelledPhotos,
    Shots,
    base_and_new,
    draw_shots,
    load_classes,
    load_shots,
    take_shots,
)
from vacsr.data.fewshot.templates import check_template
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.config import FewshotDataConfig, FewshotTrainConfig
from vacsr.fewshot.methods import ClassSet, ShotBatch
from vacsr.fewshot.model import FewshotModel
from vacsr.fewshot.shots import ShotLoader
from vacsr.objective import LossTerms
from vacsr.train.callbacks import Callback
from vacsr.train.optim import build_optimizer
from vacsr.train.trainer import Task, Trainer


class ReportSet(NamedTuple):
    """One test set, over its own classes."""

    split: str  # its name in the report
    photos: LabelledPhotos
    classes: ClassSet


class FewshotSets(NamedTuple):
    """All the data of a run."""

    source: FewshotSource
    shots: Shots
    train: LabelledPhotos  # the shots to learn from
    val: LabelledPhotos  # the shots to choose settings on, of the same classes; may be empty
    classes: ClassSet  # of training
    tests: tuple[ReportSet, ...]


def load_sets(config: FewshotDataConfig) -> FewshotSets:
    """Load the data, draw the shots over all classes, and split by the protocol.

    ``base-to-novel`` trains on the base half and tests ``base`` and ``new``, each over its own half; ``domain`` trains
    on all classes and tests the ``source`` and every target over the target's own classes, all its photos where it has
    no splits; ``all`` tests the source.
    """
    check_targets(config)
    source = load_classes(config.spec)
    if config.shots_file:
        shots = load_shots(config.shots_file, source)
    else:
        shots = draw_shots(source, shots=config.shots, seed=config.seed)
    taken = take_shots(source, shots)
    train, val, splits = taken.train, taken.val, {"test": source.test}
    if config.protocol == "base-to-novel":
        halves = base_and_new(len(source.test.classes))
        train, val = train.only(halves.base), val.only(halves.base)
        splits = {"base": source.test.only(halves.base), "new": source.test.only(halves.new)}
    elif config.protocol == "domain":
        splits = {"source": source.test}
    if not len(train):
        raise DataError(f"{train.name}: no shots of the classes to train on — draw them again")
    tests = [ReportSet(split, photos, _class_set(photos, source, config)) for split, photos in splits.items()]
    for name, spec in config.targets.items():
        target = load_classes(spec, whole=True)
        tests.append(ReportSet(name, target.test, _class_set(target.test, target, config)._replace(shifted=True)))
    for test in tests:
        if not len(test.photos):
            raise DataError(f"{test.photos.name} has no photos to test — check the data set")
        test.photos.check_files()
    classes = _class_set(train, source, config)
    if config.sentences:
        classes = classes._replace(sentences=read_sentences(Path(config.sentences).expanduser(), classes.names))
    return FewshotSets(source, shots, train, val, classes, tuple(tests))


def check_targets(config: FewshotDataConfig) -> None:
    """Refuse targets that the protocol does not test, missing targets, and a name that the report uses itself."""
    if (config.protocol == "domain") != bool(config.targets):
        wrong = "needs data.targets" if config.protocol == "domain" else "has no use for data.targets"
        raise UsageError(
            f"protocol {config.protocol!r} {wrong} — write e.g. targets: {{sketch: SPEC}} with domain only"
        )
    if "source" in config.targets:
        raise UsageError("a target is called 'source', as the report calls data.spec itself — give it another name")


def _class_set(photos: LabelledPhotos, source: FewshotSource, config: FewshotDataConfig) -> ClassSet:
    return ClassSet(photos.classes, check_template(config.template or source.template))


def read_sentences(path: Path, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Descriptions of these classes, in their order, from a JSON file {class name: [sentences]}.

    Names match regardless of case, and of underscores or spaces.
    """
    by_name = {_plain(str(name)): sentences for name, sentences in read_json(path, keys=()).items()}
    missing = [name for name in names if not _are_sentences(by_name.get(_plain(name)))]
    if missing:
        message = f"{path}: {len(missing):,} of {len(names):,} classes have no list of sentences, first {missing[0]!r}"
        raise DataError(f"{message} — add them as {{class name: [sentences]}}")
    return tuple(tuple(by_name[_plain(name)]) for name in names)


def _plain(name: str) -> str:
    return name.replace("_", " ").casefold().strip()


def _are_sentences(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one.strip() for one in value)


class FewshotTask(Task):
    """Trains a few-shot method on its shots. The final weights count: no epoch is chosen by a metric."""

    def __init__(
        self, model: FewshotModel, shots: LabelledPhotos, config: FewshotTrainConfig, *, label: str = "shots"
    ) -> None:
        self.fewshot, self.shots, self.config, self.label = model, shots, config, label
        self.model = self.method = model.method
        self.device = model.device
        self.described = {}  # set by the run, which knows the recipe
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
        learned = self.method.trainable()
        state = self.method.state_dict()
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
    warm_up = config.warmup_epochs * steps_per_epoch
    if step < warm_up:
        return config.warmup_lr
    if config.schedule == "constant":
        return config.lr
    done = step - warm_up
    if config.schedule == "cosine-epoch":
        done = done // steps_per_epoch * steps_per_epoch
    return 0.5 * config.lr * (1.0 + math.cos(math.pi * done / (config.epochs * steps_per_epoch)))
