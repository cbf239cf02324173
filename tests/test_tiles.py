"""The tiled loss is the dense one: the dense one has its own plain reference in test_objective.py."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config import AdapterConfig, InfoNCEConfig, ObjectiveConfig, PcmeConfig, SigmoidConfig, VacsrConfig
from vacsr.errors import UsageError
from vacsr.methods import tile_shape as shapes
from vacsr.methods.base import Embedding
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.pcme import Pcme
from vacsr.methods.running import RunningTop
from vacsr.methods.sigmoid import Sigmoid
from vacsr.methods.tile_shape import Tileable, TileShape, tile_shape
from vacsr.methods.tiled import TiledLoss
from vacsr.methods.vacsr import Vacsr
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock, batch_block

DIM = 5
IDS = torch.tensor([7, 8, 7, 9, 3, 8, 8, 1, 2, 7, 4])
SHAPES = [(4, 3), (11, 2)]


def make(adapter: dict[str, Any] | None = None, objective: dict[str, Any] | None = None, seed: int = 0) -> Vacsr:
    """A small VACSR whose parameters and weights are far from 0, so that every term shows in every gradient."""
    plain = {"kl_weight": 0.37, "sigma_weight": 0.6, "negative_weight": 1.7, "correction": 0.2, "cosine_weight": 0.3}
    shape = {"latent": 3, "decoder_hidden": 4, **(adapter or {})}
    config = VacsrConfig(adapter=AdapterConfig(**shape), objective=ObjectiveConfig(**{**plain, **(objective or {})}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = Vacsr(DIM, config)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(0.4 * torch.randn_like(p))
    return method


def sides(count: int, *, dtype: torch.dtype = torch.float32, variance: bool = False) -> tuple[Embedding, Embedding]:
    x = torch.randn(4, count, DIM, generator=torch.Generator().manual_seed(count), dtype=dtype)
    v, t = functional.normalize(x[:2], dim=-1)
    spread = [(y - 1).requires_grad_() if variance else None for y in x[2:]]
    return Embedding(v.requires_grad_(), spread[0]), Embedding(t.requires_grad_(), spread[1])


def leaves(method: nn.Module, v: Embedding, t: Embedding) -> list[Tensor]:
    """What learns."""
    return [x for x in (*method.parameters(), *v, *t) if x is not None and x.requires_grad]


class Result(typing.NamedTuple):
    terms: LossTerms
    grads: tuple[Tensor | None, ...]


def run(loss: Any, method: nn.Module, ids: Tensor, v: Embedding, t: Embedding) -> Result:
    terms = loss(v, t, batch_block(ids, seed=2, step=5))
    return Result(terms, torch.autograd.grad(terms.total, leaves(method, v, t), allow_unused=True))


def assert_same(found: Result, expected: Result, *, within: float) -> None:
    """Every figure and gradient, relative to the largest entry of its tensor."""
    assert found.terms.parts.keys() == expected.terms.parts.keys()
    pairs = [(found.terms.total, expected.terms.total)]
    pairs += [(found.terms.parts[name], part) for name, part in expected.terms.parts.items()]
    for ours, theirs in [*pairs, *zip(found.grads, expected.grads, strict=True)]:
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            assert (ours - theirs).abs().max() <= within * theirs.abs().max().clamp_min(1.0)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are computed in float32; here what asks for that gets float64, so that nothing hides in rounding."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def switches(config: type[Any]) -> list[dict[str, Any]]:
    """Every value of every field that has a choice."""
    found: list[dict[str, Any]] = []
    for name, field in config.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            found += [{name: value} for value in typing.get_args(field.annotation) if value != field.default]
        elif field.annotation is bool:
            found.append({name: not field.default})
    return found


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    *((change, {}) for change in switches(AdapterConfig)),
    *(({}, change) for change in switches(ObjectiveConfig)),
    ({"components": 1}, {}),
    ({"components": 3, "mixing": "head"}, {"sigma_detach": True, "sigma_component": "alpha"}),
    ({"decoder_hidden": 0, "residual": "none"}, {"free_bits": 0.4, "gumbel_temperature": 0.3}),
    ({}, {"hard_negatives": 3, "negative_direction": "both"}),
    ({}, {"hard_negatives": 20, "kl_pairs": "informative"}),
    ({}, {"hard_negatives": 2, "negative_rule": "literal_max", "negative_target": 0, "negative_direction": "both"}),
    ({}, {"hard_negatives": 3, "negative_rule": "literal_max", "kl_pairs": "informative", "positives": "diagonal"}),
]


def case_name(case: Any) -> str:
    return ",".join(f"{k}={v}" for fields in case for k, v in fields.items()) or "default"


def test_the_cases_cover_what_there_is_to_choose() -> None:
    assert {"negative_rule": "literal_max"} in switches(ObjectiveConfig)
    assert {"sigma_detach": True} in switches(ObjectiveConfig)
    assert len(switches(ObjectiveConfig)) >= 14


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiles_have_the_loss_and_the_gradients_of_the_whole(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    method = make(*case).double()
    v, t = sides(len(IDS), dtype=torch.float64)
    expected = run(method.loss, method, IDS, v, t)
    for shape in SHAPES:
        assert_same(run(TiledLoss(method, TileShape(*shape)), method, IDS, v, t), expected, within=1e-12)


@pytest.mark.parametrize("direction", ["rows", "both"])
def test_in_float32_they_differ_by_rounding(direction: str) -> None:
    method = make(objective={"negative_direction": direction, "hard_negatives": 2})
    v, t = sides(len(IDS))
    found = run(TiledLoss(method, TileShape(4, 4)), method, IDS, v, t)
    assert_same(found, run(method.loss, method, IDS, v, t), within=2e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@example([4, 4, 4], 2, 2, 2)  # no negatives at all
@example([0, 0, 0, 1, 2], 3, 2, 3)  # rows with fewer negatives than others
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_any_batch_in_any_tiles(ids: list[int], rows: int, cols: int, hard: int) -> None:
    method = make(objective={"hard_negatives": hard, "negative_direction": "both", "kl_pairs": "informative"})
    v, t = sides(len(ids))
    labels = torch.tensor(ids)
    found = run(TiledLoss(method, TileShape(rows, cols)), method, labels, v, t)
    assert_same(found, run(method.loss, method, labels, v, t), within=1e-5)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(5, 11)])
def test_a_block_of_rows_in_tiles(rows: slice) -> None:
    """What a rank of several does."""
    method = make(objective={"hard_negatives": 2, "kl_pairs": "informative"})
    v, t = sides(len(IDS))
    block = batch_block(IDS, seed=2, step=5, rows=rows)
    results = []
    for loss in (method.loss, TiledLoss(method, TileShape(3, 4))):
        terms = loss(Embedding(v.mean[rows]), t, block)
        results.append(Result(terms, torch.autograd.grad(terms.total, leaves(method, v, t), allow_unused=True)))
    assert_same(results[1], results[0], within=2e-6)


def test_half_precision_rounds_tiles_like_the_whole() -> None:
    """Tiles and the whole round sums differently; both are as far from float32 as bfloat16 has it."""
    method = make({"latent": 0})
    v, t = sides(len(IDS))
    exact = run(method.loss, method, IDS, v, t)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(TiledLoss(method, TileShape(4, 4)), method, IDS, v, t)
    for ours, theirs in zip(found.grads, exact.grads, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        assert 1e-5 < float((ours - theirs).norm() / theirs.norm()) < 0.1


# ------------------------------------------------------------------------------------------ methods that are not VACSR


@pytest.mark.parametrize("method", [Sigmoid(SigmoidConfig()), Pcme(PcmeConfig(samples=2))], ids=["sigmoid", "pcme"])
def test_what_is_pairwise_is_walked_in_strips(method: Any) -> None:
    v, t = sides(len(IDS), variance=isinstance(method, Pcme))
    shape = tile_shape(method, 4, rows=len(IDS), columns=len(IDS))
    assert shape == (4, len(IDS))
    expected = run(method.loss, method, IDS, v, t)
    assert all(g is not None for g in expected.grads)
    assert_same(run(TiledLoss(method, shape), method, IDS, v, t), expected, within=3e-6)


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
    found = run(TiledLoss(typing.cast(Any, method), TileShape(2, 6)), method, ids, v, t)
    assert found.grads[2] is None
    assert_same(found, run(method.loss, method, ids, v, t), within=1e-5)


def test_a_loss_that_needs_the_whole_batch_has_no_tiles() -> None:
    method = InfoNCE(InfoNCEConfig())
    assert tile_shape(method, "auto", rows=8192, columns=8192) is None
    assert tile_shape(method, 0, rows=8192, columns=8192) is None
    with pytest.raises(UsageError, match=r"train.tile=64: the loss of 'infonce' .* — set train.tile=0 or auto"):
        tile_shape(method, 64, rows=128, columns=128)


# ----------------------------------------------------------------------------------------------- shapes and memory


def test_the_shape_of_tiles() -> None:
    method = make()
    assert tile_shape(method, 0, rows=100, columns=100) is None
    assert tile_shape(method, 100, rows=100, columns=100) is None, "one tile is the whole"
    assert tile_shape(method, 64, rows=100, columns=100) == (50, 50), "equal tiles compile once"
    assert tile_shape(method, 64, rows=50, columns=100) == (50, 50)
    assert tile_shape(method, 32, rows=100, columns=100) == (25, 25)
    paper = Vacsr(1024, VacsrConfig())
    assert tile_shape(paper, "auto", rows=128, columns=128) is None
    assert tile_shape(paper, "auto", rows=4096, columns=4096) == (256, 128)
    assert tile_shape(paper, "auto", rows=512, columns=4096) == (256, 128), "a rank's rows"
    assert tile_shape(Sigmoid(SigmoidConfig()), "auto", rows=4096, columns=4096) is None
    assert tile_shape(Sigmoid(SigmoidConfig()), "auto", rows=16384, columns=16384) == (4096, 16384)
    assert tile_shape(method, 64, rows=0, columns=0) is None, "nothing has no tiles"
    with pytest.raises(UsageError, match=r"train\.tile=-1"):
        tile_shape(method, -1, rows=4, columns=4)


def test_tiles_of_a_graph_are_smaller() -> None:
    paper, small = Vacsr(1024, VacsrConfig()), Vacsr(256, VacsrConfig())
    shape = partial(tile_shape, tile="auto", graphed=True)
    assert shape(paper, rows=128, columns=128) == (64, 64)
    assert shape(paper, rows=128, columns=128, itemsize=2) == (128, 64)
    assert shape(small, rows=128, columns=128) is None, "what is small stays whole"
    assert shape(paper, rows=1024, columns=1024) == (128, 128)
    assert shape(paper, rows=4096, columns=4096) == (256, 128), "nor may there be too many"


@pytest.mark.parametrize("batch", [600, 1000, 2000, 3000])
def test_chosen_tiles_are_no_slivers(batch: int) -> None:
    shape = shapes._largest(batch, batch, most=192 * 192)
    assert max(shape) <= 2 * min(shape)
    assert shape.rows * shape.cols >= 192 * 192 // 2


@given(rows=st.integers(1, 300), columns=st.integers(1, 300), most=st.integers(1, 50_000))
def test_chosen_tiles_hold_no_more_than_they_may(rows: int, columns: int, most: int) -> None:
    shape = shapes._largest(rows, columns, most=most)
    assert 1 <= shape.rows <= rows
    assert 1 <= shape.cols <= columns
    assert shape.rows * shape.cols <= most
    assert (shape == (rows, columns)) == (rows * columns <= most)


def test_who_is_tileable() -> None:
    assert isinstance(make(), Tileable)
    assert not isinstance(Sigmoid(SigmoidConfig()), Tileable)


class Kept:
    """The most bytes that graphs hold at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> Kept:
        outer = self

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor
                outer.now += tensor.nbytes
                outer.most = max(outer.most, outer.now)

            def __del__(self) -> None:
                outer.now -= self.tensor.nbytes

        self.hooks = torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.__exit__()


def test_memory_is_that_of_a_tile() -> None:
    method = make({"latent": 0})

    def kept(count: int, edge: int | None) -> int:
        v, t = sides(count)
        loss: Any = method.loss if edge is None else TiledLoss(method, TileShape(edge, edge))
        with Kept() as kept:
            loss(v, t, batch_block(torch.arange(count), seed=0, step=0))
        return kept.most

    tile, own = kept(8, 8), 2 * 4 * DIM  # bytes that the two sides' gradients take per row
    assert kept(32, 8) <= tile + 24 * own
    assert kept(64, 8) <= tile + 56 * own
    assert kept(64, None) > 40 * tile


# --------------------------------------------------------------------------------------------------- use in autograd


def test_backward_scales_and_may_come_twice() -> None:
    method = make()
    v, t = sides(len(IDS))
    loss = TiledLoss(method, TileShape(4, 4))
    once = run(loss, method, IDS, v, t)
    terms = loss(v, t, batch_block(IDS, seed=2, step=5))
    (3.0 * terms.total).backward(retain_graph=True)
    (0.5 * terms.total).backward()
    for leaf, grad in zip(leaves(method, v, t), once.grads, strict=True):
        assert grad is not None
        torch.testing.assert_close(leaf.grad, 3.5 * grad)
    assert not any(part.requires_grad for part in terms.parts.values())


@pytest.mark.parametrize("frozen", ["v", "parameters", "all"])
def test_what_rests_gets_no_gradient(frozen: str) -> None:
    method = make().requires_grad_(frozen == "v")
    v, t = sides(len(IDS))
    v.mean.requires_grad_(frozen == "parameters")
    t.mean.requires_grad_(frozen != "all")
    block = batch_block(IDS, seed=2, step=5)
    dense, tiled = (loss(v, t, block) for loss in (method.loss, TiledLoss(method, TileShape(4, 4))))
    torch.testing.assert_close(tiled.total, dense.total)
    assert tiled.total.requires_grad == (frozen != "all")
    if frozen == "all":
        return
    ours, theirs = (torch.autograd.grad(terms.total, leaves(method, v, t)) for terms in (tiled, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make()
    v, t = sides(len(IDS))
    block = batch_block(IDS, seed=2, step=5)
    expected = method.loss(v, t, block).total
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        found = TiledLoss(method, TileShape(4, 4))(v, t, block).total
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that each graph keeps for its backward pass, as torch.compile divides it; run as it is."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    found: list[int] = []
    plain = torch.compile

    def forward(graph: Any, _: Any) -> Any:
        values = [
            x.meta["val"] for x in graph.graph.output_node().args[0] if hasattr(x, "meta") and x.op != "placeholder"
        ]
        found.append(sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **options: plain(function, backend=backend, **options))
    yield found
    torch._dynamo.reset()


@pytest.mark.slow
def test_equal_tiles_are_compiled_once_and_keep_little_of_a_pair(kept: list[int]) -> None:
    """The trunk's output and the heads', in float32; without the request for it: twice that."""
    method = make({"latent": 8, "hidden": 8})
    v, t = sides(12)
    ids = torch.arange(12) // 2
    expected = run(method.loss, method, ids, v, t)
    loss = TiledLoss(method, TileShape(6, 4)).compiled()
    for _ in range(2):
        assert_same(run(loss, method, ids, v, t), expected, within=2e-6)
    assert len(kept) == 2, "six tiles and one list of chosen pairs, twice"
    a_pair = 4 * (8 + 2 * 8 + 2 * 8)
    assert kept[0] < 1.5 * a_pair * 6 * 4


# ------------------------------------------------------------------------------------------------------ running top


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_the_running_top_is_the_top(rows: int, cols: int, edge: int, count: int, seed: int) -> None:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    values[torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed + 1)) < 0.3] = -torch.inf
    top = RunningTop(rows, count, like=values)
    for start in range(0, cols, edge):
        top.add(slice(0, rows), values[:, start : start + edge], first=start)
    for row, found, places, filled in zip(values.tolist(), top.values, top.places, top.filled, strict=True):
        best = sorted((x for x in row if x > float("-inf")), reverse=True)[:count]
        assert found[filled].tolist() == pytest.approx(best)
        assert [row[place] for place in places[filled].tolist()] == found[filled].tolist()
