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

COSINE = [0.25, 1.0, 1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(math.pi * 15 / 16)), 0.0]


@pytest.mark.parametrize(
    ("fields", "steps", "expected"),
    [
        ({"schedule": "constant"}, [0, 7, 199], [1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 4}, [0, 1, 2, 3, 4, 19], [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (
            {"schedule": "step", "epochs": 5, "decay_at": 0.6, "decay": 0.2, "warmup_steps": 2},
            [0, 1, 2, 29, 30, 49],
            [0.5, 1.0, 1.0, 1.0, 0.2, 0.2],
        ),
        ({"schedule": "cosine", "epochs": 2, "warmup_steps": 4}, [0, 3, 4, 8, 12, 19, 20], COSINE),
        ({"schedule": "cosine", "epochs": 1, "warmup_steps": 100}, [0, 9], [0.01, 0.1]),  # longer than the run
    ],
)
def test_the_scheduler(fields: dict[str, Any], steps: list[int], expected: list[float]) -> None:
    config = TrainConfig.model_validate(fields)
    factors = [lr_factor(step, steps_per_epoch=10, config=config) for step in steps]
    assert factors == pytest.approx(expected, abs=1e-12)


def small_groups() -> list[ParamGroup]:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))
    return [ParamGroup("heads", [weight]), ParamGroup("scale", [bias], lr_scale=0.1, decay=False)]


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adamp", AdamP), ("sgd", torch.optim.SGD)])
def test_settings_reach_the_optimiser(name: str, kind: type[Optimizer]) -> None:
    optimizer = build_optimizer(small_groups(), name, lr=0.1, weight_decay=0.5, betas=(0.8, 0.95), momentum=0.9)
    assert type(optimizer) is kind
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    if name == "sgd":
        assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    else:
        assert getattr(optimizer, "betas", optimizer.defaults.get("betas")) == (0.8, 0.95)
    # What a captured step reads must be changed in place.
    held = optimizer.param_groups[1]["lr"] = torch.tensor(0.0)
    set_learning_rate(optimizer, 0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
    assert optimizer.param_groups[1]["lr"] is held


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    head = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(VacsrConfig(lr_scale=0.3), head, image_dim=6, text_dim=5)
    optimizer = build_optimizer(model.param_groups(), "adamw", lr=1.0, weight_decay=0.1)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        assert {0.1 if p.ndim >= 2 else 0.0 for p in group["params"]} == {group["weight_decay"]}
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


def _assert_equal(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
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
    """Equal shapes in different groups, as the blocks of a tower with layer-wise rates, which change on the way."""
    rates = (0.1, 0.01, 0.001)
    trained = []
    for kind, tensors in ((AdamP, as_tensor), (pytest.importorskip("adamp").AdamP, False)):
        weights = _weights(shapes=[(6, 5)] * 3)
        optimizer = kind(
            [
                {"params": [weight], "lr": torch.tensor(lr) if tensors else lr, "weight_decay": lr * 2}
                for weight, lr in zip(weights, rates, strict=True)
            ]
        )
        _train(optimizer, weights, kinds=["channel", "any"], steps=4)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        _train(optimizer, weights, kinds=["channel", "any"], steps=4, start=4)
        trained.append(weights)
    _assert_equal(*trained)


def test_a_frozen_parameter_keeps_weight_and_state() -> None:
    weights = _weights(shapes=[(6, 5), (6, 5)])
    optimizer = AdamP(weights, lr=0.1, weight_decay=1.0)
    _train(optimizer, weights, kinds=["any"], steps=2)
    before = [weights[0].detach().clone(), *(value.clone() for value in optimizer.state[weights[0]].values())]
    weights[0].grad = None
    weights[1].grad = torch.ones(6, 5)
    optimizer.step()
    now = [weights[0].detach(), *optimizer.state[weights[0]].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    never = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [never]})
    optimizer.step()
    assert never not in optimizer.state


def test_channels_last_weights_are_updated_in_place() -> None:
    plain, other = _weights(shapes=[(8, 3, 2, 2)] * 2), _weights(shapes=[(8, 3, 2, 2)] * 2)
    for weight in other:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    for weights in (plain, other):
        _train(AdamP(weights, lr=0.1), weights, kinds=["channel", "layer"], steps=3)
    assert other[0].is_contiguous(memory_format=torch.channels_last)
    _assert_equal(other, plain)


@pytest.mark.slow
@pytest.mark.long
def test_compiled_adamp_is_the_plain_one() -> None:
    shapes = [(512, 520), (512, 520), (6, 5), (7,)]
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
