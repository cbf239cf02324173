from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vacsr.backbones.base import Tokens
from vacsr.backbones.heads import GeneralizedPooling, build_pooling, rank_codes, ranked_sum


def seeded(kind: str = "gpo") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_pooling(kind)  # type: ignore[arg-type]


def tokens(lengths: list[int], *, longest: int, dim: int = 3, scattered: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(len(lengths), longest, dim, generator=generator)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = torch.randperm(longest, generator=generator) if scattered else torch.arange(longest)
        mask[row, places[:length]] = True
    return Tokens(values.requires_grad_(), mask, torch.tensor([length - 1 for length in lengths]))


def plain_codes(length: int) -> Tensor:
    rows = [
        [f(place / 10_000 ** (2 * pair / 32)) for pair in range(16) for f in (math.sin, math.cos)]
        for place in range(length)
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
    module = seeded()
    assert isinstance(module, GeneralizedPooling)
    given_tokens = tokens([5, 1, 7, 2, 5], longest=7, scattered=scattered)
    got = module(given_tokens)
    got.square().sum().backward()
    gradients = [given_tokens.values.grad, *(p.grad for p in module.parameters())]
    other = seeded()
    assert isinstance(other, GeneralizedPooling)
    copy = given_tokens.values.detach().clone().requires_grad_()
    expected = torch.stack([plain_gpo(other, row[real]) for row, real in zip(copy, given_tokens.mask, strict=True)])
    expected.square().sum().backward()
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(gradients, [copy.grad, *(p.grad for p in other.parameters())], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_codes_are_sines_of_the_rank() -> None:
    torch.testing.assert_close(rank_codes(300), plain_codes(300), atol=3e-5, rtol=0)


def test_static_shapes_give_what_distinct_lengths_give() -> None:
    module = seeded()
    assert isinstance(module, GeneralizedPooling)
    lengths, codes = torch.tensor([3, 9, 3, 1, 8]), rank_codes(9)
    logits = (module.score(module.states(lengths, codes)).squeeze(-1) / 0.1).masked_fill(
        torch.arange(9) >= lengths.unsqueeze(1), -torch.inf
    )
    torch.testing.assert_close(module.weights(lengths, codes), torch.softmax(logits, dim=-1))


@pytest.mark.slow
def test_gpo_traces_to_one_graph_without_looking_at_the_data() -> None:
    module, given_tokens = seeded(), tokens([4, 2, 6], longest=6)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(given_tokens), module(given_tokens))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from(["gpo", "mean", "cls"]))
def test_padding_never_matters(lengths: list[int], extra: int, kind: str) -> None:
    module = seeded(kind)
    short = tokens(lengths, longest=max(lengths))
    rubbish = torch.full((len(lengths), extra, 3), 1e6)
    longer = Tokens(
        torch.cat((short.values.detach(), rubbish), dim=1),
        torch.nn.functional.pad(short.mask, (0, extra)),
        short.summary,
    )
    torch.testing.assert_close(module(longer), module(short))
    alone = torch.cat(
        [
            module(Tokens(short.values[i : i + 1, :n], short.mask[i : i + 1, :n], short.summary[i : i + 1]))
            for i, n in enumerate(lengths)
        ]
    )
    torch.testing.assert_close(module(short), alone)


def test_equal_weights_make_the_mean_and_all_weight_on_top_the_maximum() -> None:
    given_tokens = tokens([4, 4], longest=4)
    flat, top = torch.full((2, 4), 0.25), torch.tensor([[1.0, 0, 0, 0]] * 2)
    torch.testing.assert_close(ranked_sum(given_tokens.values, given_tokens.mask, flat), given_tokens.values.mean(1))
    torch.testing.assert_close(ranked_sum(given_tokens.values, given_tokens.mask, top), given_tokens.values.amax(1))


def test_mean_and_summary() -> None:
    given_tokens = tokens([2, 4], longest=4)
    values = given_tokens.values
    torch.testing.assert_close(seeded("mean")(given_tokens), torch.stack([values[0, :2].mean(0), values[1].mean(0)]))
    assert torch.equal(seeded("cls")(given_tokens), torch.stack([values[0, 1], values[1, 3]]))


@pytest.mark.parametrize("kind", ["gpo", "mean", "cls"])
def test_pooling_is_float32_under_autocast_and_finite_without_tokens(kind: str) -> None:
    module, given_tokens = seeded(kind), tokens([3, 2], longest=3)
    empty = given_tokens._replace(mask=torch.zeros(2, 3, dtype=torch.bool), summary=torch.zeros(2, dtype=torch.int64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(given_tokens)
    assert got.dtype == torch.float32
    assert torch.equal(got, module(given_tokens))
    assert torch.isfinite(module(empty)).all()
