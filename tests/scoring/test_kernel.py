"""The scoring kernel against the adapter written out in float64.

Without a GPU the kernel runs in Triton's interpreter, which must be switched on before Triton is imported: one test
runs the interpreted ones, also those of the cascade and the quickest of the loss, in a process of their own.
"""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr import kernels
from vacsr.adapter import AdapterConfig
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.methods.base import Embedding
from vacsr.methods.infonce import InfoNCE, InfoNCEConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring import Precision, choose_engine, kernel
from vacsr.scoring.cascade import Cascade
from vacsr.scoring.folded import FP8, BlockScorer, Engine
from vacsr.scoring.kernel import SMALL, KernelScorer, Tile, choose_tile, decoder_width, shared_bytes
from vacsr.scoring.topk import DIRECTIONS, stable_topk

from ..interpreter import INTERPRETED, compiled_for_hopper, interpreted, on_gpu, run_interpreted
from .models import exact, method, spread_error, units

CUDA = torch.device("cuda")
HALF = torch.float16
ROUNDINGS = {torch.bfloat16: 2.0**-8, HALF: 2.0**-11, FP8: 2.0**-4}
# Root mean square error over the scores' standard deviation. The interpreter cuts where hardware rounds to bfloat16,
# and loses the carry of some roundings to float8, which hardware does not.
STATED = {torch.bfloat16: 8e-3, HALF: 1.2e-3, FP8: 8e-2}
STATED_INTERPRETED = {torch.bfloat16: 1.2e-2, HALF: 1.2e-3, FP8: 0.2}
every_dtype = pytest.mark.parametrize("dtype", ROUNDINGS)
both_decoders = pytest.mark.parametrize("width", [0, 16])


def unit(count: int, dim: int = 20, *, seed: int) -> Embedding:
    return Embedding(units(count, dim, seed=seed))


def test_the_kernels_in_the_interpreter() -> None:
    clamp = "kernels/test_latents.py::test_interpreted_clamped_log_variances_have_no_gradient"
    run_interpreted("scoring/test_kernel.py", "scoring/test_cascade.py", clamp)


@interpreted
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_interpreted_scores_of_any_shape(data: st.DataObject) -> None:
    images, texts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    dim, hidden = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    width, residual = data.draw(st.sampled_from([0, 1, 16, 20])), data.draw(st.booleans())
    made = method(dim, hidden=hidden, width=width, residual=residual)
    v, t = units(images, dim, seed=1), units(texts, dim, seed=2)
    dtype = data.draw(st.sampled_from([HALF, torch.bfloat16]))
    scorer = KernelScorer(made, dtype=dtype, tile=SMALL._replace(tma=data.draw(st.booleans())))
    scores = scorer.block(Embedding(v), Embedding(t))
    assert scores.shape == (images, texts)
    assert scores.dtype == torch.float32
    # Four roundings: the scaled trunk, the text, the hidden unit, the decoder's small matrix.
    bound = 4.2 * ROUNDINGS[dtype] * exact(made.adapter, v, t, absolute=True) + 1e-4
    assert bool(((scores - exact(made.adapter, v, t)).abs() <= bound).all())


@interpreted
@both_decoders
@every_dtype
def test_interpreted_error_is_as_stated(dtype: torch.dtype, width: int) -> None:
    made, v, t = method(128, width=width), units(8, 128, seed=1), units(60, 128, seed=2)
    tile = SMALL._replace(texts=64, hidden=128, depth=128, run=8)
    scores = KernelScorer(made, dtype=dtype, tile=tile).block(Embedding(v), Embedding(t))
    assert spread_error(scores, exact(made.adapter, v, t)) < STATED_INTERPRETED[dtype]


@interpreted
@pytest.mark.parametrize("tma", [False, True])
def test_interpreted_cuts_change_nothing(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of images, groups of text tiles and runs of images are only an order of work."""
    v, t, made = unit(4, 40, seed=1), unit(90, 40, seed=2), method(40, residual=False)
    expected = KernelScorer(made, tile=SMALL._replace(tma=tma)).block(v, t)
    monkeypatch.setattr(kernel, "text_tiles_together", lambda *_: 2)  # of 3
    cut = KernelScorer(made, tile=SMALL._replace(run=3, tma=tma), rows=3)
    assert torch.equal(cut.block(v, t), expected)


@interpreted
@both_decoders
@pytest.mark.parametrize("residual", [False, True])
def test_interpreted_outputs_are_fully_overwritten_and_nothing_else(width: int, residual: bool) -> None:
    made, v, t = method(20, width=width, residual=residual), unit(3, seed=1), unit(37, seed=2)
    scorer = KernelScorer(made, dtype=HALF)
    room = torch.full((9, 37), torch.nan)
    assert scorer._write(v.mean, t.mean, [scorer._pack_texts(t.mean)], room[3:6])
    assert torch.equal(room[3:6], scorer.block(v, t))
    assert room[:3].isnan().all()
    assert room[6:].isnan().all()


@interpreted
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(1, 70), st.sampled_from([0.1, 10.0, 3e4]))
def test_interpreted_the_cosine_is_more_exact_than_the_decoder(n: int, texts: int, dim: int, slope: float) -> None:
    """Its operands are float16, or float32 where the slope is large; bfloat16's would have eight times the error."""
    made, v, t = method(dim, width=16, residual=True), units(n, dim, seed=1), units(texts, dim, seed=2)
    with torch.no_grad():
        made.adapter.residual.copy_(torch.tensor([slope, -1.0]))
    scorer = KernelScorer(made, dtype=torch.bfloat16)
    errors = scorer._cosines(v, t, torch.empty(n, texts)).double() - slope * v.double() @ t.double().T
    bound = slope * v.double().abs() @ t.double().abs().T
    assert bool((errors.abs() <= 2.01 * ROUNDINGS[HALF] / 2 * bound + 1e-6 * slope).all())
    assert scorer.block(Embedding(v), Embedding(t)).shape == (n, texts)
    alone = method(dim, width=16, residual=False)
    if n * texts > 20 and slope <= 10:  # the decoder's own error, with the same weights and the same vectors
        decoder = KernelScorer(alone, dtype=torch.bfloat16).block(Embedding(v), Embedding(t)) - exact(
            alone.adapter, v, t
        )
        assert errors.square().mean() < decoder.square().mean()


@interpreted
def test_interpreted_operators_can_be_compiled() -> None:
    """They are opaque to the compiler, with their shapes and mutations declared."""
    from vacsr.kernels import scores

    v, t, scorer = unit(3, seed=1), unit(37, seed=2), KernelScorer(method(20), dtype=HALF)
    texts, rows = scorer._pack_texts(t.mean), torch.nn.functional.pad(v.mean, (0, 12))
    tile = [int(number) for number in scorer.tile]

    def compute(rows: Tensor, cosine: Tensor) -> Tensor:
        part = scorer.parts[0]
        weights = scores.scale_trunk(part.trunk, rows, HALF, tile)
        out = cosine.clone()
        scores.score_pairs(
            texts.rows, weights, part.edge, part.decoder, part.last, rows.new_empty(0), out,
            constant=part.constant, add=True, group=1, tile=tile,
        )  # fmt: skip
        return out

    with torch.inference_mode():
        residual = scorer._cosines(v.mean, t.mean, torch.empty(3, 37))
        compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)(rows, residual)
    assert torch.equal(compiled, scorer.block(v, t))


@interpreted
@both_decoders
@every_dtype
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_interpreted_nan_stays_with_its_pairs(dtype: torch.dtype, width: int, worst: float) -> None:
    scorer, v, t = KernelScorer(method(20, width=width), dtype=dtype), unit(4, seed=1), unit(40, seed=2)
    clean = scorer.block(v, t)
    v.mean[1, 3], t.mean[35, 7] = worst, worst
    scores = scorer.block(v, t)
    hit = torch.zeros(4, 40, dtype=torch.bool)
    hit[1], hit[:, 35] = True, True
    assert not scores[hit].isfinite().any()
    # With float8 all texts share one scale, which the struck one may have set.
    torch.testing.assert_close(scores[~hit], clean[~hit], atol=0.3 if dtype == FP8 else 0.0, rtol=0)


@interpreted
@every_dtype
def test_interpreted_vectors_of_zeros_and_no_vectors(dtype: torch.dtype) -> None:
    made, v, t = method(20), units(2, 20, seed=1), units(3, 20, seed=2)
    v[0], t[2] = 0.0, 0.0
    scorer, none = KernelScorer(made, dtype=dtype), Embedding(torch.empty(0, 20))
    scores = scorer.block(Embedding(v), Embedding(t))
    torch.testing.assert_close(scores.double(), exact(made.adapter, v, t), atol=0.02 if dtype != FP8 else 0.5, rtol=0)
    assert scorer.block(Embedding(v), none).shape == (2, 0)
    assert scorer.block(none, Embedding(v)).shape == (0, 2)


@interpreted
@pytest.mark.parametrize("texts", [3, 30])
def test_interpreted_topk_of_both_directions(texts: int) -> None:
    v, t, scorer = unit(11, seed=1), unit(texts, seed=2), KernelScorer(method(20), dtype=HALF, rows=4)
    scores, both = scorer.block(v, t), scorer.topk(v, t, k=5)
    for one, matrix, direction in zip(both, (scores, scores.T), DIRECTIONS, strict=True):
        other, (alone,) = stable_topk(matrix, 5), scorer.topk(v, t, k=5, directions=[direction])
        assert torch.equal(one.score, other.score)
        assert torch.equal(one.index, other.index)
        assert torch.equal(alone.index, other.index)


@interpreted
def test_interpreted_streams_have_the_kernels_blocks() -> None:
    """Long rows come in smaller blocks; a few texts scale the weights, for they would leave most of a tile empty."""
    v, t = unit(4, seed=1), unit(66, seed=2)
    scorer = KernelScorer(method(20), dtype=HALF, rows=3)
    blocks, whole = list(scorer.stream(v, t)), scorer.block(v, t)
    assert [len(block) for block in blocks] == [3, 1]
    assert torch.equal(torch.cat(blocks), whole)
    assert torch.equal(scorer.block(t, v), whole.T)  # the shorter side scales the weights either way
    (few,) = scorer.stream(t, v)
    assert torch.equal(few, whole.T)
    short = KernelScorer(method(20), dtype=HALF, pairs=140)
    assert [block.shape for block in short.stream(v, t)] == [(2, 66), (2, 66)]
    assert [block.shape for block in short.stream(t, v)] == [(35, 4), (31, 4)]
    torch.testing.assert_close(torch.cat(list(short.stream(t, v))), whole.T, atol=1e-6, rtol=1e-6)


@interpreted
def test_interpreted_a_tile_without_room_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vacsr.kernels import scores

    v, t = unit(4, seed=1), unit(70, seed=2)
    scorer, plain = KernelScorer(method(20), dtype=HALF), BlockScorer(method(20), dtype=HALF)
    full = scores.OutOfResources(300_000, 232_448, "shared memory")
    monkeypatch.setattr(scores, "score_pairs", Mock(side_effect=full))
    with pytest.warns(UserWarning, match="in torch"):
        fallback = scorer.block(v, t)
    assert torch.equal(fallback, plain.block(v, t))
    assert torch.equal(torch.cat(list(scorer.stream(v, t))), fallback)  # neither tries nor warns again
    assert scores.score_pairs.call_count == 1


def scaled(part: str, factor: float) -> Vacsr:
    made = method(20)
    with torch.no_grad():
        getattr(made.adapter.trunk, part).mul_(factor)
    return made


@interpreted
def test_interpreted_choice() -> None:
    """By the rule of a GPU; the kernel itself is interpreted, so everything lies on the CPU."""

    def chosen(made: Vacsr, dtype: Precision) -> tuple[type[Engine], torch.dtype]:
        engine = choose_engine(made, device=CUDA, dtype=dtype)
        return type(engine), engine.dtype

    assert chosen(method(20), torch.float32) == (Cascade, torch.float32)
    assert chosen(method(20), "auto") == (KernelScorer, HALF)
    for dtype in (torch.bfloat16, HALF):
        assert chosen(method(20), dtype) == (KernelScorer, dtype)
    assert chosen(method(20), FP8) == (Cascade, FP8)
    for part in ("weight", "bias"):
        assert chosen(scaled(part, 1e6), "auto") == (KernelScorer, torch.bfloat16)
    head = Vacsr(VacsrConfig(adapter=AdapterConfig(mixing="head")), dim=20)
    assert chosen(head, "auto") == chosen(head, torch.float32) == (BlockScorer, torch.float32)
    assert chosen(head, torch.bfloat16) == (BlockScorer, torch.bfloat16)
    assert chosen(method(20, width=150), HALF) == (BlockScorer, HALF)
    for made in (method(20, width=150), InfoNCE(InfoNCEConfig(), dim=20)):
        with pytest.raises(UsageError, match=r"use .*BlockScorer"):
            KernelScorer(made, dtype=HALF)


@interpreted
@pytest.mark.parametrize("factor", [1e6, 1e-9])
@every_dtype
def test_interpreted_decoder_units_of_any_size(dtype: torch.dtype, factor: float) -> None:
    """Scaled by a power of two, which is taken back exactly: the scores are those of the unscaled decoder."""
    plain, v, t = method(20, residual=False), unit(4, seed=1), unit(30, seed=2)
    made, two = method(20, residual=False), 2.0 ** torch.tensor(factor).log2().round()
    with torch.no_grad():
        for part in (made.adapter.decoder[0].weight, made.adapter.decoder[0].bias):
            part[::2] *= two
        made.adapter.decoder[2].weight[:, ::2] /= two
    scores = KernelScorer(made, dtype=dtype).block(v, t)
    torch.testing.assert_close(scores, KernelScorer(plain, dtype=dtype).block(v, t), atol=1e-5, rtol=1e-5)


def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert kernel.available(cpu) == kernels.TRITON
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not kernel.available(cpu)
    for dtype in (torch.float32, torch.bfloat16, HALF):
        plain = choose_engine(method(20), device=CUDA, dtype=dtype)
        assert type(plain) is BlockScorer
        assert plain.dtype == dtype
    assert choose_engine(method(20), device=CUDA, dtype="auto").dtype == HALF
    with pytest.raises(EnvironmentProblem, match="BlockScorer"):
        choose_engine(method(20), device=CUDA, dtype=FP8)
    monkeypatch.setattr(kernels, "TRITON", False)
    assert not kernel.available(CUDA)


# --------------------------------------------------------------------------------------------------------- on a GPU


class Case(NamedTuple):
    """What is compiled once; everything that a GPU can show of it is asked in one test."""

    dtype: torch.dtype
    images: int
    texts: int
    dim: int
    hidden: int
    width: int
    residual: bool
    plain: bool = False  # also without TMA, as on older GPUs


CASES = [
    Case(torch.bfloat16, 300, 1000, 1024, 1024, 16, True, plain=True),
    Case(torch.bfloat16, 9, 700, 512, 2048, 0, False),
    Case(HALF, 3, 130, 200, 300, 0, True, plain=True),
    Case(HALF, 1, 1, 5, 7, 100, True),
    Case(HALF, 4, 150, 300, 384, 100, False),
    Case(FP8, 9, 700, 512, 512, 16, True, plain=True),
    Case(FP8, 3, 130, 100, 300, 0, False),
]


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gpu_scores(case: Case) -> None:
    made = method(case.dim, hidden=case.hidden, width=case.width, residual=case.residual, device="cuda")
    v, t = (units(n, case.dim, seed=n, device="cuda") for n in (case.images, case.texts))
    scorer = KernelScorer(made, dtype=case.dtype)
    scores = scorer.block(Embedding(v), Embedding(t))
    assert scorer._fits, "the rule chose a tile that the GPU has no room for"
    few = slice(None, 8)
    reference, bound = (exact(made.adapter, v[few], t[few], absolute=flag) for flag in (False, True))
    assert bool(((scores[few, few] - reference).abs() <= 4.2 * ROUNDINGS[case.dtype] * bound + 1e-3).all())
    if case.images > 1:
        assert spread_error(scores, BlockScorer(made).block(Embedding(v), Embedding(t))) < STATED[case.dtype]
    if case.plain:
        other = scorer.tile._replace(warps=8, stages=3, split=False)
        for tile in (other, other._replace(tma=False)):
            same = KernelScorer(made, dtype=case.dtype, tile=tile).block(Embedding(v), Embedding(t))
            torch.testing.assert_close(same, scores, atol=1e-4, rtol=1e-4)
    hit = torch.zeros(len(v), len(t), dtype=torch.bool, device="cuda")
    if len(v) > 1:  # NaN stays with its image and its text
        v[1, 3], t[35, 2] = torch.nan, torch.nan
        hit[1], hit[:, 35] = True, True
    assert torch.equal(scorer.block(Embedding(v), Embedding(t)).isnan(), hit)


@on_gpu
def test_gpu_operators_in_a_cuda_graph() -> None:
    scorer = KernelScorer(method(256, hidden=256, width=16, device="cuda"), dtype=HALF)
    v, t = units(40, 256, seed=1, device="cuda"), units(500, 256, seed=2, device="cuda")
    expected = scorer.block(Embedding(v), Embedding(t))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        texts, out = [scorer._pack_texts(t)], torch.zeros_like(expected)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            scorer._write(v, t, texts, out)
    graph.replay()
    assert torch.equal(out, expected)


# ------------------------------------------------------------------------------------------------- the rules for a GPU


@pytest.mark.parametrize(("units", "width"), [(0, 0), (1, 16), (16, 16), (17, 32), (100, 128)])
def test_decoder_width(units: int, width: int) -> None:
    assert decoder_width(method(20, width=units).adapter.fold()) == width


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), *, shared: int = 232_448
) -> None:
    """What is asked of a GPU's properties, an H200's by default."""
    memory = {"total_memory": 140 << 30, "L2_cache_size": 60 << 20, "shared_memory_per_block_optin": shared}
    properties = SimpleNamespace(multi_processor_count=132, **memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def test_rules_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    for size, images in ((2 << 20, 264), (5 << 20, 132), (64 << 20, 16), (2 << 30, 1)):
        assert kernel.images_at_a_time(size, CUDA) == images
    for tiles, size, together in ((196, 256 << 10, 66), (1, 256 << 10, 1), (5, 1 << 30, 1)):
        assert kernel.text_tiles_together(tiles, size, CUDA) == together


@pytest.mark.parametrize(
    ("hidden", "width", "dtype", "expected"),
    [
        (1024, 16, torch.bfloat16, Tile(128, 256, 64, warps=4, stages=4, run=8, split=True)),
        (1024, 32, FP8, Tile(128, 256, 128, warps=4, stages=3, run=8, split=True)),
        (8192, 16, torch.bfloat16, Tile(128, 256, 64, stages=3)),  # no room for the whole decoder
        (1024, 0, FP8, Tile(128, 256, 128, stages=3)),
        (384, 16, torch.bfloat16, Tile(128, 128, 64, stages=3)),
        (1024, 128, torch.bfloat16, Tile(128, 128, 64, stages=3)),
    ],
)
def test_the_tile_for_a_gpu(
    hidden: int, width: int, dtype: torch.dtype, expected: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "has_gluon", lambda: True)
    assert choose_tile(hidden, width, dim=1024, dtype=dtype, device=CUDA) == expected
    monkeypatch.setattr(kernels, "has_gluon", lambda: False)
    assert not choose_tile(hidden, width, dim=1024, dtype=dtype, device=CUDA).split
    pretend_gpu(monkeypatch, (8, 0))
    assert not choose_tile(hidden, width, dim=1024, dtype=dtype, device=CUDA).tma


@pytest.mark.parametrize(("capability", "room"), [((8, 0), 166_912), ((8, 9), 101_376), ((9, 0), 232_448)])
@pytest.mark.parametrize("dtype", [HALF, FP8])
def test_some_tile_fits_any_adapter(
    capability: tuple[int, int], room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability, shared=room)
    for width, hidden, dim in itertools.product((0, 16, 32, 64, 128), (7, 256, 384, 1024), (5, 64, 128, 1024)):
        tile = choose_tile(hidden, width, dim=dim, dtype=dtype, device=CUDA)
        assert shared_bytes(tile, width, dim=dim, hidden=hidden, itemsize=dtype.itemsize) <= room


# ------------------------------------------------------------------------------------------------ compiled for Hopper

compiles = pytest.mark.skipif(INTERPRETED or not kernels.TRITON, reason="needs Triton's compiler")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@compiles
@pytest.mark.parametrize(
    ("kind", "width", "tile", "dim"),
    [
        ("bf16", 16, Tile(), 1024),
        ("fp16", 128, Tile(hidden=128), 64),
        slow("bf16", 0, Tile(stages=3, tma=False), 1024),
        slow("bf16", 32, Tile(), 64),
        slow("bf16", 128, Tile(hidden=128, stages=3, tma=False), 64),
        slow("fp16", 128, Tile(hidden=128), 1024),
        slow("fp8e4nv", 0, Tile(depth=128), 1024),
        slow("fp8e4nv", 16, Tile(depth=128), 1024),
        slow("fp8e4nv", 128, Tile(hidden=128, depth=128), 128),
    ],
)
def test_compiled_for_hopper(kind: str, width: int, tile: Tile, dim: int, tmp_path: Path) -> None:
    """Shared memory is as estimated, also where one step covers d and the decoder's matrix is loaded ahead too.

    Matrix units are used, and one product may still run when the next is started: the loop is not serialised.
    """
    from vacsr.kernels import scores

    gain = kind == "fp8e4nv"
    blocks = [f"tensordesc<{kind}[{rows}, {tile.depth}]>" if tile.tma else f"*{kind}" for rows in tile[:2]]
    small = "*fp32" if not width else "*bf16" if gain else f"*{kind}"
    kinds = {
        "texts": blocks[0], "weights": blocks[1], "decoder": small, "constant": "fp32",
        **dict.fromkeys(("edge", "last", "gain", "out"), "*fp32"),
        **dict.fromkeys(("images", "T", "tiles", "group"), "i32"),
    }  # fmt: skip
    constants = {
        "H": max(dim, tile.hidden), "D": dim, "WIDE": width, "ADD": width > 0, "GAIN": gain,
        "BT": tile.texts, "BH": tile.hidden, "BD": tile.depth, "RUN": tile.run, "TMA": tile.tma, "WIDEN": False,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiled_for_hopper(scores.score_kernel, kinds, constants, tmp_path, **options)
    estimate = shared_bytes(tile, width, dim=dim, hidden=dim, itemsize=1 if gain else 2)
    assert estimate - 8192 <= made.metadata.shared <= estimate
    ptx = made.asm["ptx"]
    assert ("cp.async.bulk.tensor" in ptx) == tile.tma
    if dim > tile.depth:
        loop = ptx.split("wgmma.mma_async", 1)[1]
        assert "wgmma.wait_group.sync.aligned \t1" in loop or "wgmma.wait_group.sync.aligned 1" in loop


@compiles
@pytest.mark.skipif(not kernels.TRITON or not kernels.has_gluon(), reason="needs Gluon")
@pytest.mark.parametrize(
    ("dtype", "width", "dim", "stages"),
    [(torch.bfloat16, 16, 1024, 4), slow(HALF, 32, 64, 3), slow(FP8, 16, 1024, 4)],
)
def test_split_kernel_compiled_for_hopper(
    dtype: torch.dtype, width: int, dim: int, stages: int, tmp_path: Path
) -> None:
    """No number is spilled, products do not wait for one another, and shared memory is as estimated."""
    from triton.backends.nvidia.compiler import get_ptxas

    from vacsr.kernels import hopper

    tile = Tile(128, 256, 128 // dtype.itemsize, warps=4, stages=stages, split=True)
    names = {torch.bfloat16: "bf16", HALF: "fp16", FP8: "fp8e4nv"}

    def block(dtype: torch.dtype, *shape: int) -> str:
        return f"tensordesc<{names[dtype]}{[*shape]},{hopper.shared_layout(dtype, *shape)!r}>"

    kinds = {
        "texts": block(dtype, hopper.GROUP, tile.depth), "weights": block(dtype, tile.hidden, tile.depth),
        "decoder": block(torch.bfloat16 if dtype == FP8 else dtype, tile.hidden, width), "constant": "fp32",
        **dict.fromkeys(("edge", "last", "gain", "out"), "*fp32"),
        **dict.fromkeys(("images", "T", "tiles", "group"), "i32"),
    }  # fmt: skip
    constants = {"H": 1024, "D": dim, "ADD": True, "GAIN": dtype == FP8, "RUN": tile.run, "STAGES": stages}
    made = compiled_for_hopper(hopper.split_kernel, kinds, constants, tmp_path, num_warps=tile.warps)
    estimate = shared_bytes(tile, width, dim=dim, hidden=1024, itemsize=dtype.itemsize)
    assert estimate - 2048 <= made.metadata.shared <= estimate
    source = tmp_path / "kernel.ptx"
    source.write_text(made.asm["ptx"], encoding="utf-8")
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


@compiles
@pytest.mark.parametrize("kind", ["bf16", "fp8e4nv"])
def test_the_scaling_kernel_compiles(kind: str, tmp_path: Path) -> None:
    from vacsr.kernels import scores

    kinds = {"trunk": "*fp32", "values": "*fp32", "out": f"*{kind}", "images": "i32"}
    constants = {"H": 1024, "D": 1024, "RUN": 8, "ROWS": 32, "COLS": 64}
    ptx = compiled_for_hopper(scores.scale_kernel, kinds, constants, tmp_path, num_warps=4).asm["ptx"]
    assert ("e4m3" in ptx) == (kind == "fp8e4nv")
