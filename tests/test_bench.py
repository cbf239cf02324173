from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import vacsr.bench as bench
import vacsr.bench.metrics as metrics
import vacsr.bench.scoring as scoring
import vacsr.bench.training as training
from vacsr.bench.figure import Bar, bars
from vacsr.bench.metrics import FiguresDiffer, largest_difference
from vacsr.bench.result import BenchResult
from vacsr.bench.timing import peak_mib, timed_in_turn
from vacsr.cli import app
from vacsr.errors import MissingExtra
from vacsr.methods.base import Embedding
from vacsr.scoring.folded import BlockScorer

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a moment, one round of each way."""
    monkeypatch.setattr(scoring, "SIZES", {"small": (3, 150, 16)})
    monkeypatch.setattr(training, "SIZES", {"small": (16, (8, 40))})
    monkeypatch.setattr(metrics, "_SMALL", 12)
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 1)


@pytest.mark.usefixtures("tiny")
def test_scoring_side_by_side() -> None:
    said: list[str] = []
    found = bench.run_bench("scoring", device=CPU, say=said.append)
    rows = {(row["way"], row["precision"]): row for row in found.rows}
    paper = rows["the paper's: all heads, 128 × 128 pairs", "fp32"]
    assert {way for way, _ in rows} == {"bare product", paper["way"], "folded", "folded, top-10 both ways"}
    assert all(row.get("problem") is None for row in found.rows)
    assert rows["bare product", "float32"]["of_ceiling"] == 1
    assert paper["faster"] == 1
    for row in found.rows:
        assert isinstance(row["seconds"], float)
        assert row["tflops"] == pytest.approx(2 * 3 * 150 * 16 * 16 / row["seconds"] / 1e12)
        assert row["faster"] == pytest.approx(paper["seconds"] / row["seconds"])  # type: ignore[operator]
    assert 0 < paper["error"] < 1e-5  # type: ignore[operator]
    assert rows["folded", "float32"]["error"] == 0
    assert len(said) == len(rows) + 1


@torch.inference_mode()
def test_every_way_scores_the_same_pairs() -> None:
    """What is timed is what is checked, and all of it agrees."""
    made = scoring.random_problem(5, 140, 24, device=CPU)
    exact = made.method.score(made.v, made.t)
    torch.testing.assert_close(scoring.papers_way(made, "fp32").check(made.v), exact, atol=1e-5, rtol=1e-5)  # type: ignore[misc]
    runner = scoring.scorer_way(made, BlockScorer, torch.float32)
    torch.testing.assert_close(runner.run(), exact, atol=1e-5, rtol=1e-5)
    assert runner.check is not None
    assert runner.check(Embedding(made.v.mean[:2])).shape == (2, 140)


@pytest.mark.usefixtures("tiny")
def test_a_way_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no such luck\nmore about it")

    monkeypatch.setattr(scoring, "papers_way", broken)
    found = bench.run_bench("scoring", device=CPU)
    failed = [row for row in found.rows if "problem" in row]
    assert [row["problem"] for row in failed] == ["no such luck"]
    assert "128 × 128 pairs (no such luck) | fp32 | – |" in found.to_markdown()
    assert all("seconds" in row and row["faster"] is None for row in found.rows if row not in failed)


@pytest.mark.usefixtures("tiny")
def test_training_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TILE", {"cpu": 8})
    found = bench.run_bench("training", device=CPU)
    rows = {(row["way"], row["batch"]): row for row in found.rows}
    assert len(rows) == 6
    dense, tiled, plain = (rows[way, 40] for way in ("adapter, dense", "adapter in tiles", "sigmoid"))
    assert dense["peak_mib"] > 40 * 40 * 2 * 16 * 4 / 2**20  # type: ignore[operator]  # the means of all pairs
    assert tiled["peak_mib"] < dense["peak_mib"] / 2  # type: ignore[operator]
    assert plain["peak_mib"] < dense["peak_mib"]  # type: ignore[operator]
    assert tiled["of_dense_mib"] == pytest.approx(tiled["peak_mib"] / dense["peak_mib"])  # type: ignore[operator]
    assert dense["of_dense_ms"] == 1


def test_memory_is_what_is_alive_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1 << 18)  # 1 MiB
        second = first + 1
        del first, second
        torch.zeros(1 << 19)  # 2 MiB
        torch.zeros(1 << 19)

    assert peak_mib(work, device=CPU) == pytest.approx(2.0, abs=0.1)


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 2)
    seen: list[str] = []
    found = timed_in_turn({name: lambda name=name: seen.append(name) for name in "ab"}, device=CPU)  # type: ignore[misc]
    assert seen == ["a", "a", "b", "b"] * 2
    assert {name: each.rounds for name, each in found.items()} == {"a": 2, "b": 2}
    assert all(0 <= each.seconds <= each.median for each in found.values())


@pytest.mark.usefixtures("tiny")
def test_metrics_side_by_side() -> None:
    found = bench.run_bench("metrics", device=CPU)
    assert [row["way"] for row in found.rows] == ["vacsr", "torchmetrics"]
    assert found.rows[1]["difference"] < 1e-4  # type: ignore[operator]
    assert found.settings == {"images": 12, "captions": 60}


@pytest.mark.usefixtures("tiny")
def test_metrics_without_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Any:
        raise MissingExtra("torchmetrics", "dev")

    monkeypatch.setattr(metrics, "torchmetrics_figures", absent)
    found = bench.run_bench("metrics", device=CPU)
    assert [row["way"] for row in found.rows] == ["vacsr"]
    assert "torchmetrics is left out: torchmetrics is not installed" in found.to_markdown()


def test_figures_that_differ_are_an_error() -> None:
    assert largest_difference({"a": 1.0, "b": 2.0}, {"a": 1.0}, system="eccv_caption") == 0
    with pytest.raises(FiguresDiffer, match=r"vacsr and torchmetrics differ by 0\.5%"):
        largest_difference({"a": 1.0}, {"a": 1.5}, system="torchmetrics")


def test_the_table() -> None:
    rows = [{"way": "one", "seconds": 0.012345}, {"way": "two", "seconds": None}, {"way": "three", "problem": "full"}]
    found = BenchResult("try", "here", {"d": 5000}, rows, {"way": "way", "seconds": "s"}, "seconds", ["Said."])
    assert found.to_markdown().splitlines() == [
        "| way | s |",
        "| --- | ---: |",
        "| one | 0.0123 |",
        "| two | – |",
        "| three (full) | – |",
        "",
        "d 5,000; here.",
        "Said.",
    ]


def test_the_figure_is_a_picture_with_bars_in_proportion() -> None:
    text = bars([Bar("a <b>", 2.0, "2"), Bar("c", 1.0, "1"), Bar("none", 0.0, "0")], title="T", note="N & M")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    boxes = [re.findall(r"[\d.]+", path.get("d") or "") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    widths = [float(box[2]) - float(box[0]) for box in boxes]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert 0 < widths[2] <= 1
    shown = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <b>", "2", "N & M"} <= set(shown)


def test_a_figure_without_bars() -> None:
    root = ElementTree.fromstring(bars([], title="T", note=""))
    assert not list(root.iter("{http://www.w3.org/2000/svg}path"))


@pytest.mark.usefixtures("tiny")
def test_the_command(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.svg")]
    done = CliRunner().invoke(app, ["bench", "scoring", "--device", "cpu", *files], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("| way | precision | seconds |")
    assert "timing bare product, float32" in done.stderr
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert found["schema"] == 1
    assert found["bench"] == "scoring"
    assert found["settings"] == {"images": 3, "texts": 150, "d": 16, "decoder": 16}
    assert {"way", "precision", "seconds", "median", "rounds", "tflops"} <= set(found["rows"][0])
    ElementTree.parse(tmp_path / "a.svg")


def test_the_command_knows_what_it_can_time() -> None:
    done = CliRunner().invoke(app, ["bench", "lunch"])
    assert done.exit_code == 2
    assert all(name in done.output for name in ("lunch", "scoring", "training", "metrics"))


@pytest.mark.parametrize(
    ("what", "device", "expected"),
    [
        ("scoring", "cpu", "small"),
        ("scoring", "cuda", "coco"),
        ("metrics", "cuda", "small"),
        ("training", "cpu", "small"),
    ],
)
def test_the_size_fits_the_machine(what: Any, device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setitem(bench._BENCHES, what, lambda size, *_: seen.append(size))
    bench.run_bench(what, device=torch.device(device))
    bench.run_bench(what, device=torch.device(device), size="coco")
    assert seen == [expected, "coco"]
