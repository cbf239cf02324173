"""The scoring kernel against the adapter written out in float64.

Without a GPU the kernel runs in Triton's interpreter, which must be switched on before Triton is imported: one test
runs the interpreted ones in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import VariationalAdapter
from vacsr.config import AdapterConfig, InfoNCEConfig, VacsrConfig
from vacsr.errors import EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring import kernel
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import DTYPES, KernelScorer, PairKernel, choose_scorer
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_tiles import SMALL
from vacsr.scoring.topk import stable_topk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernel_in_the_interpreter")
GPU = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU")
HALF = torch.float16
ROUNDINGS = {torch.bfloat16: 2.0**-8, HALF: 2.0**-11, FP8: 2.0**-4}
# Root mean square error over the scores' standard deviation. The interpreter cuts where hardware rounds to bfloat16,
# and loses the carry of some roundings to float8, which hardware does not.
STATED = {torch.bfloat16: 8e-3, HALF: 1.2e-3, FP8: 8e-2}
STATED_INTERPRETED = {torch.bfloat16: 1.2e-2, HALF: 1.2e-3, FP8: 0.2}


def test_the_kernel_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    if INTERPRETED:
        pytest.skip("the interpreter is on already")
    command = [sys.executable, "-m", "pytest", __file__, "-k", "interpreted", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def method(dim: int, *, hidden: int = 0, width: int = 16, residual: bool = True, device: str = "cpu") -> Vacsr:
    """Random weights, none of them zero."""
    config = AdapterConfig(hidden=hidden, decoder_hidden=width, residual="cosine" if residual else "none")
    made = Vacsr(dim, VacsrConfig(adapter=config)).eval()
    generator = torch.Generator().manual_seed(dim + hidden + width)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5)
    return made.to(device)


def units(count: int, dim: int, *, seed: int, device: str = "cpu") -> Tensor:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(rows, dim=1).to(device)


def exact(adapter: VariationalAdapter, v: Tensor, t: Tensor, *, absolute: bool = False) -> Tensor:
    """The test-time logit in float64, unfolded; or what it would be if every number in it were positive and every ReLU
    open, to which rounding errors are proportional."""
    p = {name: x.detach().double() for name, x in adapter.state_dict().items()}
    v, t = v.double(), t.double()
    relu = torch.relu
    if absolute:
        p = {name: x if name == "mixing_logits" else x.abs() for name, x in p.items()}
        v, t = v.abs(), t.abs()
    hidden = relu((v[:, None] * t[None]) * adapter.scale @ p["trunk.weight"].T + p["trunk.bias"])
    means = hidden @ p["mean_heads.weight"].T + p["mean_heads.bias"]
    alpha = torch.softmax(p["mixing_logits"], dim=0)
    z = sum(a * part for a, part in zip(alpha, means.chunk(len(alpha), dim=-1), strict=True))
    logit = z @ p["decoder.0.weight"].T + p["decoder.0.bias"]
    if "decoder.2.weight" in p:
        logit = relu(logit) @ p["decoder.2.weight"].T + p["decoder.2.bias"]
    logit = logit[..., 0]
    return logit + p["residual"][0] * (v @ t.T) + p["residual"][1] if "residual" in p else logit


def spread_error(scores: Tensor, reference: Tensor) -> float:
    return float((scores - reference).square().mean().sqrt() / reference.std())


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
def test_interpreted_choice() -> None:
    assert type(choose_scorer(method(20), dtype=torch.bfloat16)) is KernelScorer
    assert type(choose_scorer(method(20), dtype=torch.float32)) is BlockScorer
    head = Vacsr(20, VacsrConfig(adapter=AdapterConfig(mixing="head")))
    assert type(choose_scorer(head, dtype=torch.bfloat16)) is BlockScorer
    with pytest.raises(UsageError, match="float32"):
        KernelScorer(method(20), dtype=torch.float32)
    with pytest.raises(UsageError, match="InfoNCE"):
        KernelScorer(InfoNCE(InfoNCEConfig()))
    with pytest.raises(UsageError, match="k=10"):
        KernelScorer(method(20)).topk_both(Embedding(torch.ones(1, 20)), Embedding(torch.ones(1, 20)), k=0)


def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernel.available("cpu")
    for dtype in (torch.bfloat16, FP8):
        plain = choose_scorer(method(20), dtype=dtype)
        assert type(plain) is BlockScorer
        assert plain.dtype == torch.bfloat16
    with pytest.raises(EnvironmentProblem, match="BlockScorer"):
        KernelScorer(method(20))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernel.available("cuda")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("width", [0, 16, 150])
@pytest.mark.parametrize("shape", [(300, 1000, 1024, 1024), (3, 130, 200, 300), (1, 1, 5, 7), (9, 2000, 512, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_scores(dtype: torch.dtype, shape: tuple[int, int, int, int], width: int) -> None:
    images, texts, dim, hidden = shape
    made = method(dim, hidden=hidden, width=width, device="cuda")
    v, t = units(images, dim, seed=1, device="cuda"), units(texts, dim, seed=2, device="cuda")
    scorer = KernelScorer(made, dtype=dtype)
    found = scorer.block(Embedding(v), Embedding(t))
    few = slice(None, 8)
    reference, bound = (exact(made.adapter, v[few], t[few], absolute=flag) for flag in (False, True))
    assert bool(((found[few, few] - reference).abs() <= 4.2 * ROUNDINGS[dtype] * bound + 1e-3).all())
    folded = BlockScorer(made).block(Embedding(v), Embedding(t))
    if images > 1:
        assert spread_error(found, folded) < STATED[dtype]
    for tile in scorer.kernel.tiles:
        same = KernelScorer(made, dtype=dtype, tile=tile).block(Embedding(v), Embedding(t))
        torch.testing.assert_close(same, found, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_nan_stays_with_its_pairs(dtype: torch.dtype, width: int) -> None:
    made = method(256, width=width, device="cuda")
    v, t = units(9, 256, seed=1, device="cuda"), units(300, 256, seed=2, device="cuda")
    scorer = PairKernel(made.adapter.fold(), dtype=dtype)
    v[1, 3], t[35, 7] = torch.nan, torch.nan
    found = scorer.scores(v, scorer.texts(t), out=torch.full((9, 300), torch.nan, device="cuda"))
    hit = torch.zeros(9, 300, dtype=torch.bool, device="cuda")
    hit[1], hit[:, 35] = True, True
    assert torch.equal(found.isnan(), hit)


@pytest.mark.gpu
@GPU
def test_gpu_topk_of_both_directions() -> None:
    made = method(512, device="cuda")
    v, t = (Embedding(units(n, 512, seed=n, device="cuda")) for n in (700, 3000))
    scorer = KernelScorer(made)
    scores, found = scorer.block(v, t), scorer.topk_both(v, t, k=10)
    assert torch.equal(found.texts.index, stable_topk(scores, 10).index)
    assert torch.equal(found.images.index, stable_topk(scores.T, 10).index)
