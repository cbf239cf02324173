"""The learning rate against torch's own schedulers, wired as the public frame wires them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.optim import learning_rate


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


def test_the_cosine_by_steps() -> None:
    config = FewshotTrainConfig(epochs=2, lr=0.3, warmup_epochs=0, schedule="cosine-step")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(10):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(step, steps_per_epoch=5, config=config) == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        cosine.step()


def test_a_constant_rate_and_its_warm_up() -> None:
    config = FewshotTrainConfig(epochs=3, lr=0.3, warmup_epochs=1, schedule="constant")
    assert [learning_rate(step, steps_per_epoch=2, config=config) for step in (0, 1, 2, 5)] == [1e-5, 1e-5, 0.3, 0.3]
