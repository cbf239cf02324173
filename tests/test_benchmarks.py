"""The scripts of benchmarks/ on a machine without a GPU: what they need, and `scoring.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.bench import Prepared
from vacsr.bench.scoring import random_problem
from vacsr.scoring import BlockScorer

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"
SIZE = ["--device", "cpu", "--images", "20", "--texts", "45", "--dim", "16", "--edge", "32", "--rounds", "2"]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("abstain", 0, "nothing to do without them"),
        ("audit", 0, "nothing to do without them"),
        ("averaged_runs", 0, "nothing to do without them"),
        ("readings", 0, "nothing to do without them"),
        ("fused_latents", 3, "CUDA GPU"),
        ("gpo", 3, "CUDA GPU"),
        ("image_step", 3, "CUDA GPU"),
        ("scoring", 3, "CUDA GPU"),
    ],
)
def test_a_script_without_what_it_needs(
    name: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: object = 0
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    except SystemExit as error:
        found = error.code
    told = capsys.readouterr()
    assert (found, said in told.out + told.err) == (code, True)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("scoring_script", SCRIPTS / "scoring.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str, folder: Path) -> dict[str, Any]:
    file = folder / "scoring.json"
    monkeypatch.setattr(sys, "argv", ["scoring.py", *SIZE, "--json", str(file), "--only", *words])
    script.main()
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def test_scoring_rows_ceilings_and_ratios(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(script, monkeypatch, "cuBLAS", "folded torch 16-wide", "paper-style", folder=tmp_path)
    assert result["settings"] == {"images": 20, "texts": 45, "dim": 16, "edge": 32}
    assert result["compared"] == {"images": 20, "texts": 45, "k": 10}
    rows = {(row["way"], row["dtype"]): row for row in result["rows"]}
    assert not [row for row in rows.values() if "problem" in row]
    assert len(rows) == 7
    work = 2 * 20 * 45 * 16 * 16
    squares = "cuBLAS: products of 32³, back to back"
    trunk, paper = rows["cuBLAS: the trunk's products", "bf16"], rows[script.PAPER, "fp32"]
    best = max(trunk["tflops"], rows[squares, "bf16"]["tflops"])
    for (way, dtype), row in rows.items():
        assert row["seconds"] == row["median"]
        done = 2 * 32**3 * round(work / (2 * 32**3)) if way == squares else work
        assert row["tflops"] == pytest.approx(done / row["seconds"] / 1e12)
        assert row["x_ceiling"] == pytest.approx(row["tflops"] / trunk["tflops"])
        assert row["x_sustained"] == pytest.approx(row["tflops"] / best)
        assert row["x_fp32"] == pytest.approx(row["tflops"] / paper["tflops"])
        assert (row["x_own_sustained"] == row["x_sustained"]) == (dtype != "fp8")
    assert len(result["ceilings"]) == 4
    lines = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {f"| {squares}", "| products of 32³, back to back", f"| {paper['way']}"} <= set(lines)


def test_a_scoring_way_that_fails_says_why(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(_: object) -> Any:
        raise ValueError("cannot compile\nat line 7")

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    some = [way for way in script.ways(32) if way[0] == "folded torch"]
    full_way = Prepared(full, warm_up=lambda: None)
    ways = [
        ("folded torch, bad", "16-wide", "bf16", broken, ""),
        ("folded torch, full", "16-wide", "bf16", lambda _: full_way, ""),
        *some,
    ]
    monkeypatch.setattr(script, "ways", lambda _: ways)
    result = run(script, monkeypatch, "folded", folder=tmp_path)
    assert [row.get("problem") for row in result["rows"]] == ["cannot compile", "out of memory", None, None]
    assert "problem" in result["rankings"]["fp8 against fp32"], "no kernel without a GPU"
    assert "folded torch, bad (cannot compile)" in script.tables(result)


class Coarse(BlockScorer):
    """Scores with few values, whatever the precision."""

    def __init__(self, method: Any, *, dtype: torch.dtype) -> None:
        super().__init__(method, dtype=torch.float32)

    def block(self, v: Any, t: Any) -> torch.Tensor:
        return (3 * super().block(v, t)).round() / 3


@torch.inference_mode()
def test_rankings_are_of_all_items(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernel, against lists sorted one by one."""
    monkeypatch.setattr(script, "QUERIES", 3)
    monkeypatch.setattr(script, "TOP", 4)
    monkeypatch.setattr(script, "KernelScorer", Coarse)
    engines = {torch.float32: BlockScorer, torch.float8_e4m3fn: Coarse}
    monkeypatch.setattr(script, "choose_engine", lambda method, *, device, dtype: engines[dtype](method, dtype=dtype))
    problem = random_problem(20, 45, 16, device=torch.device("cpu"))
    result = script.rankings(problem)
    scorers = BlockScorer(problem.method), Coarse(problem.method, dtype=torch.float16)
    matrices = [scorer.block(problem.v, problem.t).tolist() for scorer in scorers]
    for key, queries in (
        ("overlap", [[m[i] for m in matrices] for i in range(3)]),
        ("overlap_images", [[[row[j] for row in m] for m in matrices] for j in range(3)]),
    ):
        same = 0
        for pair in queries:
            best = [set(sorted(range(len(row)), key=lambda i, row=row: -row[i])[:4]) for row in pair]  # type: ignore[misc]
            same += len(best[0] & best[1])
        assert same < 12
        assert result["fp16 against fp32"][key] == pytest.approx(same / 12)
    assert result["default topk against fp32"] == {"overlap": 1.0, "overlap_images": 1.0}
    coarse = {key: result["fp16 against fp32"][key] for key in ("overlap", "overlap_images")}
    assert result["fp8 rescored against fp32"] == coarse
    assert 0 < result["fp16 against fp32"]["tau"] < 1
