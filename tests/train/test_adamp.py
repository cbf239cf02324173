"""AdamP against the package of its authors, and what that package cannot do: tensors as rates, graphs, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from vacsr.errors import UsageError
from vacsr.train.adamp import AdamP
from vacsr.train.checkpoint import TrainState, load_checkpoint, save_checkpoint

SHAPES = (
    (),
    (1,),
    (7,),
    (7,),
    (1, 5),
    (6, 5),
    (6, 5),
    (6, 5),
    (5, 6),
    (4, 3, 2),
    (1, 1, 8),
    (8, 3, 2, 2),
    (8, 3, 2, 2),
)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _weights(seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


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
            noise = torch.randn(weight.shape, generator=generator)
            absent = step % 2 == 1 and number % 5 == 4
            kind = kinds[(step + number) % len(kinds)]
            weight.grad = None if absent else _gradient(weight.cpu(), noise, kind).to(weight.device)
        optimizer.step()


def _oracle(weights: list[nn.Parameter], **options: object) -> Optimizer:
    return pytest.importorskip("adamp").AdamP(weights, **options)


def _assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach().cpu(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kinds", [["any"], ["channel"], ["layer"], ["any", "channel", "layer"]], ids="-".join)
def test_twenty_steps_equal_the_authors_package(kinds: list[str], capturable: bool) -> None:
    ours, theirs = _weights(), _weights()
    _train(AdamP(ours, lr=0.01, weight_decay=0.2, capturable=capturable), ours, kinds=kinds, steps=20)
    _train(_oracle(theirs, lr=0.01, weight_decay=0.2), theirs, kinds=kinds, steps=20)
    _assert_equal(ours, theirs)


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


@settings(max_examples=15, deadline=None)
@given(
    lr=st.floats(0, 0.1),
    weight_decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.95), st.floats(0.5, 0.9995)),
    delta=st.just(0.0) | st.floats(0.01, 2),  # nearer to 0 rounding decides
    wd_ratio=st.floats(0, 1),
)
def test_any_settings_equal_the_authors_package(
    lr: float, weight_decay: float, betas: tuple[float, float], delta: float, wd_ratio: float
) -> None:
    options = {"betas": betas, "weight_decay": weight_decay, "delta": delta, "wd_ratio": wd_ratio}
    ours, theirs = _weights(), _weights()
    _train(AdamP(ours, lr=lr, **options), ours, kinds=["any", "channel", "layer"], steps=3)  # type: ignore[arg-type]
    _train(_oracle(theirs, lr=lr, **options), theirs, kinds=["any", "channel", "layer"], steps=3)
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_groups_keep_their_own_rates(as_tensor: bool, capturable: bool) -> None:
    """Equal shapes in different groups, as the blocks of a tower with layer-wise rates."""
    rates = (0.1, 0.01, 0.001)
    ours, theirs = _weights(shapes=[(6, 5)] * 3), _weights(shapes=[(6, 5)] * 3)
    groups = [
        {"params": [weight], "lr": torch.tensor(lr) if as_tensor else lr, "weight_decay": lr * 2}
        for weight, lr in zip(ours, rates, strict=True)
    ]
    optimizer = AdamP(groups, capturable=capturable)
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


def test_groups_with_other_settings_do_not_mix() -> None:
    ours, theirs = _weights(shapes=[(6, 5)] * 2), _weights(shapes=[(6, 5)] * 2)
    settings_ = [{"betas": (0.5, 0.9), "eps": 1e-3}, {"delta": 5.0, "wd_ratio": 0.5}]
    _train(AdamP([{"params": [w], **s} for w, s in zip(ours, settings_, strict=True)]), ours, kinds=["any"], steps=5)
    _train(
        _oracle([{"params": [w], **s} for w, s in zip(theirs, settings_, strict=True)]), theirs, kinds=["any"], steps=5
    )
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


def test_channels_last_weights_are_updated_in_place() -> None:
    plain, other = _weights(shapes=[(8, 3, 2, 2)] * 2), _weights(shapes=[(8, 3, 2, 2)] * 2)
    for weight in other:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    for weights in (plain, other):
        _train(AdamP(weights, lr=0.1), weights, kinds=["channel", "layer"], steps=3)
    assert other[0].is_contiguous(memory_format=torch.channels_last)
    _assert_equal(other, plain)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_checkpoint_goes_on_where_it_stopped(tmp_path: Path, capturable: bool) -> None:
    whole, halves = nn.ParameterList(_weights()), nn.ParameterList(_weights())
    _train(AdamP(whole, lr=0.01, capturable=capturable), list(whole), kinds=["any", "layer"], steps=10)
    first = AdamP(halves, lr=0.01, capturable=capturable)
    _train(first, list(halves), kinds=["any", "layer"], steps=5)
    save_checkpoint(tmp_path, halves, first, state=TrainState(step=5), fingerprint="f")
    fresh = nn.ParameterList(_weights(seed=1))
    second = AdamP(fresh, lr=0.01, capturable=capturable)
    assert load_checkpoint(tmp_path, fresh, second, fingerprint="f") is not None
    _train(second, list(fresh), kinds=["any", "layer"], steps=5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(fresh, whole, strict=True))


def test_a_checkpoint_of_the_package_is_taken_over(tmp_path: Path) -> None:
    whole, halves = nn.ParameterList(_weights()), nn.ParameterList(_weights())
    _train(AdamP(whole, lr=0.01), list(whole), kinds=["any"], steps=6)
    theirs = _oracle(list(halves), lr=0.01)
    _train(theirs, list(halves), kinds=["any"], steps=3)
    save_checkpoint(tmp_path, halves, theirs, state=TrainState(step=3), fingerprint="f")
    ours = AdamP(halves, lr=0.01)
    load_checkpoint(tmp_path, halves, ours, fingerprint="f")
    _train(ours, list(halves), kinds=["any"], steps=3, start=3)
    _assert_equal(list(halves), list(whole))


def test_a_closure_gives_the_loss() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = AdamP([weight], lr=0.1)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert float(weight.detach()[0, 0]) < 1.0


def test_what_it_cannot_update_is_refused() -> None:
    with pytest.raises(UsageError, match="float32"):
        AdamP([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        AdamP(table.parameters()).step()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("capturable", [False, True])
def test_on_a_gpu_it_never_waits_for_the_device(capturable: bool) -> None:
    ours, theirs = [nn.Parameter(w.detach().cuda()) for w in _weights()], _weights()
    optimizer = AdamP(ours, lr=0.01, weight_decay=0.2, capturable=capturable)
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
        AdamP(ours, lr=rate, weight_decay=0.2, capturable=True),
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


@pytest.mark.gpu
@NEEDS_GPU
def test_capturing_counters_on_the_host_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamP([weight])
    optimizer.step()
    with pytest.raises(UsageError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
