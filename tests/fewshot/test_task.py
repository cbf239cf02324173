"""The task: what a step sees, what a checkpoint holds, that a stopped run ends as an unbroken one, the scheduler."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from vacsr.errors import NonFiniteLoss, UsageError
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.model import learning_rate
from vacsr.files import read_tensors
from vacsr.train.trainer import Trainer

from .conftest import TRANSFORM, Make, Toy, colours


def toy(trainer: Trainer) -> Toy:
    return trainer.task.model


def test_a_run_is_a_plain_loop_over_its_batches(make_trainer: Make) -> None:
    trainer = make_trainer(momentum=0.9, weight_decay=0.01, clip_norm=0.05)
    config, loader = trainer.task.config, trainer.task.loader
    trainer.run(progress=False)
    weights = list(Toy(torch.Generator().manual_seed(config.seed)).map.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights]
    mean = torch.zeros(3, 3)
    for step, batch in enumerate(loader.stream(0, 9)):
        pixels = TRANSFORM.normalize(batch.pixels).mean(dim=(2, 3))
        loss = functional.cross_entropy(functional.linear(pixels, *weights), batch.labels)
        grads = torch.autograd.grad(loss, weights)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        lr = learning_rate(step, steps_per_epoch=3, config=config)
        with torch.no_grad():
            for weight, speed, grad in zip(weights, speeds, grads, strict=True):
                speed.mul_(0.9).add_(grad * min(1.0, 0.05 / float(norm)) + 0.01 * weight)
                weight.sub_(lr * speed)
        mean += weights[0].detach() / 9
    torch.testing.assert_close(toy(trainer).mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(toy(trainer).map.bias, weights[1])
    assert torch.equal(toy(trainer).map.weight, toy(trainer).mean)  # what `finish` does


@pytest.mark.parametrize("second", [False, True])
def test_batches_carry_what_methods_ask_for(make_trainer: Make, second: bool) -> None:
    trainer = make_trainer(seed=7, second=second)
    trainer.run(progress=False)
    batches = toy(trainer).batches
    assert [batch.step for batch in batches] == toy(trainer).after == list(range(9))
    assert {(batch.seed, batch.second is not None) for batch in batches} == {(7, second)}
    assert toy(trainer).finished == 1
    colour = torch.stack([batch.pixels.mean(dim=(2, 3)).argmax(dim=1) for batch in batches])
    assert torch.equal(colour, torch.stack([batch.labels for batch in batches]))


def test_gradients_accumulate(make_trainer: Make) -> None:
    """Two batches of two are a batch of four; after_step and the scheduler count optimiser steps."""
    shots = colours(8)
    whole = make_trainer(shots, crop=(1.0, 1.0))
    halves = make_trainer(shots, crop=(1.0, 1.0), batch_size=2, accumulate=2)
    for trainer in (whole, halves):
        trainer.run(progress=False)
    assert toy(whole).after == toy(halves).after == list(range(6))
    torch.testing.assert_close(toy(halves).map.bias, toy(whole).map.bias)
    with pytest.raises(UsageError, match=r"lower train\.accumulate"):
        make_trainer(shots, accumulate=3)


# -------------------------------------------------------------------------------------------------- stop and go on


def test_a_finished_run_resumes_to_itself(make_trainer: Make, tmp_path: Path) -> None:
    """Its checkpoint holds what learns, and buffers."""
    whole = make_trainer(out=tmp_path, checkpoint_epochs=2)
    assert not whole.run(progress=False).model.training
    tensors, metadata = read_tensors(tmp_path / "checkpoint" / "state.safetensors")
    names = {name for name in tensors if name.startswith("model.")}
    assert names == {"model.map.weight", "model.map.bias", "model.mean"}
    assert json.loads(metadata["state"])["step"] == 9
    again = make_trainer(out=tmp_path, checkpoint_epochs=2)
    again.resume()
    again.run(progress=False)
    assert (toy(again).after, toy(again).finished) == ([], 1)
    assert torch.equal(toy(again).map.weight, toy(whole).map.weight)


def test_a_loss_that_is_not_finite_names_the_photos(make_trainer: Make) -> None:
    trainer = make_trainer()
    with torch.no_grad():
        toy(trainer).map.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss, match=r"'ce' is not finite at step 0.*colour \d+"):
        trainer.run(progress=False)


# -------------------------------------------------------------------------------------------------------- scheduler


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_the_cosine_moves_once_an_epoch_and_begins_after_the_warm_up(epochs: int, warmup: int) -> None:
    config = FewshotTrainConfig(epochs=epochs, lr=0.3, warmup_epochs=warmup, warmup_lr=1e-5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, float(epochs))
    for epoch in range(epochs):
        expected = 1e-5 if epoch < warmup else optimizer.param_groups[0]["lr"]
        for step in range(4 * epoch, 4 * epoch + 4):
            assert learning_rate(step, steps_per_epoch=4, config=config) == pytest.approx(expected, abs=1e-12)
        if epoch >= warmup:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch wants a step of the optimiser first
                cosine.step()


def test_the_cosine_by_steps_and_a_constant_rate() -> None:
    config = FewshotTrainConfig(epochs=2, lr=0.3, warmup_epochs=0, schedule="cosine-step")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(10):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(step, steps_per_epoch=5, config=config) == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        cosine.step()
    constant = FewshotTrainConfig(epochs=3, lr=0.3, warmup_epochs=1, schedule="constant")
    assert [learning_rate(step, steps_per_epoch=2, config=constant) for step in (0, 1, 2, 5)] == [1e-5, 1e-5, 0.3, 0.3]
