"""The learning rate against torch's own schedulers, wired as the public frame wires them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.optim import build_optimizer, learning_rate
from vacsr.methods.base import ParamGroup


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


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_groups_keep_their_scale_and_decay(kind: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [ParamGroup("a", params[:1], 1.0, True), ParamGroup("b", params[1:], 0.1, False)]
    config = FewshotTrainConfig(optimizer=kind, momentum=0.5, weight_decay=0.2)  # type: ignore[arg-type]
    optimizer = build_optimizer(groups, config)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [group["lr_scale"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert type(optimizer) is (torch.optim.SGD if kind == "sgd" else torch.optim.AdamW)
    assert optimizer.param_groups[0].get("momentum", 0.5) == 0.5


def test_sgd_steps_as_written_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer([ParamGroup("a", [weight])], FewshotTrainConfig(lr=0.1, momentum=0.9, weight_decay=0.5))
    value, speed = 2.0, 0.0
    for gradient in (1.0, -0.5, 2.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        speed = 0.9 * speed + gradient + 0.5 * value
        value -= 0.1 * speed
        assert weight.item() == pytest.approx(value)
