"""A few-shot method on its CLIP: built from a recipe, trained as a task of the trainer, evaluated, saved, loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from vacsr.backbones.images import PhotoReader, PhotoTransform, Progress
from vacsr.backbones.towers import hash_weights
from vacsr.config import BackboneConfig, MethodConfig
from vacsr.config.base import method_entry
from vacsr.config.io import method_config, parse
from vacsr.data.fewshot import LabelledPhotos
from vacsr.data.photos import ListedPhotos, Photos
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.fewshot import Answers, answers, join_answers
from vacsr.fewshot.config import FewshotRecipe, FewshotTrainConfig
from vacsr.fewshot.data import ShotLoader
from vacsr.fewshot.methods import ClassSet, ClipModel, FewshotMethod, ShotBatch
from vacsr.model import choose_device
from vacsr.objective import LossTerms
from vacsr.pretrained import SavedModel, write_model_folder
from vacsr.provenance import Provenance
from vacsr.train.callbacks import Callback
from vacsr.train.optim import build_optimizer
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Task, Trainer


class Predicted(NamedTuple):
    """Predictions for N photos over C classes, on the CPU."""

    names: tuple[str, ...]  # [C] the classes, in the order of the columns
    probabilities: Tensor  # [N, C] each row sums to 1
    uncertainty: Tensor | None  # [N, C] σ of every pair of photo and class; None where the method has none

    def best(self) -> list[str]:
        """[N] the likeliest class of each photo."""
        return [self.names[index] for index in self.probabilities.argmax(dim=1).tolist()]


@dataclass(frozen=True)
class FewshotModel:
    """A method and the classes it is trained on; it takes other classes too, by their names."""

    method: FewshotMethod
    classes: ClassSet
    transform: PhotoTransform  # the shorter side resized to the tower's size, then the centre cropped
    origin: Provenance  # of the CLIP below it; the revision is a hash of its weights and scale before training

    @classmethod
    def build(
        cls, method: MethodConfig, backbone: BackboneConfig, *, classes: ClassSet, seed: int, device: torch.device
    ) -> FewshotModel:
        """New weights are drawn from ``seed``; torch's global generator is not touched."""
        clip = ClipModel.from_config(backbone)
        origin, transform = clip.backbone.provenance(), replace(clip.backbone.transform, resize="center")
        heads = nn.ModuleList([clip.image_map, clip.text_map]).state_dict()
        if heads:  # of a trained start
            origin = replace(origin, revision=hash_weights(heads, start=f"{origin.revision} {clip.scale!r}"))
        generator = torch.Generator().manual_seed(seed)
        kind = method_entry(method.name, task="fewshot").method
        built = kind(clip.to(device), method, classes=classes, generator=generator).to(device)
        return cls(built, classes, transform, origin)

    @property
    def device(self) -> torch.device:
        return next(self.method.parameters()).device

    def predict(
        self, photos: Sequence[str | Path | Image.Image], names: Sequence[str] | None = None, *, batch_size: int = 100
    ) -> Predicted:
        """Paths or PIL images against the classes of training, or against others by their names, in float32."""
        listed, classes = ListedPhotos.of(photos), self.classes
        if not len(listed):
            raise UsageError("no photos to predict — give a list of paths or PIL images")
        if names is not None and tuple(names) != classes.names:
            if isinstance(names, str) or not names or any(not name.strip() for name in names):
                raise UsageError(f"classes {names!r} — give a list of names, as in ['red tree', 'blue fish']")
            classes = ClassSet(tuple(names), classes.template)
        logits, sigmas = zip(*self._scores(listed, classes, batch_size=batch_size), strict=True)
        probabilities = torch.cat(logits).double().softmax(dim=1).float().cpu()
        sigma = None if sigmas[0] is None else torch.cat(sigmas).float().cpu()
        return Predicted(classes.names, probabilities, sigma)

    def evaluate(
        self, photos: LabelledPhotos, classes: ClassSet, *, batch_size: int = 100, workers: int = 0,
        progress: Progress | None = None,
    ) -> Answers:  # fmt: skip
        """Every photo against these classes, in float32, so that runs are comparable however they were trained."""
        parts, done = [], 0
        batches = self._scores(photos.photos, classes, batch_size=batch_size, workers=workers)
        for labels, (logits, sigma) in zip(torch.split(photos.labels, batch_size), batches, strict=True):
            parts.append(answers(logits, labels, uncertainty=sigma, graded=sigma is not None))
            done += len(labels)
            if progress is not None:
                progress(done, len(photos))
        return join_answers(parts)

    @torch.no_grad()
    def _scores(
        self, photos: Photos | ListedPhotos, classes: ClassSet, *, batch_size: int, workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Logits [B, C] and uncertainty [B, C] of all photos, batch by batch."""
        squares = PhotoReader(photos, self.transform, workers=workers).batches(batch_size)
        with matmul_precision("fp32"):
            prepared = self.method.prepare(classes)
            for pixels in squares:
                yield self.method.predict(self.transform.normalize(pixels.to(self.device)), prepared)

    def save(self, folder: Path, recipe: FewshotRecipe) -> None:
        """Write config.json and model.safetensors, the learned weights without the CLIP; both or neither."""
        start = recipe.backbone.start  # as an absolute path it is found from any working directory
        start = str(Path(start).expanduser().resolve()) if start else ""
        config = {
            "task": "fewshot",
            "backbone": recipe.backbone.model_dump(mode="json") | {"start": start},
            "origin": vars(self.origin),
            "method": recipe.method.model_dump(mode="json"),
            "classes": list(self.classes.names),
            "template": self.classes.template,
            "sentences": [list(sentences) for sentences in self.classes.sentences],
        }
        write_model_folder(folder, config, self.method.weights())


def load_fewshot(run: str | Path, *, device: str = "auto", start: str | Path | None = None) -> FewshotModel:
    """Read a run or model folder of `vacsr fewshot`; its CLIP comes from where the recipe says, and must be the same.

    ``start`` says where the run that ``backbone.start`` named is now, if it has moved.
    """
    saved = SavedModel.open(run)
    raw, tensors = saved.config, saved.tensors()
    if raw.get("task") != "fewshot":
        raise DataError(f"{saved.folder} is not a few-shot model — give a run of vacsr fewshot")
    classes = ClassSet(tuple(raw["classes"]), raw["template"], tuple(tuple(each) for each in raw["sentences"]))
    moved = {"start": str(Path(start).expanduser())} if start else {}
    backbone = parse(BackboneConfig, raw["backbone"] | moved)
    if backbone.start and not Path(backbone.start).is_dir():
        message = f"{saved.folder} is based on the towers of {backbone.start}, which is missing"
        raise DataError(f"{message} — restore that run, or say where it is: load_fewshot(RUN, start=FOLDER)")
    method = method_config(raw["method"], task="fewshot")
    model = FewshotModel.build(method, backbone, classes=classes, seed=0, device=choose_device(device))
    Provenance(**raw["origin"]).check(model.origin)
    model.method.load_weights(tensors)
    model.method.eval()
    return model


class FewshotTask(Task):
    """Trains a few-shot method on its shots. The final weights count: no epoch is chosen by a metric."""

    def __init__(
        self, model: FewshotModel, shots: LabelledPhotos, config: FewshotTrainConfig, *, label: str = "shots",
        description: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.fewshot, self.shots, self.config, self.label = model, shots, config, label
        self.model = self.method = model.method
        self.device, self.description = model.device, description or {}
        self.loader = ShotLoader(shots, config, transform=model.transform, second=model.method.second_view)
        self.steps_per_epoch = self.loader.steps_per_epoch

    def build_optimizer(self) -> Optimizer:
        c, groups = self.config, self.method.param_groups()
        return build_optimizer(groups, c.optimizer, lr=c.lr, weight_decay=c.weight_decay, momentum=c.momentum)

    def learning_rate(self, step: int) -> float:
        steps = self.steps_per_epoch // self.config.accumulate
        return learning_rate(step, steps_per_epoch=steps, config=self.config)

    def callbacks(self) -> list[Callback]:
        return [_AfterStep()]

    def batches(self, epoch: int, start: int) -> Iterator[ShotBatch]:
        first = epoch * self.steps_per_epoch
        return self.loader.stream(first + start, first + self.steps_per_epoch)

    def loss(self, batch: ShotBatch, step: Tensor) -> LossTerms:
        second = None if batch.second is None else self._normalised(batch.second)
        labels = batch.labels.to(self.device)
        batch = batch._replace(pixels=self._normalised(batch.pixels), labels=labels, second=second)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return self.method.loss(batch, self.fewshot.classes)

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
    """The method's own work after an optimiser step, such as a running mean of its weights."""

    def on_step(self, trainer: Trainer, step: int) -> None:
        group = trainer.config.accumulate
        if (step + 1) % group == 0:
            trainer.task.model.after_step(step // group, trainer.total_steps // group)  # type: ignore[operator]


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
