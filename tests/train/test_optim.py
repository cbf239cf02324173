from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.methods.base import ParamGroup
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.train.optim import build_optimizer, lr_factor, set_learning_rate


def factors(config: TrainConfig, steps: list[int], *, per_epoch: int = 10) -> list[float]:
    return [lr_factor(step, steps_per_epoch=per_epoch, config=config) for step in steps]


def test_constant_with_warm_up() -> None:
    config = TrainConfig(epochs=2, schedule="constant", warmup_steps=4)
    assert factors(config, [0, 1, 2, 3, 4, 19]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(TrainConfig(schedule="constant"), [0, 7, 199]) == [1.0, 1.0, 1.0]


def test_step_falls_at_the_start_of_an_epoch() -> None:
    config = TrainConfig(epochs=5, schedule="step", decay_at=0.6, decay=0.2, warmup_steps=2)
    assert factors(config, [0, 1, 2, 29, 30, 49]) == [0.5, 1.0, 1.0, 1.0, 0.2, 0.2]


def test_the_papers_step() -> None:
    config = TrainConfig(epochs=25, schedule="step", decay_at=0.6)
    assert factors(config, [14 * 10 + 9, 15 * 10]) == [1.0, 0.1]


def test_cosine_after_warm_up() -> None:
    config = TrainConfig(epochs=2, schedule="cosine", warmup_steps=4)
    half = 4 + 8  # 16 steps after the warm-up
    expected = [0.25, 1.0, 1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(math.pi * 15 / 16)), 0.0]
    assert factors(config, [0, 3, 4, 8, half, 19, 20]) == pytest.approx(expected, abs=1e-12)
    falling = factors(config, list(range(4, 20)))
    assert falling == sorted(falling, reverse=True)


def test_a_warm_up_longer_than_the_run() -> None:
    config = TrainConfig(epochs=1, schedule="cosine", warmup_steps=100)
    assert factors(config, [0, 9]) == [0.01, 0.1]


def small_groups() -> list[ParamGroup]:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))
    return [ParamGroup("heads", [weight]), ParamGroup("scale", [bias], lr_scale=0.1, decay=False)]


def test_groups_keep_their_scale_and_decay() -> None:
    optimizer = build_optimizer(small_groups(), TrainConfig(lr=0.01, weight_decay=0.3))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.001])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_a_learning_rate_may_be_a_tensor() -> None:
    """What a captured step reads must be changed in place."""
    optimizer = build_optimizer(small_groups(), TrainConfig())
    held = torch.tensor(0.0)
    optimizer.param_groups[1]["lr"] = held
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[1]["lr"] is held
    assert float(held) == pytest.approx(0.05)


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    head = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(VacsrConfig(lr_scale=0.3), head, image_dim=6, text_dim=5)
    optimizer = build_optimizer(model.param_groups(), TrainConfig(weight_decay=0.1, lr=1.0))
    placed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.1 if group["params"][0].ndim >= 2 else 0.0)
        assert len({p.ndim >= 2 for p in group["params"]}) == 1
        assert group["lr"] == pytest.approx(0.3 if group["name"].startswith("adapter") else 1.0)


def test_adamw_is_adamw() -> None:
    """Against the update written out, per group."""
    config = TrainConfig(lr=0.02, weight_decay=0.1, betas=(0.8, 0.95))
    groups = small_groups()
    optimizer = build_optimizer(groups, config)
    expected = [group.params[0].detach().double().clone() for group in groups]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    for step in range(1, 4):
        for n, group in enumerate(groups):
            gradient = torch.sin(torch.arange(group.params[0].numel()) + step).view_as(group.params[0])
            group.params[0].grad = gradient
            lr, decay = 0.02 * group.lr_scale, 0.1 if group.decay else 0.0
            first = 0.8 * moments[n][0] + 0.2 * gradient
            second = 0.95 * moments[n][1] + 0.05 * gradient**2
            moments[n] = first, second
            expected[n] *= 1 - lr * decay
            expected[n] -= lr * (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        optimizer.step()
    for group, wanted in zip(groups, expected, strict=True):
        torch.testing.assert_close(group.params[0].detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_adamp_projects_scale_invariant_weights() -> None:
    """A matrix whose gradient is orthogonal to it keeps growing under AdamW; AdamP removes the radial part."""
    grown = {}
    for name in ("adamw", "adamp"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 8))
        config = TrainConfig(lr=0.1, weight_decay=0.0, optimizer=name)
        optimizer = build_optimizer([ParamGroup("heads", [weight])], config)
        target, start = torch.randn(8), float(weight.detach().norm())
        for _ in range(20):
            optimizer.zero_grad()
            (1 - torch.cosine_similarity(weight, target, dim=1)).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        grown[name] = float(weight.detach().norm()) - start
    assert grown["adamp"] < 0.5 * grown["adamw"]
