"""`vacsr bench`: every way is timed, failures stay with the way that failed, files are checked first."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.bench import BenchResult, Prepared, Way, measure, roofline, scoring
from vacsr.scoring import BlockScorer

CPU = torch.device("cpu")
SMALL = {"images": 3, "texts": 150, "dim": 16}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scoring.SIZES, "small", SMALL)


def timed(steps: dict[str, Any], **options: Any) -> dict[str, dict[str, Any]]:
    """Rows by name of ways that need no preparation."""
    ways = [Way({"way": name}, lambda run=run: Prepared(run)) for name, run in steps.items()]
    return {row["way"]: row for row in measure(ways, device=CPU, **options)}


def svg_texts(svg: str) -> list[str]:
    return [(text.text or "").strip() for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


# ------------------------------------------------------------------------------------------------------- stopwatch


def test_rounds_take_turns() -> None:
    """After one call of each; the first of a round only warms the caches."""
    seen: list[str] = []
    rows = timed({name: lambda name=name: seen.append(name) for name in "ab"}, rounds=2)
    assert seen == ["a", "b"] + ["a", "a", "b", "b"] * 2
    assert all(row["rounds"] == 2 and 0 <= row["seconds"] <= row["median"] for row in rows.values())
    assert timed({"a": lambda: None}, rounds=2, statistic=max)["a"]["seconds"] >= 0


def test_a_slow_way_is_timed_until_its_budget_is_used() -> None:
    calls: list[int] = []
    assert timed({"slow": lambda: calls.append(0)}, rounds=5, budget=0.0)["slow"]["rounds"] == 1
    assert len(calls) == 2


def test_a_way_that_fails_while_it_is_timed() -> None:
    calls: list[int] = []

    def full() -> None:
        calls.append(0)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    rows = timed({"full": full, "fine": lambda: None}, rounds=3)
    assert rows["full"] == {"way": "full", "problem": "out of memory"}
    assert (rows["fine"]["rounds"], len(calls)) == (3, 5)


# --------------------------------------------------------------------------------------------------------- scoring


def test_scoring_side_by_side() -> None:
    log: list[str] = []
    result = scoring.run(CPU, log=log.append)
    rows: dict[Any, Any] = {(row["way"], row["precision"]): row for row in result.rows}
    assert all(row.get("problem") is None for row in result.rows)
    paper = rows["the paper's: all heads, 128 × 128 pairs", "fp32"]
    assert {way for way, _ in rows} == {"bare product", paper["way"], "folded", "folded, top-10 both ways"}
    bare = rows["bare product", "float32"]
    assert bare["of_ceiling"] == paper["faster"] == 1
    for row in rows.values():
        assert row["tflops"] == pytest.approx(2 * 3 * 150 * 16 * 16 / row["seconds"] / 1e12)
        assert row["of_ceiling"] == pytest.approx(row["seconds"] / bare["seconds"])
        assert row["faster"] == pytest.approx(paper["seconds"] / row["seconds"])
    assert len(log) == len(rows) + 1  # all in turn


@torch.inference_mode()
def test_every_way_scores_the_same_pairs() -> None:
    """What is timed is what is checked, and all of it agrees."""
    problem = scoring.Problem(5, 140, 24, device=CPU)
    exact = problem.method.score(problem.v, problem.t)
    for way in (scoring.papers_way(problem, "fp32"), scoring.matrix(problem, BlockScorer, torch.float32)):
        torch.testing.assert_close(way.run(), exact, atol=1e-5, rtol=1e-5)
        assert (way.cells["error"] < 1e-5, way.cells["overlap"]) == (True, 1.0)
    shifted: Any = problem.errors(lambda v: problem.method.score(v, problem.t).flip(1))
    assert (shifted["error"] > 0.1, shifted["overlap"] < 1) == (True, True)


def test_a_way_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no such luck\nmore about it")

    monkeypatch.setattr(scoring, "papers_way", broken)
    result = scoring.run(CPU)
    assert [row["problem"] for row in result.rows if "problem" in row] == ["no such luck"]
    assert "128 × 128 pairs (no such luck) | fp32 | – |" in result.to_markdown()
    assert all(row["faster"] is None for row in result.rows if "seconds" in row)
    assert sum("seconds" in row for row in result.rows) == len(result.rows) - 1
    assert "no such luck" in svg_texts(result.to_svg())


# -------------------------------------------------------------------------------------------------------- roofline


def test_a_roofline_and_its_plot(monkeypatch: pytest.MonkeyPatch, vacsr: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(roofline.SIZES, "small", ((2, 30), (3, 70)))
    stored, drawn = tmp_path / "a.json", tmp_path / "a.svg"
    options = ("--dim", 8, "--dim", 16, "--device", "cpu", "--json", stored, "--figure", drawn)
    done = vacsr("bench", "roofline", *options)
    assert done.code == 0
    report = json.loads(stored.read_text(encoding="utf-8"))
    assert report["bench"] == "roofline"
    rows = report["rows"]
    assert not any(row.get("problem") for row in rows)
    assert {(row["d"], row["pairs"]) for row in rows if "d" in row} == {(d, n) for d in (8, 16) for n in (60, 210)}
    assert {row["decoder"] for row in rows} == {"–", *roofline.DECODERS}
    ceilings = [row for row in rows if row["way"] in (roofline.TRUNK, roofline.SQUARES)]
    assert max(row["share"] for row in ceilings) == 1
    assert all(row["share"] == pytest.approx(row["tflops"] / report["settings"]["best TFLOP/s"]) for row in ceilings)
    labels = svg_texts(drawn.read_text(encoding="utf-8"))
    assert "folded torch, 16-wide + cosine, bf16" in labels
    assert not any("memory" in label for label in labels), "a CPU's memory is not measured"
    kept = {key: report[key] for key in ("bench", "where", "settings", "rows", "notes")}
    again = roofline.Roofline(**kept, columns=roofline.COLUMNS)
    assert again.to_svg() == drawn.read_text(encoding="utf-8")
    assert again.to_markdown() == done.out.rstrip("\n")


@torch.inference_mode()
def test_the_compiled_way_and_tf32_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_TILE", (2, 7))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    problem = scoring.Problem(5, 20, 16, device=CPU)
    exact = BlockScorer(problem.method).block(problem.v, problem.t)
    assert scoring.relative_error(roofline.compiled(problem).run(), exact) < 0.02
    before = torch.get_float32_matmul_precision()
    ready = roofline._with("tf32", lambda: Prepared(torch.get_float32_matmul_precision))
    assert (ready.run(), torch.get_float32_matmul_precision()) == ("high", before)


def test_clock_and_power_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool, busy = tmp_path / "nvidia-smi", []
    tool.write_text("#!/bin/sh\necho 'clocks, power'\necho '1965 MHz, 690 W'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (note,) = roofline.gpu_state(Prepared(lambda: busy.append(0)), "GPU-1")
    assert "clocks, power: 1965 MHz, 690 W" in note
    assert busy
    tool.unlink()
    (note,) = roofline.gpu_state(Prepared(lambda: None), "GPU-1")
    assert "unknown" in note


# ---------------------------------------------------------------------------------------------- tables and plots


def test_the_table() -> None:
    rows = [{"way": "one", "seconds": 0.012345}, {"way": "two", "seconds": None}, {"way": "three", "problem": "full"}]
    result = BenchResult("try", "here", {"d": 5000}, rows, {"way": "way", "seconds": "s"}, ["A note."])
    assert result.to_markdown().splitlines() == [
        "| way | s |",
        "| --- | ---: |",
        "| one | 0.0123 |",
        "| two | – |",
        "| three (full) | – |",
        "",
        "d 5,000; here.",
        "A note.",
    ]


def test_the_plot_names_every_way_and_value() -> None:
    values = {"a <b>": 200.0, "c": 2.0, "d": 0.02, "zero": 0.0}
    rows = [{"way": name, "seconds": value} for name, value in values.items()]
    result = BenchResult("try", "N & M", {"d": 1}, rows, {"way": "way", "seconds": "s"})
    labels = svg_texts(result.to_svg())
    assert {"a <b>", "c", "d", "200", "2", "0.02", "d 1; N & M."} <= set(labels)
    assert "zero" not in labels, "a logarithmic axis has no zero"
    assert result.to_svg() == result.to_svg()
    assert svg_texts(BenchResult("try", "here", {}, [], {"seconds": "s"}).to_svg())


# ----------------------------------------------------------------------------------------------------- the command


def test_the_command(vacsr: Any, tmp_path: Path) -> None:
    json_file, figure = tmp_path / "a.json", tmp_path / "a.svg"
    done = vacsr("bench", "scoring", "--device", "cpu", "--json", json_file, "--figure", figure)
    assert done.code == 0
    assert done.out.startswith("| way | precision | seconds |")
    assert "timing bare product, float32" in done.err
    report = json.loads(json_file.read_text(encoding="utf-8"))
    assert (report["schema"], report["bench"]) == (1, "scoring")
    assert report["settings"] == {"images": 3, "texts": 150, "d": 16, "decoder": 16}
    ElementTree.parse(figure)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--figure", "a.png"], 2, "name it a.svg"),
        (["--figure", "folder.svg"], 2, "is a folder"),
        (["--json", "a.svg", "--figure", "a.svg"], 2, "both name a.svg"),
        (["--json", "file/a.json"], 3, "file is not a writable folder"),
    ],
)
def test_files_are_checked_before_anything_is_timed(
    options: list[str], code: int, words: str, vacsr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "run", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    assert vacsr("bench", "scoring", "--device", "cpu", *options).refused(code, words)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "small"), ("cuda", "coco")])
def test_the_size_fits_the_machine(device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = scoring.Problem
    monkeypatch.setattr(scoring, "SIZES", {name: {**SMALL, "texts": len(name)} for name in ("small", "coco")})
    monkeypatch.setattr(scoring, "describe_device", str)
    monkeypatch.setattr(scoring, "measure", lambda *_, **__: [])
    monkeypatch.setattr(scoring, "Problem", lambda *sizes, device: problem(*sizes, device=CPU))
    sizes = [scoring.run(torch.device(device), size=size).settings["texts"] for size in (None, "coco")]
    assert sizes == [len(expected), len("coco")]
