"""What the scoring kernel needs beside itself: ordered keys, ranking errors, the choice of tiles, compilation."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from vacsr.scoring import kernel_tiles
from vacsr.scoring.kernel_error import ranking_error, topk_overlap
from vacsr.scoring.kernel_pack import pass_width
from vacsr.scoring.kernel_tiles import (
    Tile,
    candidates,
    fastest,
    images_at_a_time,
    shared_bytes,
    text_tiles_together,
)
from vacsr.scoring.kernel_topk import from_keys, order_keys, topk_both

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
HARD = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan, -math.nan]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Many ties, and every kind of number that has an order of its own."""
    rows, cols = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    flat = draw(st.lists(st.sampled_from(HARD), min_size=rows * cols, max_size=rows * cols))
    return torch.tensor(flat, dtype=torch.float32).view(rows, cols)


def by_sorting(scores: Tensor, k: int) -> list[list[int]]:
    """NaN first, as torch has it, then by (−score, index)."""

    def place(row: list[float], j: int) -> tuple[bool, float, int]:
        nan = math.isnan(row[j])
        return not nan, 0.0 if nan else -row[j], j

    return [sorted(range(len(row)), key=lambda j, row=row: place(row, j))[:k] for row in scores.tolist()]


@PROPERTY
@given(matrices(), st.integers(1, 9), st.integers(1, 4))
def test_topk_both_is_the_full_sort(scores: Tensor, k: int, step: int) -> None:
    found = topk_both((scores[i : i + step] for i in range(0, len(scores), step)), k)
    for top, matrix in ((found.texts, scores), (found.images, scores.T)):
        assert top.index.tolist() == by_sorting(matrix, k)
        torch.testing.assert_close(top.score, matrix.gather(1, top.index), atol=0, rtol=0, equal_nan=True)


@PROPERTY
@given(matrices(), st.integers(0, 2**32 - 1))
def test_keys_hold_score_and_index(scores: Tensor, index: int) -> None:
    back = from_keys(order_keys(scores, torch.full(scores.shape, index)))
    assert back.index.eq(index).all()
    torch.testing.assert_close(back.score, scores, atol=0, rtol=0, equal_nan=True)


def test_ranking_error_is_kendalls_tau_and_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(5, 60, generator=generator)
    scores = reference + 0.5 * torch.randn(5, 60, generator=generator)
    error = ranking_error(scores, reference, k=7)
    taus = [stats.kendalltau(a, b).statistic for a, b in zip(scores.numpy(), reference.numpy(), strict=True)]
    assert error.tau == pytest.approx(sum(taus) / 5, abs=1e-6)
    shared = [len({*a[:7]} & {*b[:7]}) for a, b in zip(by_sorting(scores, 7), by_sorting(reference, 7), strict=True)]
    assert error.overlap == pytest.approx(sum(shared) / 35)
    assert ranking_error(reference, reference) == (1.0, 1.0)
    assert ranking_error(-reference, reference).tau == pytest.approx(-1.0)
    assert topk_overlap(torch.tensor([[0, 1]]), torch.tensor([[2, 3]])) == 0.0


@pytest.mark.parametrize(("units", "width"), [(1, 16), (16, 16), (17, 32), (100, 128), (150, 128)])
def test_pass_width(units: int, width: int) -> None:
    assert pass_width(units) == width


def test_the_fastest_tile_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [Tile(stages=stages) for stages in (2, 3, 4)]
    tried: list[Tile] = []

    def timed(_run: object, tile: Tile) -> float | None:
        tried.append(tile)
        return {2: None, 3: 5.0, 4: 7.0}[tile.stages]

    monkeypatch.setattr(kernel_tiles, "_HELD", {})
    monkeypatch.setattr(kernel_tiles, "_timed", timed)
    assert fastest(tiles, ("key",), lambda _: None) == tiles[1]
    assert fastest(tiles, ("key",), lambda _: None) == tiles[1]
    assert tried == tiles
    assert fastest(tiles[:1], ("no room for any",), lambda _: None) == tiles[0]


class _Gpu:
    """What is asked of a GPU's properties."""

    total_memory, multi_processor_count, L2_cache_size = 140 << 30, 132, 60 << 20
    shared_memory_per_block_optin = 232_448


def test_rules_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = torch.device("cuda")
    assert images_at_a_time(2 << 20, gpu) == 264
    assert images_at_a_time(5 << 20, gpu) == 132
    assert images_at_a_time(64 << 20, gpu) == 16
    assert images_at_a_time(2 << 30, gpu) == 1
    assert text_tiles_together(196, 256 << 10, gpu) == 66
    assert text_tiles_together(1, 256 << 10, gpu) == 1
    assert text_tiles_together(5, 1 << 30, gpu) == 1


def _shapes(hidden: int, width: int, dim: int, dtype: torch.dtype) -> set[tuple[int, ...]]:
    return {tile[:3] for tile in candidates(hidden, width, dim=dim, dtype=dtype, device=torch.device("cuda"))}


def test_tiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape each: padding must not depend on the choice."""
    half, low = torch.bfloat16, torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert _shapes(1024, 16, 1024, half) == {(128, 256, 64)}
    assert _shapes(1024, 0, 1024, low) == {(128, 256, 128)}
    assert _shapes(384, 16, 1024, half) == {(128, 128, 64)}
    assert _shapes(1024, 128, 1024, half) == {(128, 128, 64)}
    first = candidates(1024, 16, dim=1024, dtype=half, device=torch.device("cuda"))[0]
    assert (first.stages, first.tma) == (4, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    found = candidates(1024, 16, dim=1024, dtype=half, device=torch.device("cuda"))
    assert not any(tile.tma for tile in found)


@pytest.mark.parametrize(("capability", "room"), [((8, 0), 166_912), ((8, 9), 101_376), ((9, 0), 232_448)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_some_tile_fits_any_adapter(
    capability: tuple[int, int], room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Gpu, "shared_memory_per_block_optin", room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for units in (0, 1, 16, 20, 33, 64, 100, 150, 5000):
        width = pass_width(units) if units else 0
        for hidden in (7, 256, 384, 1024):
            for dim in (5, 64, 128, 1024):
                found = candidates(hidden, width, dim=dim, dtype=dtype, device=torch.device("cuda"))
                assert found
                assert len({tile[:3] for tile in found}) == 1
                assert all(shared_bytes(tile, width, dim=dim, itemsize=dtype.itemsize) <= room for tile in found)


def _compiled(name: str, signature: dict[str, str], constants: dict[str, object], **options: int) -> Any:
    """The kernel for a Hopper GPU, which need not be there."""
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from triton.backends.compiler import GPUTarget

    from vacsr.scoring import kernel_triton

    function = getattr(kernel_triton, name)
    order = function.arg_names
    kinds = {arg: signature.get(arg, "constexpr") for arg in order}
    fixed = {(order.index(arg),): value for arg, value in constants.items()}
    aligned = {(order.index(arg),): [["tt.divisibility", 16]] for arg, kind in kinds.items() if kind[0] == "*"}
    source = triton.compiler.ASTSource(fn=function, signature=kinds, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "enable_fp_fusion": True})


def _scoring_kernel(kind: str, width: int, tile: Tile, *, dim: int) -> Any:
    """Compiled for an adapter whose trunk is as high as it is wide."""
    blocks = [f"tensordesc<{kind}[{rows}, {tile.depth}]>" if tile.tma else f"*{kind}" for rows in tile[:2]]
    small = "bf16" if kind == "fp8e4nv" else kind
    signature = {
        "texts": blocks[0], "weights": blocks[1], "edge": "*fp32", "decoder": f"*{small}" if width else "*fp32",
        "last": "*fp32", "gain": "*fp32", "out": "*fp32", "images": "i32", "T": "i32", "tiles": "i32", "group": "i32",
        "constant": "fp32", "slope": "fp32",
    }  # fmt: skip
    constants = {
        "H": max(dim, tile.hidden), "D": dim, "WIDE": width, "RESIDUAL": width > 0, "GAIN": kind == "fp8e4nv",
        "BT": tile.texts, "BH": tile.hidden, "BD": tile.depth, "RUN": tile.run, "TMA": tile.tma, "WIDEN": False,
    }  # fmt: skip
    return _compiled("score_pairs", signature, constants, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("kind", "width", "tile"),
    [
        ("bf16", 16, Tile()),
        pytest.param("bf16", 0, Tile(stages=3, tma=False), marks=pytest.mark.slow),
        pytest.param("fp8e4nv", 0, Tile(depth=128), marks=pytest.mark.slow),
        pytest.param("fp8e4nv", 16, Tile(depth=128), marks=pytest.mark.slow),
        pytest.param("fp16", 128, Tile(hidden=128), marks=pytest.mark.slow),
    ],
)
def test_compiled_for_hopper_products_run_ahead(
    kind: str, width: int, tile: Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix units are used, and one product may still run when the next is started: the loop is not serialised."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = _scoring_kernel(kind, width, tile, dim=1024)
    loop = made.asm["ptx"].split("wgmma.mma_async", 1)[1]
    assert "wgmma.wait_group.sync.aligned \t1" in loop or "wgmma.wait_group.sync.aligned 1" in loop
    assert ("cp.async.bulk.tensor" in made.asm["ptx"]) == tile.tma
    estimate = shared_bytes(tile, width, dim=1024, itemsize=1 if kind == "fp8e4nv" else 2)
    assert estimate - 8192 <= made.metadata.shared <= estimate


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("kind", "width", "tile"),
    [
        ("fp16", 128, Tile(hidden=128)),
        pytest.param("bf16", 32, Tile(), marks=pytest.mark.slow),
        pytest.param("bf16", 128, Tile(hidden=128, stages=3, tma=False), marks=pytest.mark.slow),
        pytest.param("fp8e4nv", 128, Tile(hidden=128, depth=128), marks=pytest.mark.slow),
    ],
)
def test_one_step_deep_the_decoder_is_loaded_ahead_too(
    kind: str, width: int, tile: Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the estimate must know: then it takes as many copies of the decoder's matrix as there are stages."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = _scoring_kernel(kind, width, tile, dim=tile.depth).metadata.shared
    estimate = shared_bytes(tile, width, dim=tile.depth, itemsize=1 if kind == "fp8e4nv" else 2)
    assert estimate - 8192 <= used <= estimate


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kind", ["bf16", "fp8e4nv"])
def test_the_scaling_kernel_compiles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"trunk": "*fp32", "values": "*fp32", "out": f"*{kind}", "images": "i32"}
    constants = {"H": 1024, "D": 1024, "RUN": 8, "ROWS": 32, "COLS": 64}
    ptx = _compiled("scale_trunk", signature, constants, num_warps=4).asm["ptx"]
    assert ("e4m3" in ptx) == (kind == "fp8e4nv")
