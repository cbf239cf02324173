"""Top-k in two stages: right also where the coarse score cannot tell items apart.

The interpreted tests are run by one of test_kernel.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring import Engine, PairScorer, choose_engine
from vacsr.scoring.cascade import MARGIN, Cascade, candidate_scores, surely_best
from vacsr.scoring.folded import FP8, BlockScorer, half_dtype
from vacsr.scoring.kernel import KernelScorer
from vacsr.scoring.topk import DIRECTIONS, TopK, best_of, stable_topk

from ..interpreter import interpreted, on_gpu
from .models import exact, inputs, method, model, units

WAYS = ("i2t", "t2i", "both")
every_way = pytest.mark.parametrize("way", WAYS)


def cascade(made: Vacsr, *, spare: int = 4) -> Cascade:
    """The default of a GPU, with few candidates to spare, so that few items will do: the interpreter is slow."""
    coarse = KernelScorer(made, dtype=half_dtype(made.fold()))
    return Cascade(coarse, BlockScorer(made), exact=True, spare=spare, worthwhile=0.0)


def rescored(made: Vacsr) -> Engine:
    """What float8 gets on a GPU."""
    return choose_engine(made, device=torch.device("cuda"), dtype=FP8)


def near(count: int, dim: int, *, device: str = "cpu") -> Tensor:
    """Unit vectors that differ by less than half precision can tell."""
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(5))
    return functional.normalize(units(1, dim, seed=3) + 2e-5 * noise, dim=1).to(device)


def with_large_decoder(dim: int, *, device: str = "cpu") -> Vacsr:
    """Whose small matrix float16 does not hold."""
    made = method(dim, device=device)
    with torch.no_grad():
        made.adapter.mean_heads.weight *= 1e6
    return made


def with_large_cosine(dim: int) -> Vacsr:
    """The adapter's own part is small beside it."""
    made = method(dim)
    with torch.no_grad():
        made.adapter.residual.copy_(torch.tensor([1000.0, 0.0]))
    return made


def best(engine: Engine, v: Tensor, t: Tensor, way: Any, k: int = 3) -> list[TopK]:
    """Of images, of texts or of both."""
    return engine.topk(Embedding(v), Embedding(t), k=k, directions=DIRECTIONS if way == "both" else [way])


def ways(scores: Tensor, way: str) -> list[Tensor]:
    """The matrices that the queries of :func:`best` are rows of."""
    return {"i2t": [scores], "t2i": [scores.T], "both": [scores, scores.T]}[way]


def check(tops: list[TopK], scores: Tensor, way: str, *, atol: float) -> None:
    """The k highest scores of each query, and items that have them: both as in a full sort, but for rounding."""
    for top, matrix in zip(tops, ways(scores, way), strict=True):
        right = matrix.topk(top.index.shape[1], dim=1).values
        torch.testing.assert_close(top.score.to(right), right, atol=atol, rtol=1e-6)
        torch.testing.assert_close(matrix.gather(1, top.index), right, atol=atol, rtol=1e-6)
        assert all(len(set(row)) == len(row) for row in top.index.tolist())


# ------------------------------------------------------------------------------------------------------------ the rule


def test_candidates_are_scored_in_chunks() -> None:
    made, v, t = method(20), Embedding(units(4, 20, seed=1)), Embedding(units(9, 20, seed=2))
    engine, index = BlockScorer(made), torch.tensor([[0, 8], [1, 1], [5, 2], [7, 3]])
    expected = engine.block(v, t).gather(1, index)
    for chunk in (1, 3, 100):
        scores = candidate_scores(engine, v, t, index, chunk=chunk)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    none = Embedding(torch.empty(0, 20))
    assert candidate_scores(engine, none, t, torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(1e-4, 1.0), st.integers(1, 5), st.integers(1, 9))
def test_what_is_sure_is_the_full_sort(seed: int, size: float, k: int, spare: int) -> None:
    """As long as no error exceeds the margin, here by making the others' errors as large as it allows."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(20, 40, generator=generator)
    coarse = truth + size * (2 * torch.rand(truth.shape, generator=generator) - 1)
    candidates = coarse.topk(k + spare, dim=1)
    fine = truth.gather(1, candidates.indices)
    allowed = MARGIN * (candidates.values - fine).abs().amax()
    others = torch.minimum(coarse + allowed, candidates.values[:, -1:] + allowed).scatter(1, candidates.indices, fine)
    sure = surely_best(candidates.values, fine, k=k)
    right = stable_topk(others, k).index
    assert torch.equal(best_of(fine, candidates.indices, k=k).index[sure], right[sure])


def test_the_error_allowed_is_that_of_all_queries() -> None:
    """A query whose candidates happen to have no error is not sure on their word alone."""
    fine = torch.tensor([[9.0, 8.0, 1.0], [9.0, 1.5, 1.0], [2.0, 2.0, 2.0], [9.0, 8.0, 1.0]])
    coarse = fine + torch.tensor([0.1, 0.0, 0.0])
    coarse[2] = 2.0
    assert surely_best(coarse, fine, k=2).tolist() == [True, False, False, True]  # 8 > 1 + 8·0.1, 1.5 is not; a tie
    coarse[3, 0] += 1.0
    assert not surely_best(coarse, fine, k=2).any()
    assert surely_best(coarse[:0], fine[:0], k=2).shape == (0,)
    equal = torch.tensor([[3.0, 2.0, 2.0]])  # without any error, another item may tie with the second
    assert not surely_best(equal, equal, k=2).any()


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("position", [0, 2])
def test_what_is_not_finite_is_never_sure_and_leaves_the_others(worst: float, side: int, position: int) -> None:
    scores = [torch.tensor([[9.0, 8.0, 1.0], [9.0, 8.0, 1.0]]) for _ in range(2)]
    assert surely_best(*scores, k=2).all()
    scores[side][0, position] = worst
    assert surely_best(*scores, k=2).tolist() == [False, True]


# ---------------------------------------------------------------------------------- kernel and float32, float8 and half


@interpreted
@every_way
def test_interpreted_near_ties_and_large_decoders_are_decided_in_float32(way: str) -> None:
    """32 items that float16 cannot order, and a decoder that it cannot hold."""
    made, v, t = method(32), units(10, 32, seed=1), near(32, 32)
    if way == "t2i":
        v, t = t, v
    check(best(cascade(made), v, t, way), exact(made.adapter, v, t), way, atol=1e-6)
    made, v, t = with_large_decoder(20), units(10, 20, seed=1), units(32, 20, seed=2)
    assert half_dtype(made.fold()) == torch.bfloat16
    reference = exact(made.adapter, v, t)
    check(best(cascade(made), v, t, way), reference, way, atol=1e-6 * float(reference.std()))


@interpreted
@every_way
def test_interpreted_equal_items_go_by_index(way: str) -> None:
    """And all scores are those of float32, which the kernel's are not."""
    made, same, other = method(20), units(1, 20, seed=2).expand(32, 20), units(10, 20, seed=1)
    v, t = (same, other) if way == "t2i" else (other, same)
    engine = cascade(made)
    assert best(engine, v, t, way)[0].index.tolist() == [[0, 1, 2]] * 10
    matrix = BlockScorer(made).block(Embedding(v), Embedding(t))
    assert torch.equal(engine.block(Embedding(v), Embedding(t)), matrix)
    assert (engine.coarse.block(Embedding(v), Embedding(t)) - matrix).abs().max() > 1e-4


@interpreted
@every_way
def test_interpreted_what_is_clear_is_not_scored_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items far apart: the kernel's one pass and the candidates decide, float32 never sees all pairs."""
    made, v, t = with_large_cosine(32), units(12, 32, seed=1), units(30, 32, seed=2)
    engine, reference = cascade(made), exact(made.adapter, v, t)
    monkeypatch.setattr(BlockScorer, "block", lambda *_: pytest.fail("all items again"))
    check(best(engine, v, t, way, k=2), reference, way, atol=1e-3)


@interpreted
def test_interpreted_only_the_unsure_are_scored_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images are among texts that lie close together; for the others these are far off."""
    made, crowd = with_large_cosine(32), near(12, 32)
    v, t = torch.cat([units(9, 32, seed=1), -crowd[:1], crowd[:2]]), torch.cat([units(20, 32, seed=2), crowd])
    engine, whole, asked = cascade(made), BlockScorer.block, []
    monkeypatch.setattr(BlockScorer, "block", lambda self, v, t: asked.append(v.mean) or whole(self, v, t))
    tops = best(engine, v, t, "i2t")
    assert 2 <= sum(map(len, asked)) < 9
    for image in v[-2:]:
        assert any(torch.equal(image, one) for part in asked for one in part)
    check(tops, exact(made.adapter, v, t), "i2t", atol=1e-3)


@interpreted
@pytest.mark.parametrize("reason", ["little work", "few items"])
def test_interpreted_the_kernel_is_not_asked_in_vain(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, v, t = method(20), units(4, 20, seed=1), units(6 if reason == "few items" else 70, 20, seed=2)
    engine = cascade(made)
    engine.worthwhile = 1e12 if reason == "little work" else 0.0
    matrix = engine.block(Embedding(v), Embedding(t))
    monkeypatch.setattr(KernelScorer, "stream", None)
    assert torch.equal(best(engine, v, t, "i2t")[0].index, stable_topk(matrix, 3).index)
    assert best(engine, v, t, "both")[1].index.shape == (len(t), 3)


@interpreted
def test_interpreted_a_nan_image_leaves_the_others() -> None:
    made, v, t = method(20), units(8, 20, seed=1), units(32, 20, seed=2)
    t[:25] = t[0]  # ties at every border
    v[3] = torch.nan
    rest = [row for row in range(8) if row != 3]
    for engine in (cascade(made), KernelScorer(made, dtype=torch.float16)):
        reference = engine.block(Embedding(v), Embedding(t))
        for way in ("i2t", "both"):
            top = best(engine, v, t, way)[0]
            assert top.index[3].tolist() == [0, 1, 2]
            assert top.score[3].isnan().all()
            torch.testing.assert_close(top.score[rest], stable_topk(reference[rest], 3).score, atol=1e-5, rtol=1e-5)


@interpreted
@every_way
def test_interpreted_float8_is_rescored_in_every_way(way: str) -> None:
    """The candidates of float8 in float16's order, close to float32's, which float8's own is not."""
    made, v, t = method(64), units(10, 64, seed=1), units(32, 64, seed=2)
    engine, fine = rescored(made), BlockScorer(made).block(Embedding(v), Embedding(t))
    rough = engine.block(Embedding(v), Embedding(t))
    for top, coarse, other in zip(best(engine, v, t, way), ways(rough, way), ways(fine, way), strict=True):
        candidates = coarse.topk(9, dim=1).indices
        right = other.gather(1, candidates).topk(3, dim=1).values
        torch.testing.assert_close(top.score, right, atol=5e-3, rtol=0)
        torch.testing.assert_close(other.gather(1, top.index), right, atol=5e-3, rtol=0)
        assert not torch.equal(top.index, coarse.topk(3, dim=1).indices)


@interpreted
def test_interpreted_float8_through_pair_scores_and_of_nothing() -> None:
    """The top-k is rescored, whether or not the matrix has been computed."""
    scores = PairScorer(model("vacsr"), device="cpu").score_all(*inputs(6, 30))
    scores.scorer.engine = rescored(scores.scorer.model.method)  # type: ignore[arg-type]
    tops = [*scores.topk_both(2), scores.topk(2), scores.topk(2, direction="t2i")]
    rough = scores.score
    again = [*scores.topk_both(2), scores.topk(2), scores.topk(2, direction="t2i")]
    for one, other in zip([*tops[:2], *again], [*tops[2:], *tops], strict=True):
        assert torch.equal(one.index, other.index)
    assert not torch.equal(tops[0].score, stable_topk(rough, 2).score)
    engine, none = rescored(method(20)), torch.empty(0, 20)
    assert engine.block(Embedding(none), Embedding(none)).shape == (0, 0)
    assert [top.index.shape for top in best(engine, none, none, "both")] == [(0, 0), (0, 0)]
    assert best(engine, none, units(2, 20, seed=1), "t2i")[0].index.shape == (2, 0)


@on_gpu
def test_gpu_near_ties_and_large_decoders() -> None:
    """What float16 cannot order or hold; 1,000 texts of which 300 lie within its rounding, d as in test_gpu_scores."""
    for made in (method(1024, hidden=1024, width=16, device="cuda"), with_large_decoder(1024, device="cuda")):
        v = units(300, 1024, seed=1, device="cuda")
        t = torch.cat([units(700, 1024, seed=2, device="cuda"), near(300, 1024, device="cuda")])
        v[:40] = near(40, 1024, device="cuda")
        engine = choose_engine(made, device=torch.device("cuda"))
        assert isinstance(engine, Cascade)
        engine.spare, engine.worthwhile = 4, 0.0
        reference = torch.cat([exact(made.adapter, part, t) for part in v.split(8)])
        for way in WAYS:
            check(best(engine, v, t, way), reference, way, atol=5e-6 * float(reference.abs().max()))
