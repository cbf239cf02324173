"""Projection heads and pooling: written out as loops; masks are drawn by position, padding never matters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vacsr.backbones.base import Tokens
from vacsr.backbones.heads import GeneralizedPooling, ProjectionHead, build_pooling
from vacsr.config import HeadConfig
from vacsr.noise import RowNoise, Stream, seeded

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def head(in_dim: int = 4, **fields: object) -> ProjectionHead:
    with seeded(0):
        return ProjectionHead(in_dim, HeadConfig.model_validate({"dim": 3, **fields}))


def noise(rows: Tensor | int, *, step: int = 0, seed: int = 0, stream: Stream = Stream.IMAGE) -> RowNoise:
    positions = torch.arange(rows) if isinstance(rows, int) else rows
    return RowNoise(seed, torch.tensor(step), positions, stream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(0, 3), (8, 8)])
def test_mlp_is_the_loop_and_drops_what_the_noise_says(hidden: int, width: int, training: bool) -> None:
    module = head(hidden=hidden, dropout=0.4).train(training)
    assert module.first is not None
    uniform = noise(6, step=3).uniform(width)
    for i, row in enumerate(X):
        middle = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in module.first(row).tolist()]
        torch.testing.assert_close(module(X)[i], module.last.weight @ torch.tensor(middle) + module.last.bias)
        kept = [0.0 if uniform[i, j] < 0.4 else x / 0.6 for j, x in enumerate(middle)]
        torch.testing.assert_close(module(X, noise(6, step=3))[i], module.last(torch.tensor(kept)))


def test_linear_is_one_map_without_dropout() -> None:
    module = head(kind="linear", dropout=0.9, hidden=7)
    assert sum(p.numel() for p in module.parameters()) == 4 * 3 + 3
    torch.testing.assert_close(module(X), X @ module.last.weight.T + module.last.bias)
    assert torch.equal(module(X, noise(6)), module(X))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_the_mask_belongs_to_the_items_position(rows: list[int]) -> None:
    module, positions = head(hidden=32, dropout=0.5), torch.tensor(rows).long()
    whole = module(X, noise(6, step=2))
    torch.testing.assert_close(module(X[positions], noise(positions, step=2)), whole[positions])
    for other in (noise(6, step=1), noise(6, step=2, seed=1), noise(6, step=2, stream=Stream.TEXT)):
        assert not torch.allclose(module(X, other), whole)


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
    module, x = head(hidden=8, dropout=0.5), X[:3].unsqueeze(1).expand(3, 6, 4)
    torch.testing.assert_close(module(x, noise(3)), module(X[:3], noise(3)).unsqueeze(1).expand(3, 6, 3))


def pooling(kind: str = "gpo") -> nn.Module:
    with seeded(0):
        return build_pooling(kind)  # type: ignore[arg-type]


def gpo() -> GeneralizedPooling:
    module = pooling()
    assert isinstance(module, GeneralizedPooling)
    return module


def tokens(lengths: list[int], *, longest: int, dim: int = 3, scattered: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(len(lengths), longest, dim, generator=generator)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        positions = torch.randperm(longest, generator=generator) if scattered else torch.arange(longest)
        mask[row, positions[:length]] = True
    return Tokens(values.requires_grad_(), mask, torch.tensor([length - 1 for length in lengths]))


def plain_codes(length: int) -> Tensor:
    rows = [
        [f(rank / 10_000 ** (2 * pair / 32)) for pair in range(16) for f in (math.sin, math.cos)]
        for rank in range(length)
    ]
    return torch.tensor(rows)


def plain_gpo(module: GeneralizedPooling, item: Tensor) -> Tensor:
    """One item's real tokens [n, D] -> [D]: a GRU over its own ranks, Python's sort, a sum."""
    states = module.gru(plain_codes(len(item)).unsqueeze(0))[0]
    scores = [(module.score.weight[0] * (state[:32] + state[32:]) / 2).sum() / 0.1 for state in states]
    largest = max(score.item() for score in scores)
    powers = [torch.exp(score - largest) for score in scores]
    out = []
    for channel in item.T:
        ranked = sorted(channel, key=lambda x: -x.item())
        out.append(sum(p * x for p, x in zip(powers, ranked, strict=True)) / sum(powers))
    return torch.stack([torch.as_tensor(x) for x in out])


@pytest.mark.parametrize("scattered", [False, True])
def test_gpo_is_the_loop_in_value_and_gradient(scattered: bool) -> None:
    module, x = gpo(), tokens([5, 1, 7, 2, 5], longest=7, scattered=scattered)
    pooled = module(x)
    expected = torch.stack([plain_gpo(module, row[real]) for row, real in zip(x.values, x.mask, strict=True)])
    torch.testing.assert_close(pooled, expected)
    leaves = [x.values, *module.parameters()]
    ours, theirs = (torch.autograd.grad(out.square().sum(), leaves) for out in (pooled, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_gpo_traces_to_one_graph_without_looking_at_the_data() -> None:
    module, x = gpo(), tokens([4, 2, 6], longest=6)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from(["gpo", "mean", "cls"]))
def test_padding_never_matters(lengths: list[int], extra: int, kind: str) -> None:
    module = pooling(kind)
    short = tokens(lengths, longest=max(lengths))
    rubbish = torch.full((len(lengths), extra, 3), 1e6)
    longer = Tokens(
        torch.cat((short.values.detach(), rubbish), dim=1),
        torch.nn.functional.pad(short.mask, (0, extra)),
        short.summary,
    )
    torch.testing.assert_close(module(longer), module(short))
    for i, n in enumerate(lengths):
        alone = Tokens(short.values[i : i + 1, :n], short.mask[i : i + 1, :n], short.summary[i : i + 1])
        torch.testing.assert_close(module(alone), module(short)[i : i + 1])


def test_mean_and_summary() -> None:
    x = tokens([2, 4], longest=4)
    torch.testing.assert_close(pooling("mean")(x), torch.stack([x.values[0, :2].mean(0), x.values[1].mean(0)]))
    assert torch.equal(pooling("cls")(x), torch.stack([x.values[0, 1], x.values[1, 3]]))


@pytest.mark.parametrize("kind", ["gpo", "mean", "cls"])
def test_pooling_is_float32_under_autocast_and_finite_without_tokens(kind: str) -> None:
    module, x = pooling(kind), tokens([3, 2], longest=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = module(x)
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, module(x))
    empty = x._replace(mask=torch.zeros(2, 3, dtype=torch.bool), summary=torch.zeros(2, dtype=torch.int64))
    assert torch.isfinite(module(empty)).all()
