"""The scoring kernel against the adapter written out in float64.

Without a GPU the kernel runs in Triton's interpreter, which must be switched on before Triton is imported: one test
runs the interpreted ones in a process of their own.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.adapter import AdapterConfig
from vacsr.errors import EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding
from vacsr.methods.infonce import InfoNCE, InfoNCEConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring import kernel
from vacsr.scoring.engine import Precision, choose_scorer
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import DTYPES, PairKernel
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_scorer import FinderScorer, KernelScorer, kernel_scorer
from vacsr.scoring.kernel_tiles import SMALL
from vacsr.scoring.topk import stable_topk

from ..interpreter import GPU, interpreted, run_interpreted
from .adapters import exact, method, spread_error, units

HALF = torch.float16
ROUNDINGS = {torch.bfloat16: 2.0**-8, HALF: 2.0**-11, FP8: 2.0**-4}
# Root mean square error over the scores' standard deviation. The interpreter cuts where hardware rounds to bfloat16,
# and loses the carry of some roundings to float8, which hardware does not.
STATED = {torch.bfloat16: 8e-3, HALF: 1.2e-3, FP8: 8e-2}
STATED_INTERPRETED = {torch.bfloat16: 1.2e-2, HALF: 1.2e-3, FP8: 0.2}


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_interpreted_scores_of_any_shape(data: st.DataObject) -> None:
    images, texts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    dim, hidden = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    made = method(
        dim, hidden=hidden, width=data.draw(st.sampled_from([0, 1, 16, 20])), residual=data.draw(st.booleans())
    )
    v, t = units(images, dim, seed=1), units(texts, dim, seed=2)
    dtype = data.draw(st.sampled_from([HALF, torch.bfloat16]))
    scorer = KernelScorer(made, dtype=dtype, tile=SMALL._replace(tma=data.draw(st.booleans())))
    found = scorer.block(Embedding(v), Embedding(t))
    assert found.shape == (images, texts)
    assert found.dtype == torch.float32
    # Four roundings: the scaled trunk, the text, the hidden unit, the decoder's small matrix.
    bound = 4.2 * ROUNDINGS[dtype] * exact(made.adapter, v, t, absolute=True) + 1e-4
    assert bool(((found - exact(made.adapter, v, t)).abs() <= bound).all())


@interpreted
@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_error_is_as_stated(dtype: torch.dtype, width: int) -> None:
    made = method(128, width=width)
    v, t = units(8, 128, seed=1), units(60, 128, seed=2)
    tile = SMALL._replace(texts=64, hidden=128, depth=128, run=8)
    found = KernelScorer(made, dtype=dtype, tile=tile).block(Embedding(v), Embedding(t))
    assert spread_error(found, exact(made.adapter, v, t)) < STATED_INTERPRETED[dtype]


@interpreted
def test_interpreted_decoder_wider_than_a_pass() -> None:
    made, v, t = method(20, width=150), units(3, 20, seed=1), units(9, 20, seed=2)
    scorer = KernelScorer(made, dtype=HALF)
    assert len(scorer.kernel.packed.passes) == 2
    torch.testing.assert_close(
        scorer.block(Embedding(v), Embedding(t)).double(), exact(made.adapter, v, t), atol=5e-3, rtol=0
    )


@interpreted
@pytest.mark.parametrize("tma", [False, True])
def test_interpreted_cuts_change_nothing(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of images, groups of text tiles and runs of images are only an order of work."""
    v, t = units(4, 40, seed=1), units(90, 40, seed=2)
    made = method(40, residual=False)
    whole = KernelScorer(made, tile=SMALL._replace(tma=tma))
    expected = whole.block(Embedding(v), Embedding(t))
    monkeypatch.setattr(kernel, "text_tiles_together", lambda *_: 2)  # of 3
    cut = KernelScorer(made, tile=SMALL._replace(run=3, tma=tma))
    cut.kernel.rows = 3
    assert torch.equal(cut.block(Embedding(v), Embedding(t)), expected)


@interpreted
def test_interpreted_sides_may_be_swapped() -> None:
    v, t = Embedding(units(3, 40, seed=1)), Embedding(units(35, 40, seed=2))
    scorer = KernelScorer(method(40))
    assert torch.equal(scorer.block(t, v), scorer.block(v, t).T)  # the shorter side scales the weights either way


@interpreted
@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("residual", [False, True])
def test_interpreted_outputs_are_fully_overwritten_and_nothing_else(width: int, residual: bool) -> None:
    made, v, t = method(20, width=width, residual=residual), units(3, 20, seed=1), units(37, 20, seed=2)
    scorer = PairKernel(made.adapter.fold(), dtype=HALF)
    room = torch.full((9, 37), torch.nan)
    found = scorer.scores(v, scorer.texts(t), out=room[3:6])
    assert not found.isnan().any()
    assert torch.equal(found, scorer.scores(v, scorer.texts(t)))
    assert room[:3].isnan().all()
    assert room[6:].isnan().all()


@interpreted
def test_interpreted_images_of_another_shape_are_refused() -> None:
    scorer = PairKernel(method(20).adapter.fold(), dtype=HALF)
    texts = scorer.texts(units(37, 20, seed=2))
    for shape in ([3, 21], [3, 32], [3, 19], [20]):
        for call in (scorer.scores, lambda v, texts: list(scorer.blocks(v, texts))):
            with pytest.raises(
                ShapeMismatch, match="the adapter expects dimension 20 — pass one row per image"
            ) as error:
                call(torch.ones(shape), texts)
            assert str(shape) in str(error.value)
    with pytest.raises(ShapeMismatch, match="text embeddings have shape"):
        scorer.texts(torch.ones(3, 21))


@interpreted
def test_interpreted_texts_of_another_kernel_are_refused() -> None:
    scorer, v = PairKernel(method(20).adapter.fold(), dtype=HALF), units(3, 20, seed=1)
    wide = PairKernel(method(20).adapter.fold(), dtype=HALF, tile=SMALL._replace(depth=64))
    for other in (PairKernel(method(20).adapter.fold(), dtype=torch.bfloat16), wide):
        with pytest.raises(ShapeMismatch, match=r"packed as .* for another kernel, .* pack them: kernel\.texts"):
            scorer.scores(v, other.texts(units(37, 20, seed=2)))


@interpreted
@pytest.mark.parametrize(
    ("out", "given"),
    [
        (torch.zeros(3, 38), "[3, 38]"),
        (torch.zeros(4, 37), "[4, 37]"),
        (torch.zeros(2, 37), "[2, 37]"),
        (torch.zeros(3, 37, dtype=torch.float64), "torch.float64"),
        (torch.zeros(37, 3).T, "not contiguous"),
        (torch.zeros(3, 74)[:, ::2], "not contiguous"),
        (torch.zeros(3, 37, device="meta"), "meta"),
    ],
    ids=["wide", "tall", "short", "double", "turned", "strided", "elsewhere"],
)
def test_interpreted_outputs_that_do_not_fit_are_refused(out: Tensor, given: str) -> None:
    scorer = PairKernel(method(20).adapter.fold(), dtype=HALF)
    with pytest.raises(ShapeMismatch, match=r"expected contiguous torch\.float32 \[3, 37\] on cpu — ") as error:
        scorer.scores(units(3, 20, seed=1), scorer.texts(units(37, 20, seed=2)), out=out)
    assert given in str(error.value)


@interpreted
@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_interpreted_nan_stays_with_its_pairs(dtype: torch.dtype, width: int, worst: float) -> None:
    made, v, t = method(20, width=width), units(4, 20, seed=1), units(40, 20, seed=2)
    scorer = KernelScorer(made, dtype=dtype)
    clean = scorer.block(Embedding(v), Embedding(t))
    v[1, 3], t[35, 7] = worst, worst
    found = scorer.block(Embedding(v), Embedding(t))
    hit = torch.zeros(4, 40, dtype=torch.bool)
    hit[1], hit[:, 35] = True, True
    assert not found[hit].isfinite().any()
    # With float8 all texts share one scale, which the struck one may have set.
    torch.testing.assert_close(found[~hit], clean[~hit], atol=0.3 if dtype == FP8 else 0.0, rtol=0)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_vectors_of_zeros(dtype: torch.dtype) -> None:
    made, v, t = method(20), units(2, 20, seed=1), units(3, 20, seed=2)
    v[0], t[2] = 0.0, 0.0
    found = KernelScorer(made, dtype=dtype).block(Embedding(v), Embedding(t))
    torch.testing.assert_close(found.double(), exact(made.adapter, v, t), atol=0.02 if dtype != FP8 else 0.5, rtol=0)


@interpreted
def test_interpreted_without_images_or_texts() -> None:
    scorer = KernelScorer(method(20))
    some, none = Embedding(units(2, 20, seed=1)), Embedding(torch.empty(0, 20))
    assert scorer.block(some, none).shape == (2, 0)
    assert scorer.block(none, some).shape == (0, 2)
    with pytest.raises(ShapeMismatch, match="expects dimension 20"):
        scorer.block(Embedding(torch.ones(1, 21)), Embedding(torch.ones(1, 21)))


@interpreted
@pytest.mark.parametrize("texts", [3, 30])
def test_interpreted_topk_of_both_directions(texts: int) -> None:
    v, t = Embedding(units(11, 20, seed=1)), Embedding(units(texts, 20, seed=2))
    scorer = KernelScorer(method(20), dtype=HALF)
    scorer.kernel.rows = 4
    scores = scorer.block(v, t)
    found = scorer.topk_both(v, t, k=5)
    for one, other in ((found.texts, stable_topk(scores, 5)), (found.images, stable_topk(scores.T, 5))):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.score, other.score)


@interpreted
def test_interpreted_float8_candidates_are_scored_again() -> None:
    v, t = Embedding(units(6, 32, seed=1)), Embedding(units(50, 32, seed=2))
    made = method(32)
    found = KernelScorer(made, dtype=FP8).topk_both(v, t, k=3, candidates=50)  # all of them: the order is float16's
    reference = exact(made.adapter, v.mean, t.mean)
    for one, scores in ((found.texts, reference), (found.images, reference.T)):
        torch.testing.assert_close(one.score.double(), scores.topk(3, dim=1).values, atol=5e-3, rtol=0)
        torch.testing.assert_close(scores.gather(1, one.index), scores.topk(3, dim=1).values, atol=5e-3, rtol=0)
    plain = KernelScorer(made, dtype=FP8).topk_both(v, t, k=3)
    assert plain.texts.index.shape == (6, 3)
    assert plain.images.index.shape == (50, 3)


@interpreted
def test_interpreted_streams_have_the_kernels_blocks() -> None:
    v, t = Embedding(units(4, 20, seed=1)), Embedding(units(66, 20, seed=2))
    scorer = KernelScorer(method(20), dtype=HALF)
    scorer.kernel.rows = 3
    blocks = list(scorer.stream(v, t))
    assert [len(block) for block in blocks] == [3, 1]
    whole = scorer.block(v, t)
    assert torch.equal(torch.cat(blocks), whole)
    few = list(scorer.stream(t, v))  # 4 texts would leave most of a tile empty
    assert [block.shape for block in few] == [(66, 4)]
    assert torch.equal(few[0], whole.T)
    for direction, matrix in (("i2t", whole), ("t2i", whole.T)):
        assert torch.equal(scorer.topk(v, t, k=3, direction=direction).index, stable_topk(matrix, 3).index)


@interpreted
def test_interpreted_long_rows_come_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    v, t = Embedding(units(5, 20, seed=1)), Embedding(units(66, 20, seed=2))
    scorer = KernelScorer(method(20), dtype=HALF)
    whole, best = scorer.block(v, t), scorer.topk_both(v, t, k=3)
    monkeypatch.setattr("vacsr.scoring.topk._PAIRS", 140)
    assert [block.shape for block in scorer.stream(v, t)] == [(2, 66), (2, 66), (1, 66)]
    assert [block.shape for block in scorer.stream(t, v)] == [(28, 5), (28, 5), (10, 5)]
    torch.testing.assert_close(torch.cat(list(scorer.stream(t, v))), whole.T, atol=1e-6, rtol=1e-6)
    for one, other in zip(scorer.topk_both(v, t, k=3), best, strict=True):
        assert torch.equal(one.index, other.index)


@interpreted
def test_interpreted_what_the_kernel_finds_is_scored_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64: right in order and score, as float16 is not."""
    monkeypatch.setattr("vacsr.scoring.kernel_scorer._WORTH_FINDING", 0.0)
    monkeypatch.setattr("vacsr.scoring.kernel_scorer._SPARE", 1)
    made, v, t = method(24), units(12, 24, seed=1), units(14, 24, seed=2)
    scorer, reference = FinderScorer(made), exact(made.adapter, v, t)
    for direction, matrix in (("i2t", reference), ("t2i", reference.T)):
        found = scorer.topk(Embedding(v), Embedding(t), k=5, direction=direction)
        best = matrix.topk(5, dim=1)
        assert torch.equal(found.index, best.indices)
        torch.testing.assert_close(found.score.double(), best.values, atol=1e-5, rtol=1e-5)
        rough = scorer.finder.topk(Embedding(v), Embedding(t), k=5, direction=direction).score
        assert (rough - best.values).abs().max() > 1e-4
    assert torch.equal(scorer.block(Embedding(v), Embedding(t)), BlockScorer(made).block(Embedding(v), Embedding(t)))


@interpreted
def test_interpreted_little_work_does_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    v, t = Embedding(units(4, 20, seed=1)), Embedding(units(70, 20, seed=2))
    scorer = FinderScorer(method(20))
    monkeypatch.setattr(PairKernel, "blocks", None)
    assert scorer.topk(v, t, k=3, direction="i2t").index.shape == (4, 3)


@interpreted
def test_interpreted_a_tile_without_room_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from vacsr.scoring.kernel_triton import OutOfResources

    v, t = Embedding(units(4, 20, seed=1)), Embedding(units(70, 20, seed=2))
    scorer, plain = KernelScorer(method(20), dtype=HALF), BlockScorer(method(20), dtype=HALF)
    small, large = scorer.kernel.tiles[0], scorer.kernel.tiles[0]._replace(stages=9)
    launch, tried = PairKernel._score, []

    def score(self: PairKernel, *args: object, **options: object) -> None:
        tried.append(options["tile"])
        if options["tile"] == large:
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(self, *args, **options)

    monkeypatch.setattr(PairKernel, "_score", score)
    expected = scorer.block(v, t)
    scorer.kernel.tiles = [large, small]
    assert torch.equal(scorer.block(v, t), expected)
    assert torch.equal(scorer.block(v, t), expected)
    assert tried == [small, large, small, small]
    scorer.kernel.tiles = [large]
    with pytest.warns(UserWarning, match="no tile of the scoring kernel fits this GPU at d=20 .* plain torch"):
        found = scorer.block(v, t)
    assert torch.equal(found, plain.block(v, t))
    assert torch.equal(torch.cat(list(scorer.stream(v, t))), found)  # without asking or telling again
    assert len(tried) == 5
    scorer.kernel.tiles = [large]
    with pytest.warns(UserWarning, match="plain torch"):
        streamed = list(scorer.stream(v, t))
    assert torch.equal(torch.cat(streamed), found)


@interpreted
def test_interpreted_choice() -> None:
    """By the rule of a GPU; the kernel itself is interpreted, so everything lies on the CPU."""

    def chosen(made: Vacsr, dtype: Precision) -> tuple[type[BlockScorer], torch.dtype]:
        scorer = choose_scorer(made, device=torch.device("cuda"), dtype=dtype)
        return type(scorer), scorer.dtype

    assert chosen(method(20), torch.float32) == (FinderScorer, torch.float32)
    assert chosen(method(20), "auto") == (KernelScorer, HALF)
    for dtype in (torch.bfloat16, HALF):
        assert chosen(method(20), dtype) == (KernelScorer, dtype)
    assert chosen(method(20), FP8) == (KernelScorer, HALF)  # in which it scores its candidates again
    huge = method(20)
    with torch.no_grad():
        huge.adapter.trunk.weight *= 1e5
    assert chosen(huge, "auto") == (KernelScorer, torch.bfloat16)
    head = Vacsr(VacsrConfig(adapter=AdapterConfig(mixing="head")), dim=20)
    assert chosen(head, "auto") == chosen(head, torch.float32) == (BlockScorer, torch.float32)
    assert chosen(head, torch.bfloat16) == (BlockScorer, torch.bfloat16)
    with pytest.raises(UsageError, match="float32"):
        KernelScorer(method(20), dtype=torch.float32)
    with pytest.raises(UsageError, match="InfoNCE"):
        KernelScorer(InfoNCE(InfoNCEConfig(), dim=8))
    with pytest.raises(UsageError, match="k=10"):
        KernelScorer(method(20)).topk_both(Embedding(torch.ones(1, 20)), Embedding(torch.ones(1, 20)), k=0)


def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernel.available("cpu")
    gpu = torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16, HALF):
        assert kernel_scorer(method(20), dtype=dtype) is None
        plain = choose_scorer(method(20), device=gpu, dtype=dtype)
        assert type(plain) is BlockScorer
        assert plain.dtype == dtype
    assert choose_scorer(method(20), device=gpu, dtype="auto").dtype == HALF
    with pytest.raises(EnvironmentProblem, match="BlockScorer"):
        choose_scorer(method(20), device=gpu, dtype=FP8)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernel.available("cuda")


class Case(NamedTuple):
    """What is compiled anew; everything that a GPU can show of it is asked in one test."""

    dtype: torch.dtype
    images: int
    texts: int
    dim: int
    hidden: int
    width: int
    residual: bool
    tiles: int = 1  # of the candidates, so many are compiled


CASES = [
    Case(torch.bfloat16, 300, 1000, 1024, 1024, 16, True, tiles=3),
    Case(torch.bfloat16, 9, 700, 512, 2048, 0, False),
    Case(HALF, 3, 130, 200, 300, 0, True, tiles=3),
    Case(HALF, 1, 1, 5, 7, 150, True),
    Case(HALF, 4, 150, 300, 384, 150, False),
    Case(FP8, 9, 700, 512, 512, 16, True, tiles=3),
    Case(FP8, 3, 130, 100, 300, 0, False),
]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gpu_scores(case: Case) -> None:
    made = method(case.dim, hidden=case.hidden, width=case.width, residual=case.residual, device="cuda")
    v, t = (units(n, case.dim, seed=n, device="cuda") for n in (case.images, case.texts))
    scorer = KernelScorer(made, dtype=case.dtype)
    tiles = scorer.kernel.tiles
    found = scorer.block(Embedding(v), Embedding(t))
    assert scorer.kernel.tiles == tiles, "the rule chose a tile that the GPU has no room for"
    few = slice(None, 8)
    reference, bound = (exact(made.adapter, v[few], t[few], absolute=flag) for flag in (False, True))
    assert bool(((found[few, few] - reference).abs() <= 4.2 * ROUNDINGS[case.dtype] * bound + 1e-3).all())
    if case.images > 1:
        assert spread_error(found, BlockScorer(made).block(Embedding(v), Embedding(t))) < STATED[case.dtype]
    for tile in tiles[1 : case.tiles]:
        same = KernelScorer(made, dtype=case.dtype, tile=tile).block(Embedding(v), Embedding(t))
        torch.testing.assert_close(same, found, atol=1e-4, rtol=1e-4)
    _nan_stays_with_its_pairs(scorer.kernel, v, t)


def _nan_stays_with_its_pairs(scorer: PairKernel, v: Tensor, t: Tensor) -> None:
    """In one image and one text, where there are others."""
    v, t = v.clone(), t.clone()
    hit = torch.zeros(len(v), len(t), dtype=torch.bool, device="cuda")
    if len(v) > 1:
        v[1, 3], t[35, 2] = torch.nan, torch.nan
        hit[1], hit[:, 35] = True, True
    found = scorer.scores(v, scorer.texts(t), out=torch.full(hit.shape, torch.nan, device="cuda"))
    assert torch.equal(found.isnan(), hit)


@pytest.mark.gpu
@GPU
def test_gpu_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of the first case above, so that nothing is compiled for it alone but float16."""
    monkeypatch.setattr("vacsr.scoring.kernel_scorer._WORTH_FINDING", 0.0)
    made = method(1024, hidden=1024, width=16, device="cuda")
    v, t = (Embedding(units(n, 1024, seed=n, device="cuda")) for n in (700, 3000))
    scorer, finder = KernelScorer(made), choose_scorer(made, device=torch.device("cuda"))
    scores, found = scorer.block(v, t), scorer.topk_both(v, t, k=10)
    assert torch.equal(found.texts.index, stable_topk(scores, 10).index)
    assert torch.equal(found.images.index, stable_topk(scores.T, 10).index)
    assert type(finder) is FinderScorer
    best = BlockScorer(made).block(v, t)
    for direction, matrix in (("i2t", best), ("t2i", best.T)):
        top = finder.topk(v, t, k=10, direction=direction)
        torch.testing.assert_close(top.score, matrix.topk(10, dim=1).values, atol=1e-4, rtol=1e-4)
