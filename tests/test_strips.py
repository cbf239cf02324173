"""Strips give the loss of the whole matrix, which has its own plain reference in test_objective.py."""

from __future__ import annotations

import typing
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vacsr.adapter import AdapterConfig
from vacsr.methods.base import Embedding
from vacsr.methods.pcme import Pcme, PcmeConfig
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr
from vacsr.objective import LossTerms, ObjectiveConfig, PairBlock, batch_block
from vacsr.strips import StripLoss, compile_pairs

from . import losses
from .losses import Fields, Result, assert_same, leaves, make_vacsr, run_loss

DIM = 5
IDS = torch.tensor([7, 8, 7, 9, 3, 8, 8, 1, 2, 7, 4])


def make(adapter: Fields = {}, objective: Fields = {}) -> Vacsr:  # noqa: B006
    return make_vacsr({"latent": 3, "decoder_hidden": 4, **adapter}, objective, dim=DIM)


sides = partial(losses.sides, dim=DIM)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are computed in float32; here what asks for that gets float64, so that nothing hides in rounding."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def switches(config: type[Any]) -> list[Fields]:
    """Every value of every field that has a choice."""
    changes: list[Fields] = []
    for name, field in config.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            changes += [{name: value} for value in typing.get_args(field.annotation) if value != field.default]
        elif field.annotation is bool:
            changes.append({name: not field.default})
    return changes


CASES: list[tuple[Fields, Fields]] = [
    ({}, {}),
    *((change, {}) for change in switches(AdapterConfig)),
    *(({}, change) for change in switches(ObjectiveConfig) if "both" not in change.values()),
    ({"components": 1}, {}),
    ({"components": 3, "mixing": "head"}, {"sigma_component": "alpha"}),
    ({"decoder_hidden": 0, "residual": "none"}, {"gumbel_temperature": 0.3}),
    ({}, {"hard_negatives": 3}),
    ({}, {"hard_negatives": 20}),
    ({}, {"contrastive_weight": 1.3}),
    ({}, {"hard_negatives": 2, "negative_rule": "literal_max", "negative_target": 0}),
    ({}, {"hard_negatives": 3, "negative_rule": "literal_max", "positives": "diagonal"}),
]


def case_name(case: Any) -> str:
    return ",".join(f"{k}={v}" for fields in case for k, v in fields.items()) or "default"


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_strips_have_the_loss_and_gradients_of_the_whole(case: tuple[Fields, Fields]) -> None:
    method = make(*case).double()
    v, t = sides(len(IDS), dtype=torch.float64)
    expected = run_loss(method.loss, method, IDS, v, t)
    for rows in (4, 1):
        assert_same(run_loss(StripLoss(method.loss, method, rows), method, IDS, v, t), expected, within=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@example([4, 4, 4], 2, 2, 2, 0)  # no negatives at all
@example([0, 0, 0, 1, 2], 3, 3, 1, 1)  # rows with fewer negatives than others
@example([5], 1, 1, 3, 0)  # one pair
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3),
    st.integers(0, 3),
)  # fmt: skip
def test_any_rows_of_any_batch(ids: list[int], rows: int, hard: int, components: int, first: int) -> None:
    """A rank may own only some rows; the last strip may be shorter."""
    method = make({"components": components}, {"hard_negatives": hard}).double()
    v, t = sides(len(ids), dtype=torch.float64)
    block = batch_block(torch.tensor(ids), seed=2, step=5).rows(slice(min(first, len(ids) - 1), None))
    mine = Embedding(v.mean[min(first, len(ids) - 1) :])
    results = []
    for loss in (StripLoss(method.loss, method, rows), method.loss):
        with mock.patch.object(Tensor, "float", Tensor.double):
            terms = loss(mine, t, block)
        results.append(Result(terms, torch.autograd.grad(terms.total, leaves(method, v, t), retain_graph=True)))
    assert_same(*results, within=1e-10)


@pytest.mark.parametrize(
    "method", [Sigmoid(SigmoidConfig(), dim=8), Pcme(PcmeConfig(samples=2), dim=8)], ids=["sigmoid", "pcme"]
)
def test_strips_of_other_pairwise_methods(method: Any) -> None:
    v, t = sides(len(IDS), variance=isinstance(method, Pcme))
    rows = method.strip_rows(4, rows=len(IDS), columns=len(IDS))
    assert rows == 4
    expected = run_loss(method.loss, method, IDS, v, t)
    assert all(g is not None for g in expected.grads)
    assert_same(run_loss(StripLoss(method.loss, method, rows), method, IDS, v, t), expected, within=3e-6)


class Twins(nn.Module):
    """A loss whose parameters share the memory of one gradient, and one parameter that it does not use."""

    pairwise = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (nn.Parameter(torch.tensor(x)) for x in (1.0, 2.0, 3.0))

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        total = ((self.first + self.second) * (v.mean @ t.mean.T)).square().sum()
        return LossTerms(total, {})


def test_gradients_that_share_memory_are_added_up_apart() -> None:
    method = Twins()
    v, t = sides(6)
    ids = torch.arange(6)
    result = run_loss(StripLoss(method.loss, method, 2), method, ids, v, t)
    assert result.grads[2] is None
    assert_same(result, run_loss(method.loss, method, ids, v, t), within=1e-5)


class Held:
    """A tensor that a graph saves; counts the most bytes that are saved at a time."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Held.now += tensor.nbytes
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.tensor.nbytes


def test_memory_is_that_of_a_strip() -> None:
    method = make({"latent": 0})

    def most_bytes(count: int, rows: int) -> int:
        v, t = sides(count)
        loss: Any = method.loss if rows == count else StripLoss(method.loss, method, rows)
        Held.now = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            loss(v, t, batch_block(torch.arange(count), seed=0, step=0))
        return Held.most

    whole = most_bytes(64, 64)
    assert most_bytes(64, 8) < whole / 6
    assert most_bytes(64, 1) < whole / 24


class LargestResult(TorchDispatchMode):
    """Numbers in the largest tensor that any operator gives."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return result


def test_nothing_is_held_for_every_pair_of_a_batch() -> None:
    """A rank of a large batch has some rows of it: neither labels nor their counts are of the whole matrix."""
    method, (v, t) = make(), sides(512)
    with LargestResult() as largest:
        block = batch_block(torch.arange(512) // 5, seed=2, step=5).rows(slice(128, 256))
        terms = StripLoss(method.loss, method, 1)(Embedding(v.mean[128:256]), t, block)
        terms.total.backward()
    a_pair = 2 * 2 * 3  # means and log-variances of two components
    assert largest.numbers <= 512 * a_pair < 512 * 128
    assert v.mean.grad is not None
    assert not v.mean.grad[:128].any()


def test_backward_scales_and_may_come_twice() -> None:
    method = make()
    v, t = sides(len(IDS))
    loss = StripLoss(method.loss, method, 4)
    once = run_loss(loss, method, IDS, v, t)
    terms = loss(v, t, batch_block(IDS, seed=2, step=5))
    (3.0 * terms.total).backward(retain_graph=True)
    (0.5 * terms.total).backward()
    for leaf, grad in zip(leaves(method, v, t), once.grads, strict=True):
        assert grad is not None
        torch.testing.assert_close(leaf.grad, 3.5 * grad)
    assert not any(part.requires_grad for part in terms.parts.values())


@pytest.mark.parametrize("frozen", ["v", "parameters", "all"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    method = make().requires_grad_(frozen == "v")
    v, t = sides(len(IDS))
    v.mean.requires_grad_(frozen == "parameters")
    t.mean.requires_grad_(frozen != "all")
    block = batch_block(IDS, seed=2, step=5)
    dense, strips = (loss(v, t, block) for loss in (method.loss, StripLoss(method.loss, method, 4)))
    torch.testing.assert_close(strips.total, dense.total)
    assert strips.total.requires_grad == (frozen != "all")
    if frozen == "all":
        return
    ours, theirs = (torch.autograd.grad(terms.total, leaves(method, v, t)) for terms in (strips, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make()
    v, t = sides(len(IDS))
    block = batch_block(IDS, seed=2, step=5)
    expected = method.loss(v, t, block).total
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        total = StripLoss(method.loss, method, 4)(v, t, block).total
    assert not total.requires_grad
    torch.testing.assert_close(total, expected.detach())


@pytest.mark.slow
def test_equal_strips_are_compiled_once_and_keep_little_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's output and the heads', in float32; without the request for it: twice that."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    counters.clear()
    method = make({"latent": 8, "hidden": 8})
    v, t = sides(12)
    ids = torch.arange(12) // 2
    expected = run_loss(method.loss, method, ids, v, t)
    loss = compile_pairs(StripLoss(method.loss, method, 3))
    for _ in range(2):
        assert_same(run_loss(loss, method, ids, v, t), expected, within=2e-6)
    assert counters["stats"]["unique_graphs"] == 1, "four strips, twice"
    Held.now = Held.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        run_loss(loss, method, ids, v, t)
    a_pair, weights = 4 * (8 + 2 * 8 + 2 * 8), sum(p.nbytes for p in method.parameters())
    assert Held.most < 1.5 * a_pair * 3 * 12 + weights
