"""Averaged weights, the teacher they make, and the trust in captions."""

import copy
from typing import Any

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.data.noise import apply_noise, make_noise
from vacsr.errors import UsageError
from vacsr.objective import batch_block
from vacsr.scoring import PairScorer
from vacsr.train.callbacks import Callback
from vacsr.train.data import Batch
from vacsr.train.trainer import Trainer

from .conftest import make


class Recorder(Callback):
    def __init__(self, model: Any) -> None:
        self.model, self.weights = model, [copy.deepcopy(model.state_dict())]

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.weights.append(copy.deepcopy(self.model.state_dict()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_is_that_of_all_weights_so_far(pairs: PairSet, accumulate: int) -> None:
    trainer = make(pairs, "infonce", ema=0.6, accumulate=accumulate, epochs=2)
    recorder = Recorder(trainer.task.model)
    trainer.callbacks.append(recorder)
    run = trainer.run(progress=False)
    average = recorder.weights[0]
    for number, weights in enumerate(recorder.weights[accumulate::accumulate], start=1):
        decay = min(0.6, (1 + number) / (10 + number))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, average[name])


def test_the_average_is_what_dev_sees_and_what_is_kept(pairs: PairSet, dev: PairSet) -> None:
    trainer = make(pairs, "infonce", ema=0.95, epochs=3, lr=1e-2)
    task: Any = trainer.task
    task.dev, task.eval_every, task.select_best = dev, 1, True
    seen = []
    evaluate = task.evaluate

    def spy() -> dict[str, float]:
        seen.append((evaluate()["dev_rsum"], copy.deepcopy(task.average.model)))
        return {"dev_rsum": seen[-1][0]}

    task.evaluate = spy
    run = trainer.run(progress=False)
    best = max(seen, key=lambda pair: pair[0])
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, best[1].state_dict()[name])
    assert not any(
        torch.equal(tensor, last) for tensor, last in zip(seen[0][1].parameters(), seen[1][1].parameters(), strict=True)
    )


@pytest.mark.parametrize("method", ["vacsr", "sigmoid", "infonce"])
def test_unlabelled_pairs_give_way_to_the_teacher(pairs: PairSet, method: str) -> None:
    trainer = make(pairs, {"name": method, "teacher": 0.4, "members": 2}, ema=0.9, epochs=2)
    trainer.run(progress=False)
    task: Any = trainer.task
    captions = torch.arange(8)
    image = pairs.caption_image[captions]
    block = task.taught(batch_block(image, seed=0, step=0), pairs.images[image], pairs.texts[captions])
    teacher = PairScorer(task.average.model, device="cpu").score_all(pairs.images[image], pairs.texts[captions])
    opinion = task.average.model.method.opinion(teacher.score)
    expected = torch.where(block.relevance, 1.0, 0.4 * opinion)
    torch.testing.assert_close(block.targets, expected, atol=1e-5, rtol=1e-5)
    assert bool((block.targets[~block.relevance] <= 0.4).all())


def test_wrong_captions_lose_trust() -> None:
    clean = load_pairs("synthetic:images=600,held_out=10,per_image=2", split="train")
    pairs = apply_noise(clean, make_noise("derange-captions", clean.caption_image, ratio=0.4, seed=1))
    wrong = pairs.caption_image != clean.caption_image
    method = {"name": "vacsr", "trust": 0.25, "objective": {"contrastive_weight": 2.0}}
    backbone = BackboneConfig(head=HeadConfig(dim=32))
    trainer = make(pairs, method, ema=0.9, epochs=8, batch_size=60, lr=2e-3, backbone=backbone)
    trainer.run(progress=False)
    task: Any = trainer.task
    assert float(task.trust[~wrong].mean()) > float(task.trust[wrong].mean()) + 0.35


def test_trust_waits_for_its_epoch(pairs: PairSet) -> None:
    trainer = make(pairs, {"name": "vacsr", "trust": 0.5}, ema=0.9, epochs=4)
    task: Any = trainer.task
    changed = []

    class Look(Callback):
        def on_epoch(self, trainer: Trainer, epoch: int, row: Any) -> None:
            changed.append(bool((task.trust != 1).any()))

    trainer.callbacks.append(Look())
    trainer.run(progress=False)
    assert changed == [False, False, True, True]


@pytest.mark.parametrize(
    ("method", "ema", "action"),
    [
        ({"name": "vse", "teacher": 0.5}, 0.9, "vacsr, sigmoid or infonce"),
        ({"name": "vacsr", "trust": 0.1}, 0.0, "train.ema=0.998"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(pairs: PairSet, method: Any, ema: float, action: str) -> None:
    with pytest.raises(UsageError, match=action):
        make(pairs, method, ema=ema)


def test_the_preset_names_what_it_needs(pairs: PairSet) -> None:
    config = method_config({"name": "vacsr", "preset": "ensemble"})
    with pytest.raises(UsageError, match=r"train\.ema=0\.998"):
        make(pairs, config)
    trainer = make(pairs, config, ema=0.998)
    assert trainer.task.members == 4
    values = trainer.step(Batch(torch.arange(8)), 0)
    assert bool(values.isfinite().all())
    assert {"contrastive", "recon"} <= set(trainer.step.names)
