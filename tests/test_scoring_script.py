"""benchmarks/scoring.py on a CPU at a small size: what it stores, and that one way's failure is only its own."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vacsr.scoring.folded import BlockScorer

ROOT = Path(__file__).parents[1]
SIZE = ["--device", "cpu", "--images", "20", "--texts", "45", "--dim", "16", "--edge", "32", "--rounds", "2"]


def load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("vacsr.bench.ceilings._PAUSE_S", 0.0)
    yield load("scoring_script", "benchmarks/scoring.py")
    for name in ("_scoring_ways", "_scoring_rankings"):
        sys.modules.pop(name, None)


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str, folder: Path) -> dict[str, Any]:
    file = folder / "scoring.json"
    monkeypatch.setattr(sys, "argv", ["scoring.py", *SIZE, "--json", str(file), "--only", *words])
    script.main()
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_rows_rounds_ceilings_and_shares(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(script, monkeypatch, "cuBLAS", "folded torch 16-wide", "paper-style", folder=tmp_path)
    assert found["schema"] == 2
    assert found["settings"] == {"images": 20, "texts": 45, "dim": 16, "edge": 32}
    assert found["compared"] == {"images": 20, "texts": 45, "k": 10}
    rows = {(row["way"], row["dtype"]): row for row in found["rows"]}
    assert not [row for row in rows.values() if "error" in row]
    assert len(rows) == 7
    work = 2 * 20 * 45 * 16 * 16
    trunk, square = (
        rows[f"cuBLAS: {name}", "bf16"] for name in ("the trunk's products", "products of 32³, back to back")
    )
    papers = rows[script.PAPERS, "fp32"]
    assert (trunk["rounds"], papers["rounds"]) == (2, 1)
    best = max(trunk["tflops"], square["tflops"])
    for (way, dtype), row in rows.items():
        assert len(row["times"]) == row["rounds"]
        assert row["seconds"] == statistics.median(row["times"])
        done = 2 * 32**3 * round(work / (2 * 32**3)) if "32³" in way else work
        assert row["tflops"] == pytest.approx(done / row["seconds"] / 1e12)
        assert row["x_ceiling"] == pytest.approx(row["tflops"] / trunk["tflops"])
        assert row["x_sustained"] == pytest.approx(row["tflops"] / best)
        assert row["x_fp32"] == pytest.approx(row["tflops"] / papers["tflops"])
        assert (row["x_own_sustained"] == row["x_sustained"]) == (dtype != "fp8")
    names = [(row["name"], row["dtype"], row["sustained"]) for row in found["ceilings"]]
    assert names[:3] == [
        ("the trunk's products", "bf16", True),
        ("products of 32³, back to back", "bf16", True),
        ("one product of 32³, alone, after a pause", "bf16", False),
    ]
    lines = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {f"| {square['way']}", "| products of 32³, back to back", f"| {papers['way']}"} <= set(lines)


def test_a_way_that_fails_is_a_row_that_says_why(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []

    def in_its_second_round() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def at_once(_: object) -> Any:
        raise ValueError("cannot compile\nat line 7")

    some = [way for way in script.ways(32) if way.name == "folded torch"]
    bad = [
        some[0]._replace(name="folded torch, bad", make=at_once),
        some[0]._replace(name="folded torch, full", make=lambda _: script.Runner(in_its_second_round)),
        some[0]._replace(name="folded torch, slow", make=at_once, slow=True),
    ]
    monkeypatch.setattr(script, "ways", lambda _: [*bad, *some])
    monkeypatch.setattr(script, "rankings", at_once)
    found = run(script, monkeypatch, "folded", folder=tmp_path)
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["folded torch, bad"]["error"] == rows["folded torch, slow"]["error"] == "cannot compile"
    assert rows["folded torch, full"]["error"] == "out of memory"
    assert [row["rounds"] for row in found["rows"] if row["way"] == "folded torch"] == [2, 2]
    assert found["rankings"]["fp8 against fp32"] == {"error": "cannot compile"}
    assert "folded torch, bad (cannot compile)" in script.tables(found)


def test_slow_rows_are_not_timed_again(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "SLOW_S", 0.0)
    found = run(script, monkeypatch, "folded torch 16-wide", folder=tmp_path)
    assert [row["rounds"] for row in found["rows"]] == [1]


def test_what_is_known_is_written_before_the_end(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(_: object) -> Any:
        raise KeyboardInterrupt

    some = [way for way in script.ways(32) if way.name == "folded torch"]
    monkeypatch.setattr(script, "ways", lambda _: [*some, some[0]._replace(make=stopped, slow=True)])
    with pytest.raises(KeyboardInterrupt):
        run(script, monkeypatch, "folded", folder=tmp_path)
    found = json.loads((tmp_path / "scoring.json").read_text(encoding="utf-8"))
    assert [row["rounds"] for row in found["rows"]] == [2, 2]


class Coarse(BlockScorer):
    """Scores with few values, whatever the precision asked for."""

    def __init__(self, method: Any, *, dtype: torch.dtype) -> None:
        super().__init__(method)

    def block(self, v: Any, t: Any) -> torch.Tensor:
        return (3 * super().block(v, t)).round() / 3


@torch.inference_mode()
def test_rankings_are_of_all_items(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernel, against lists sorted one by one."""
    rank: Any = sys.modules["_scoring_rankings"]
    monkeypatch.setattr(rank, "QUERIES", 3)
    monkeypatch.setattr(rank, "TOP", 4)
    p = script.problem(20, 45, 16, device=torch.device("cpu"))
    monkeypatch.setattr(rank, "KernelScorer", Coarse)
    engines = {rank.FP8: Coarse, torch.float32: BlockScorer}
    monkeypatch.setattr(rank, "choose_engine", lambda made, *, device, dtype: engines[dtype](made, dtype=dtype))
    found = rank.rankings(p)
    exact, rough = BlockScorer(p.methods["16-wide"]), Coarse(p.methods["16-wide"], dtype=torch.float16)
    v, t = rank.Embedding(p.v), rank.Embedding(p.t)
    matrices = [scorer.block(v, t).tolist() for scorer in (exact, rough)]
    for key, queries in (
        ("overlap", [[m[i] for m in matrices] for i in range(3)]),
        ("overlap_images", [[[row[j] for row in m] for m in matrices] for j in range(3)]),
    ):
        kept = 0
        for pair in queries:
            best = [set(sorted(range(len(row)), key=lambda i, row=row: -row[i])[:4]) for row in pair]  # type: ignore[misc]
            kept += len(best[0] & best[1])
        assert kept < 12
        assert found["fp16 against fp32"][key] == pytest.approx(kept / 12)
    assert found["default topk against fp32"] == {"overlap": 1.0, "overlap_images": 1.0}
    rough_ones = {key: found["fp16 against fp32"][key] for key in ("overlap", "overlap_images")}
    assert found["fp8 rescored against fp32"] == rough_ones


def test_the_tables_fit_the_page(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is printed, pasted into the page, passes the page's own test."""
    found = run(script, monkeypatch, "cuBLAS", "folded torch 16-wide", "paper-style", folder=tmp_path)
    for place, row in enumerate(found["rows"]):
        row["seconds"] = 0.1 + 0.01 * place
    figures = {"overlap": 0.98765, "overlap_images": 0.99912, "tau": 0.91234, "rms_over_std": 0.05678}
    found["rankings"] = {f"{name} against fp32": figures for name in script.SCORES}
    page: Any = load("performance_page", "tests/scoring/test_performance_page.py")
    page.SECTION, page.STORED = script.tables(found), found
    page.test_scoring_on_a_gpu()
    page.test_ceilings_and_rounds_on_a_gpu()
    page.test_rankings_on_a_gpu()
    found["rankings"]["fp8 against fp32"] = {**figures, "tau": 0.8}
    with pytest.raises(AssertionError):
        page.test_rankings_on_a_gpu()


def test_no_gpu_is_said(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script.kernel, "available", lambda _: False)
    monkeypatch.setattr(sys, "argv", ["scoring.py"])
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == 3
    assert "there is none here" in capsys.readouterr().err
