from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.methods.base import ParamGroup
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.train.optim import AdamP, build_optimizer, lr_factor, set_learning_rate


def optimizer_of(groups: Sequence[ParamGroup], config: TrainConfig) -> torch.optim.Optimizer:
    lr, decay = config.lr, config.weight_decay
    return build_optimizer(groups, config.optimizer, lr=lr, weight_decay=decay, betas=config.betas)


def factors(config: TrainConfig, steps: list[int], *, per_epoch: int = 10) -> list[float]:
    return [lr_factor(step, steps_per_epoch=per_epoch, config=config) for step in steps]


def test_constant_with_warm_up() -> None:
    config = TrainConfig(epochs=2, schedule="constant", warmup_steps=4)
    assert factors(config, [0, 1, 2, 3, 4, 19]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(TrainConfig(schedule="constant"), [0, 7, 199]) == [1.0, 1.0, 1.0]


def test_step_falls_at_the_start_of_an_epoch() -> None:
    config = TrainConfig(epochs=5, schedule="step", decay_at=0.6, decay=0.2, warmup_steps=2)
    assert factors(config, [0, 1, 2, 29, 30, 49]) == [0.5, 1.0, 1.0, 1.0, 0.2, 0.2]


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
    optimizer = optimizer_of(small_groups(), TrainConfig(lr=0.01, weight_decay=0.3))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.001])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adamp", AdamP), ("sgd", torch.optim.SGD)])
def test_settings_reach_the_optimiser(name: str, kind: type[Optimizer]) -> None:
    optimizer = build_optimizer(small_groups(), name, lr=0.1, weight_decay=0.5, betas=(0.8, 0.95), momentum=0.9)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    if name == "sgd":
        assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    else:
        assert getattr(optimizer, "betas", optimizer.defaults.get("betas")) == (0.8, 0.95)


def test_a_learning_rate_may_be_a_tensor() -> None:
    """What a captured step reads must be changed in place."""
    optimizer = optimizer_of(small_groups(), TrainConfig())
    held = torch.tensor(0.0)
    optimizer.param_groups[1]["lr"] = held
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[1]["lr"] is held
    assert float(held) == pytest.approx(0.05)


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    head = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(VacsrConfig(lr_scale=0.3), head, image_dim=6, text_dim=5)
    optimizer = optimizer_of(model.param_groups(), TrainConfig(weight_decay=0.1, lr=1.0))
    placed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.1 if group["params"][0].ndim >= 2 else 0.0)
        assert len({p.ndim >= 2 for p in group["params"]}) == 1
        assert group["lr"] == pytest.approx(0.3 if group["name"].startswith("adapter") else 1.0)


# ----------------------------------------------------------------------------------------------------------- AdamP

SHAPES = ((), (1,), (7,), (1, 5), (6, 5), (6, 5), (5, 6), (4, 3, 2), (1, 1, 8), (8, 3, 2, 2))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _weights(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _gradient(weight: Tensor, noise: Tensor, kind: str) -> Tensor:
    """Noise as it is; without its part along each row; or along the whole, while single rows keep theirs."""
    if weight.dim() < 2 or kind == "any":
        return noise
    rows, flat = weight.detach().flatten(1), noise.flatten(1)
    if kind == "layer":
        rows, flat = rows.reshape(1, -1), flat.reshape(1, -1)
    return (flat - rows * (rows * flat).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)).reshape(noise.shape)


def _train(
    optimizer: Optimizer, weights: list[nn.Parameter], *, kinds: Sequence[str], steps: int, start: int = 0
) -> None:
    """Steps with a gradient of each kind in turn; every fifth parameter has none in odd steps."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for number, weight in enumerate(weights):
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            absent = step % 2 == 1 and number % 5 == 4
            kind = kinds[(step + number) % len(kinds)]
            weight.grad = None if absent else _gradient(weight.cpu(), noise, kind).to(weight.device)
        optimizer.step()


def _oracle(weights: list[nn.Parameter], **options: object) -> Optimizer:
    return pytest.importorskip("adamp").AdamP(weights, **options)


def _assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach().cpu(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.2},
        {"weight_decay": 0.2, "betas": (0.0, 0.5)},
        {"weight_decay": 1.0, "delta": 5.0, "wd_ratio": 0.5, "eps": 1e-3},
        {"delta": 0.0},
    ],
)
@pytest.mark.parametrize("kinds", [["any"], ["any", "channel", "layer"]], ids="-".join)
def test_adamp_is_that_of_its_authors(options: dict[str, Any], dtype: torch.dtype, kinds: list[str]) -> None:
    ours, theirs = _weights(dtype=dtype), _weights(dtype=dtype)
    _train(AdamP(ours, lr=0.01, **options), ours, kinds=kinds, steps=12)
    _train(_oracle(theirs, lr=0.01, **options), theirs, kinds=kinds, steps=12)
    within = 1e-6 if dtype == torch.float32 else 1e-8
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=within, atol=within)


def _first_step(kind: str, *, delta: float) -> Tensor:
    weights = _weights(shapes=[(6, 5)])
    _train(AdamP(weights, lr=0.1, delta=delta, weight_decay=1.0), weights, kinds=[kind], steps=1)
    return weights[0].detach() - _weights(shapes=[(6, 5)])[0].detach()


def test_the_cases_above_fire_by_channel_by_layer_and_not_at_all() -> None:
    # With delta 0 nothing fires, so a difference shows that the projection did.
    before = _weights(shapes=[(6, 5)])[0].detach()
    assert torch.equal(_first_step("any", delta=0.1), _first_step("any", delta=0.0))
    rows = (before * (_first_step("channel", delta=0.1) + 0.1 * 0.1 * before)).sum(1)
    torch.testing.assert_close(rows, torch.zeros(6), atol=1e-5, rtol=0)
    whole = before * (_first_step("layer", delta=0.1) + 0.1 * 0.1 * before)
    assert abs(float(whole.sum())) < 1e-5
    assert float(whole.sum(1).abs().max()) > 1e-2, "rows keep their own part where only the layer fires"


@pytest.mark.parametrize("as_tensor", [False, True])
def test_groups_keep_their_own_rates(as_tensor: bool) -> None:
    """Equal shapes in different groups, as the blocks of a tower with layer-wise rates."""
    rates = (0.1, 0.01, 0.001)
    ours, theirs = _weights(shapes=[(6, 5)] * 3), _weights(shapes=[(6, 5)] * 3)
    groups = [
        {"params": [weight], "lr": torch.tensor(lr) if as_tensor else lr, "weight_decay": lr * 2}
        for weight, lr in zip(ours, rates, strict=True)
    ]
    optimizer = AdamP(groups)
    _train(optimizer, ours, kinds=["channel", "any"], steps=4)
    for group in optimizer.param_groups:  # rates change on the way
        group["lr"] = group["lr"].mul_(0.5) if as_tensor else group["lr"] * 0.5
    _train(optimizer, ours, kinds=["channel", "any"], steps=4, start=4)
    oracle = _oracle([{"params": [w], "lr": lr, "weight_decay": lr * 2} for w, lr in zip(theirs, rates, strict=True)])
    _train(oracle, theirs, kinds=["channel", "any"], steps=4)
    for group in oracle.param_groups:
        group["lr"] *= 0.5
    _train(oracle, theirs, kinds=["channel", "any"], steps=4, start=4)
    _assert_equal(ours, theirs)


def test_a_frozen_parameter_keeps_weight_and_state() -> None:
    weights = _weights(shapes=[(6, 5), (6, 5)])
    optimizer = AdamP(weights, lr=0.1, weight_decay=1.0)
    _train(optimizer, weights, kinds=["any"], steps=2)
    kept = [weights[0].detach().clone(), *(value.clone() for value in optimizer.state[weights[0]].values())]
    weights[0].grad = None
    weights[1].grad = torch.ones(6, 5)
    optimizer.step()
    now = [weights[0].detach(), *optimizer.state[weights[0]].values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    never = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [never]})
    optimizer.step()
    assert never not in optimizer.state


def test_the_state_of_adamp_is_all_there_is() -> None:
    whole, halves = _weights(), _weights()
    _train(AdamP(whole, lr=0.01), whole, kinds=["any", "layer"], steps=10)
    first = AdamP(halves, lr=0.01)
    _train(first, halves, kinds=["any", "layer"], steps=5)
    second = AdamP(halves, lr=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(second, halves, kinds=["any", "layer"], steps=5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(halves, whole, strict=True))


def test_channels_last_weights_are_updated_in_place() -> None:
    plain, other = _weights(shapes=[(8, 3, 2, 2)] * 2), _weights(shapes=[(8, 3, 2, 2)] * 2)
    for weight in other:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    for weights in (plain, other):
        _train(AdamP(weights, lr=0.1), weights, kinds=["channel", "layer"], steps=3)
    assert other[0].is_contiguous(memory_format=torch.channels_last)
    _assert_equal(other, plain)


@pytest.mark.slow
def test_compiled_adamp_is_the_plain_one() -> None:
    shapes = [(512, 520), (512, 520), (1024, 300), (6, 5), (7,)]
    plain, compiled = _weights(shapes), _weights(shapes)
    for weights, on in ((plain, False), (compiled, True)):
        optimizer = AdamP(weights, lr=0.01, weight_decay=0.2, compiled=on)
        _train(optimizer, weights, kinds=["any", "channel", "layer"], steps=4)
    _assert_equal(compiled, plain)


@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_gpu_it_never_waits_for_the_device() -> None:
    ours, theirs = [nn.Parameter(w.detach().cuda()) for w in _weights()], _weights()
    optimizer = AdamP(ours, lr=0.01, weight_decay=0.2)
    _train(optimizer, ours, kinds=["any", "channel", "layer"], steps=20)
    _train(_oracle(theirs, lr=0.01, weight_decay=0.2), theirs, kinds=["any", "channel", "layer"], steps=20)
    _assert_equal(ours, theirs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NEEDS_GPU
def test_a_captured_step_sees_new_gradients_and_rates() -> None:
    ours, theirs = [nn.Parameter(w.detach().cuda()) for w in _weights()], _weights()
    rate = torch.tensor(0.01, device="cuda")
    optimizer, oracle = (
        AdamP(ours, lr=rate, weight_decay=0.2),
        _oracle(theirs, lr=0.01, weight_decay=0.2),
    )
    noise = [torch.randn(w.shape, generator=torch.Generator().manual_seed(n)) for n, w in enumerate(theirs)]
    for weight, other, value in zip(ours, theirs, noise, strict=True):
        weight.grad, other.grad = value.cuda(), value.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        oracle.step()
    for number in range(5):
        rate.fill_(0.01 / (number + 1))
        oracle.param_groups[0]["lr"] = 0.01 / (number + 1)
        for weight, other, value in zip(ours, theirs, noise, strict=True):
            fresh = _gradient(other, value * (number + 1), ("any", "channel", "layer")[number % 3])
            weight.grad.copy_(fresh)  # type: ignore[union-attr]
            other.grad = fresh.clone()
        graph.replay()
        oracle.step()
    _assert_equal(ours, theirs)
