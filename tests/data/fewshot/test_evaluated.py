"""Each layout from the disk to its figures: what is tested, over which classes, and how it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vacsr.backbones.images import PhotoTransform
from vacsr.data.fewshot import COOP_SETS
from vacsr.evaluate.fewshot import fewshot_result
from vacsr.fewshot.config import FewshotDataConfig
from vacsr.fewshot.methods import ClassSet, FewshotMethod
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.model import FewshotModel
from vacsr.fewshot.task import FewshotSets, ReportSet, load_sets

TARGETS = ("imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r")


class Stubborn(FewshotMethod):
    """Calls every photo the same class, by name: its accuracy is that class's share of the photos."""

    def __init__(self, name: str) -> None:
        clip = nn.Linear(1, 1)
        clip.freeze = lambda: None  # type: ignore[assignment]
        super().__init__(clip, ZeroshotConfig(), classes=ClassSet((name,)), generator=torch.Generator())  # type: ignore[arg-type]
        self.name = name

    def loss(self, batch: Any, classes: Any) -> Any:
        raise NotImplementedError

    def prepare(self, classes: ClassSet) -> Tensor:
        return torch.tensor([float(name == self.name) for name in classes.names])

    def logits(self, pixels: Tensor, prepared: Any) -> Tensor:
        return prepared.expand(len(pixels), -1)


def accuracy(tested: ReportSet, name: str) -> float:
    transform = PhotoTransform(4, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), resize="center")
    model = FewshotModel(Stubborn(name), tested.classes, transform, {})
    found = model.evaluate(tested.photos, tested.classes, workers=1)
    result = fewshot_result(tested.split, found, classes=len(tested.classes.names))
    assert result["samples"] == len(tested.photos)
    assert result["classes"] == len(tested.classes.names)
    return float(result["accuracy"])


def share(listed: list[Any], names: list[str], name: str) -> float:
    """In percent, of the listed photos of these classes."""
    own = [one for _, _, one in listed if one in names]
    return 100 * own.count(name) / len(own)


def task(world: Any, name: str, **fields: Any) -> FewshotSets:
    return load_sets(FewshotDataConfig(spec=f"coop:{world.root},set={name}", shots=2, seed=1, **fields))


@pytest.mark.parametrize("name", COOP_SETS)
def test_base_and_new_of_each_set(world: Any, name: str) -> None:
    truth = world.truth[name]
    half = (len(truth.classes) + 1) // 2
    base, new = truth.classes[:half], truth.classes[half:]
    made = task(world, name, protocol="base-to-novel")
    assert [one.split for one in made.tests] == ["base", "new"]
    assert made.classes.names == tuple(base)
    assert set(made.train.labels.tolist()) == set(range(half))
    for tested, names in zip(made.tests, (base, new), strict=True):
        assert tested.classes.names == tuple(names)
        assert tested.classes.template == truth.template
        for chosen in (names[0], names[-1]):
            assert accuracy(tested, chosen) == pytest.approx(share(truth.test, names, chosen))


def test_domains_of_imagenet_over_their_own_classes(world: Any) -> None:
    targets = {name: f"coop:{world.root},set={name}" for name in TARGETS}
    made = task(world, "imagenet", protocol="domain", targets=targets)
    assert {one.split: len(one.classes.names) for one in made.tests} == {
        "source": 1000,
        "imagenetv2": 1000,
        "imagenet_sketch": 1000,
        "imagenet_a": 200,
        "imagenet_r": 200,
    }
    assert [one.classes.shifted for one in made.tests] == [False, True, True, True, True]
    for tested in made.tests:
        truth = world.truth["imagenet" if tested.split == "source" else tested.split]
        assert tested.classes.names == tuple(truth.classes)
        chosen = truth.classes[7]
        assert accuracy(tested, chosen) == pytest.approx(share(truth.test, truth.classes, chosen))
