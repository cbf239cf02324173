from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.backbones.heads import ProjectionHead
from vacsr.config import HeadConfig
from vacsr.noise import RowNoise, Stream


def head(in_dim: int = 4, **fields: object) -> ProjectionHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ProjectionHead(in_dim, HeadConfig.model_validate({"dim": 3, **fields}))


def noise(rows: Tensor | int, *, step: int = 0, seed: int = 0, stream: Stream = Stream.IMAGE) -> RowNoise:
    places = torch.arange(rows) if isinstance(rows, int) else rows
    return RowNoise(seed, torch.tensor(step), places, stream)


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize(("hidden", "width"), [(0, 3), (5, 5)])
def test_mlp_is_the_loop(hidden: int, width: int) -> None:
    module = head(hidden=hidden, dropout=0.5)
    assert module.first is not None
    assert module.first.out_features == width
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    got = module(x)
    for row, out in zip(x, got, strict=True):
        middle = [gelu(v) for v in (module.first.weight @ row + module.first.bias).tolist()]
        torch.testing.assert_close(out, module.last.weight @ torch.tensor(middle) + module.last.bias)


def test_linear_is_one_map_without_dropout() -> None:
    module = head(kind="linear", dropout=0.9, hidden=7)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    assert sum(p.numel() for p in module.parameters()) == 4 * 3 + 3
    torch.testing.assert_close(module(x), x @ module.last.weight.T + module.last.bias)
    assert torch.equal(module(x, noise(5)), module(x))


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_dropped_without_noise(training: bool) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    module = head(dropout=0.5).train(training)
    assert torch.equal(module(x), head(dropout=0.0)(x))
    assert torch.equal(module(x), module(x))


def test_dropout_is_the_mask_of_the_noise() -> None:
    module = head(hidden=8, dropout=0.4)
    assert module.first is not None
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    middle = torch.nn.functional.gelu(module.first(x))
    uniform = noise(6, step=3).uniform(8)
    dropped = middle.clone()
    for i in range(6):
        for j in range(8):
            dropped[i, j] = 0.0 if uniform[i, j] < 0.4 else middle[i, j] / 0.6
    torch.testing.assert_close(module(x, noise(6, step=3)), module.last(dropped))


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_dropout_keeps_the_expectation(rate: float) -> None:
    module = head(hidden=8, dropout=rate)
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))
    many = module(x.expand(20_000, 4), noise(20_000)).detach()
    error = many.std(0) / math.sqrt(len(many))
    assert ((many.mean(0) - module(x)[0]).abs() < 4 * error).all()
    assert many.std(0).min() > 0.01


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=6))
def test_the_mask_belongs_to_the_items_place(rows: list[int]) -> None:
    module = head(hidden=8, dropout=0.5)
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    places = torch.tensor(rows).long()
    whole = module(x, noise(10, step=2))
    torch.testing.assert_close(module(x[places], noise(places, step=2)), whole[places])


def test_steps_seeds_and_streams_draw_other_masks() -> None:
    module = head(hidden=32, dropout=0.5)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    first = module(x, noise(4))
    for other in (noise(4, step=1), noise(4, seed=1), noise(4, stream=Stream.TEXT)):
        assert not torch.allclose(module(x, other), first)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_xavier_is_uniform_within_its_bound_and_has_no_bias(kind: str) -> None:
    module = head(60, kind=kind, dim=40, hidden=50, init="xavier")
    for layer in filter(None, (module.first, module.last)):
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert not layer.bias.any()
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert head(60, kind=kind, dim=40).last.bias.any()


def test_one_mask_for_all_tokens_of_an_item() -> None:
    module = head(hidden=8, dropout=0.5)
    x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(1)).expand(3, 6, 4)
    got = module(x, noise(3))
    assert got.shape == (3, 6, 3)
    torch.testing.assert_close(got, module(x[:, 0], noise(3)).unsqueeze(1).expand(3, 6, 3))
