"""A small world, a method that needs no towers, and a trained start for methods that do."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vacsr.backbones.images import PhotoTransform
from vacsr.config.io import recipe_from
from vacsr.data.fewshot import LabelledPhotos, load_classes
from vacsr.data.photos import ArrayPhotos
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch
from vacsr.fewshot.methods.base import ZeroshotConfig, cross_entropy
from vacsr.fewshot.model import FewshotModel, FewshotTask
from vacsr.objective import LossTerms
from vacsr.provenance import UNKNOWN
from vacsr.train import run_recipe
from vacsr.train.trainer import Trainer

TRANSFORM = PhotoTransform(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), resize="center")
CLASSES = ClassSet(("red", "green", "blue"))
START: dict[str, Any] = {
    "data": {"pairs": "scenes:images=40,held_out=8,per_image=2,size=32", "dev": ""},
    "backbone": {
        "spec": "tiny:width=16,depth=2,text_depth=2,heads=2,size=32",
        "image_output": "norm",
        "text_output": "norm",
        "pooling": "cls",
        "head": {"kind": "linear", "dim": 8},
    },
    "method": "infonce",
    "train": {"epochs": 1, "batch_size": 16, "device": "cpu", "eval_every": 0, "towers": {"image_lr": 1.0}},
    "evaluate": {"splits": []},
}


class StandIn(nn.Module):
    """Where a CLIP would be."""


class Toy(FewshotMethod):
    """A linear map of the mean colour, and a mean of its weights over training that takes their place at the end."""

    mean: Tensor

    def __init__(self, generator: torch.Generator, *, second: bool = False) -> None:
        super().__init__(StandIn(), ZeroshotConfig(), classes=CLASSES, generator=generator)  # type: ignore[arg-type]
        self.second_view = second  # type: ignore[misc]
        self.map = nn.Linear(3, 3)
        with torch.no_grad():
            self.map.weight.copy_(0.1 * torch.randn(3, 3, generator=generator))
            self.map.bias.zero_()
        self.register_buffer("mean", torch.zeros(3, 3))
        self.after: list[int] = []
        self.batches: list[ShotBatch] = []
        self.finished = 0

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        self.batches.append(batch)
        assert classes == CLASSES
        return cross_entropy(self.map(batch.pixels.mean(dim=(2, 3))), batch.labels)

    def prepare(self, classes: ClassSet) -> Tensor:
        return torch.eye(3)[:, : len(classes.names)]

    def predict(self, pixels: Tensor, prepared: Tensor) -> tuple[Tensor, None]:
        return self.map(pixels.mean(dim=(2, 3))) @ prepared, None

    def after_step(self, step: int, steps: int) -> None:
        self.after.append(step)
        self.mean += self.map.weight.detach() / steps

    @torch.no_grad()
    def finish(self) -> None:
        self.finished += 1
        self.map.weight.copy_(self.mean)


def colours(count: int, *, seed: int = 0, size: tuple[int, int] = (10, 14)) -> LabelledPhotos:
    """Noisy photos of which each is mostly red, green or blue."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    pixels = rng.integers(0, 120, (count, *size, 3), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, :, :, label] += 100
    names = tuple(f"colour {row}" for row in range(count))
    return LabelledPhotos(ArrayPhotos(pixels, names), torch.from_numpy(labels), CLASSES.names, "colours")


class CountingPhotos:
    """Photos that remember how often each was opened."""

    def __init__(self, inner: ArrayPhotos) -> None:
        self.inner, self.opened = inner, [0] * len(inner)

    def __len__(self) -> int:
        return len(self.inner)

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        assert side == 0, "crops are taken from the whole photo"
        self.opened[row] += 1
        return self.inner.open(row)


Make = Callable[..., Trainer]


@pytest.fixture
def make_trainer() -> Make:
    """A trainer of the toy on coloured photos."""

    def make(
        shots: LabelledPhotos | None = None, *, out: Path | None = None, second: bool = False, **fields: Any
    ) -> Trainer:
        fields = {"epochs": 3, "batch_size": 4, "lr": 0.5, "warmup_epochs": 0, "log_every": 1, "workers": 1} | fields
        config = FewshotTrainConfig(device="cpu", **fields)
        method = Toy(torch.Generator().manual_seed(config.seed), second=second)
        model = FewshotModel(method, CLASSES, TRANSFORM, UNKNOWN)
        return Trainer(FewshotTask(model, shots or colours(14), config), config, out)

    return make


_load_once = cache(load_classes)


@pytest.fixture(autouse=True)
def _drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing scenes is most of what a small run does; the same SPEC gives the same ones."""
    monkeypatch.setattr("vacsr.fewshot.data.load_classes", _load_once)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `vacsr train` with tiny towers, hardly trained."""
    folder = tmp_path_factory.mktemp("start") / "run"
    run_recipe(recipe_from(START), folder, progress=False)
    return folder


@pytest.fixture
def raw(start: Path) -> dict[str, Any]:
    """A quick few-shot recipe on the scenes world."""
    return {
        "preset": "none",
        "data": {"spec": "scenes:classes=6,train=8,test=4,size=32", "shots": 3},
        "backbone": {"start": str(start)},
        "method": "coop",
        "train": {"epochs": 2, "batch_size": 4, "device": "cpu", "lr": 0.1, "warmup_epochs": 0, "workers": 1},
    }
