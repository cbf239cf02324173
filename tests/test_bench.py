from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import vacsr.bench as bench
import vacsr.bench.metrics as metrics
import vacsr.bench.scoring as scoring
import vacsr.bench.scoring_ways as scoring_ways
import vacsr.bench.training as training
from vacsr.bench.ceilings import alone_tflops, square_products
from vacsr.bench.figure import Mark, Row, dots
from vacsr.bench.metrics import FiguresDiffer, largest_difference
from vacsr.bench.result import BenchResult
from vacsr.bench.timing import peak_mib, timed_in_turn
from vacsr.cli import app
from vacsr.errors import DiskFull, EnvironmentProblem, MissingExtra, UsageError
from vacsr.methods.base import Embedding
from vacsr.scoring.folded import BlockScorer

CPU = torch.device("cpu")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a moment, one round of each way."""
    monkeypatch.setattr(scoring, "SIZES", {"small": (3, 150, 16)})
    monkeypatch.setitem(scoring_ways.EDGE, "cpu", 32)
    monkeypatch.setattr(training, "SIZES", {"small": (16, (8, 40))})
    monkeypatch.setattr(metrics, "_SMALL", 12)
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 1)


@pytest.mark.usefixtures("tiny")
def test_scoring_side_by_side() -> None:
    said: list[str] = []
    found = bench.run_bench("scoring", device=CPU, say=said.append)
    rows: dict[Any, Any] = {(row["way"], row["precision"]): row for row in found.rows}
    assert all(row.get("problem") is None for row in found.rows)
    square = rows.pop(("square products of 32³, back to back", "float32"))
    single = rows.pop(("one of them alone, after a pause", "float32"))
    paper = rows["the paper's: all heads, 128 × 128 pairs", "fp32"]
    assert {way for way, _ in rows} == {"bare product", paper["way"], "folded", "folded, top-10 both ways"}
    bare = rows["bare product", "float32"]
    assert bare["of_ceiling"] == paper["faster"] == 1
    assert square["tflops"] == pytest.approx(round(230_400 / 65_536) * 65_536 / square["seconds"] / 1e12)
    assert single["tflops"] > 0
    assert "seconds" not in single
    best = max(bare["tflops"], square["tflops"])
    for row in rows.values():
        assert row["tflops"] == pytest.approx(2 * 3 * 150 * 16 * 16 / row["seconds"] / 1e12)
        assert row["of_ceiling"] == pytest.approx(row["seconds"] / bare["seconds"])
        assert row["of_best"] == pytest.approx(best / row["tflops"])
        assert row["faster"] == pytest.approx(paper["seconds"] / row["seconds"])
    assert 0 < paper["error"] < 1e-5  # type: ignore[operator]
    assert rows["folded", "float32"]["error"] == 0
    assert len(said) == len(rows) + 2  # the square products, and all in turn


@torch.inference_mode()
def test_every_way_scores_the_same_pairs() -> None:
    """What is timed is what is checked, and all of it agrees."""
    made = scoring_ways.random_problem(5, 140, 24, device=CPU)
    exact = made.method.score(made.v, made.t)
    torch.testing.assert_close(scoring_ways.papers_way(made, "fp32").check(made.v), exact, atol=1e-5, rtol=1e-5)  # type: ignore[misc]
    runner = scoring_ways.scorer_way(made, BlockScorer, torch.float32)
    torch.testing.assert_close(runner.run(), exact, atol=1e-5, rtol=1e-5)
    assert runner.check is not None
    assert runner.check(Embedding(made.v.mean[:2])).shape == (2, 140)


@pytest.mark.usefixtures("tiny")
def test_a_way_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no such luck\nmore about it")

    monkeypatch.setattr(scoring_ways, "papers_way", broken)
    found = bench.run_bench("scoring", device=CPU)
    failed = [row for row in found.rows if "problem" in row]
    assert [row["problem"] for row in failed] == ["no such luck"]
    assert "128 × 128 pairs (no such luck) | fp32 | – |" in found.to_markdown()
    assert all(row["faster"] is None for row in found.rows if "seconds" in row)
    assert sum("seconds" in row for row in found.rows) == len(found.rows) - 2  # and the product alone has a rate only
    assert ">no such luck<" in found.to_svg()


def test_a_way_that_fails_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 3)
    calls: list[int] = []

    def full() -> None:
        calls.append(0)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    timed = timed_in_turn({"full": full, "fine": lambda: None}, device=CPU)
    assert timed.problems == {"full": "out of memory"}
    assert {name: each.rounds for name, each in timed.found.items()} == {"fine": 3}
    assert len(calls) == 4


@pytest.mark.usefixtures("tiny")
def test_training_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_PAIRS", {"cpu": 64})
    found = bench.run_bench("training", device=CPU)
    rows = {(row["way"], row["batch"]): row for row in found.rows}
    assert len(rows) == 6
    dense, strips, plain = (rows[way, 40] for way in ("adapter, dense", "adapter in strips", "sigmoid"))
    assert dense["peak_mib"] > 40 * 40 * 2 * 16 * 4 / 2**20  # type: ignore[operator]  # the means of all pairs
    assert strips["peak_mib"] < dense["peak_mib"] / 2  # type: ignore[operator]
    assert plain["peak_mib"] < dense["peak_mib"]  # type: ignore[operator]
    assert strips["of_dense_mib"] == pytest.approx(strips["peak_mib"] / dense["peak_mib"])  # type: ignore[operator]
    assert dense["of_dense_ms"] == 1


def test_a_batch_of_one_strip_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SIZES", {"small": (8, (6, 8, 9))})
    monkeypatch.setattr(training, "_PAIRS", {"cpu": 64})
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 1)
    found = bench.run_bench("training", device=CPU)
    ways = [row["way"] for row in found.rows]
    assert ways[2::3] == ["adapter in one strip: dense"] * 2 + ["adapter in strips"]


def test_a_step_without_room_is_named_in_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(training, "SIZES", {"small": (8, (6,))})
    monkeypatch.setattr("vacsr.bench.timing._ROUNDS", 1)
    monkeypatch.setattr(training, "LOSSES", (training.LOSSES[0], training.Loss("adapter, dense", full)))
    found = bench.run_bench("training", device=CPU)
    shown = _said(ElementTree.fromstring(found.to_svg()))
    assert shown.count("out of memory") == 2  # in either panel
    assert {"ms a step (logarithmic)", "peak MiB (logarithmic)", "adapter, dense, B=6", "sigmoid, B=6"} <= set(shown)


def test_square_products_make_up_the_work() -> None:
    calls: list[int] = []
    found = square_products(10, torch.float32, device=CPU, operations=7_400)._replace(one=lambda: calls.append(0))
    assert found.operations == 8_000  # four of 2·10³
    found.run()
    assert len(calls) == 4
    assert square_products(10, torch.float32, device=CPU, operations=1).times == 1


def test_one_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = square_products(10, torch.float32, device=CPU, operations=6_000)
    took = iter([3.0, 2.0, 5.0, 4.0, 2.5, 9.0, 8.0])
    monkeypatch.setattr("vacsr.bench.ceilings.once", lambda *_, **__: next(took))
    monkeypatch.setattr("vacsr.bench.ceilings._PAUSE_S", 0.0)
    assert alone_tflops(found, device=CPU) == pytest.approx(2_000 / 2.0 / 1e12)


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
    ways = {name: lambda name=name: seen.append(name) for name in "ab"}  # type: ignore[misc]
    found, problems = timed_in_turn(ways, device=CPU)
    assert not problems
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
    found = BenchResult("try", "here", {"d": 5000}, rows, {"way": "way", "seconds": "s"}, ["seconds"], ["Said."])
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


def _said(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_figure_has_dots_on_a_logarithmic_axis() -> None:
    values = {"a <b>": 200.0, "c": 2.0, "d": 0.02, "none": 0.0}
    rows = [Row(name, [Mark(value, f"{value:g}")]) for name, value in values.items()]
    root = ElementTree.fromstring(dots(rows, panels=["s"], title="T", note="N & M"))
    assert root.tag == f"{SVG}svg"
    at = [float(dot.get("cx") or 0) for dot in root.iter(f"{SVG}circle")]
    ticks = {text.text: float(text.get("x") or 0) for text in root.iter(f"{SVG}text") if text.get("class") == "tick"}
    assert list(ticks) == ["0.01", "0.1", "1", "10", "100"]
    decade = ticks["10"] - ticks["1"]
    assert at[0] - at[1] == pytest.approx(2 * decade, abs=0.2)
    assert at[1] - at[2] == pytest.approx(2 * decade, abs=0.2)
    assert at[3] == pytest.approx(ticks["0.01"], abs=0.1)
    assert {"a <b>", "200", "N & M"} <= set(_said(root))


@pytest.mark.parametrize("length", [1, 20, 59, 200])
def test_names_have_room_in_the_figure(length: int) -> None:
    """At 12 px no letter of a usual font is wider on average than 7 px."""
    rows = [Row("m" * length if length < 60 else "many words " * 20, [Mark(1.0, "1")])]
    root = ElementTree.fromstring(dots(rows, panels=["s"], title="T", note="many words " * 40))
    width = float(root.get("width") or 0)
    for text in root.iter(f"{SVG}text"):
        room = float(text.get("x") or 0)
        reach = 7 * len(text.text or "")
        assert reach <= (room if text.get("text-anchor") == "end" else width - room)


def test_a_figure_without_rows() -> None:
    root = ElementTree.fromstring(dots([], panels=["s"], title="T", note=""))
    assert not list(root.iter(f"{SVG}circle"))


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


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says whether the benchmark ran; it takes no time."""
    seen: list[str] = []

    def run(size: str, *_: object) -> BenchResult:
        seen.append(size)
        return BenchResult("try", "here", {}, [{"way": "one", "s": 1.0}], {"way": "way", "s": "s"}, ["s"])

    monkeypatch.setitem(bench._BENCHES, "scoring", run)
    return seen


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (["--figure", "a.png"], UsageError, "name it a.svg"),
        (["--figure", "a"], UsageError, "name it a.svg"),
        (["--figure", "folder"], UsageError, "--figure folder is a folder"),
        (["--json", "folder"], UsageError, "--json folder is a folder"),
        (["--json", "a.svg", "--figure", "a.svg"], UsageError, "both name a.svg"),
        (["--json", "file/a.json"], EnvironmentProblem, "cannot make the folder file"),
    ],
)
def test_files_are_checked_before_anything_is_timed(
    options: list[str],
    error: type[Exception],
    said: str,
    untimed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["bench", "scoring", "--device", "cpu", *options])
    assert isinstance(done.exception, error)
    assert said in str(done.exception)
    assert not untimed


def test_a_folder_that_takes_no_files(untimed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    done = CliRunner().invoke(app, ["bench", "scoring", "--device", "cpu", "--json", str(tmp_path / "a.json")])
    assert isinstance(done.exception, EnvironmentProblem)
    assert not untimed


def test_the_table_is_printed_even_if_no_file_can_be_written(
    untimed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr("vacsr.files.write_json", full)
    done = CliRunner().invoke(app, ["bench", "scoring", "--device", "cpu", "--json", str(tmp_path / "a.json")])
    assert isinstance(done.exception, DiskFull)
    assert "| one | 1 |" in done.stdout
    assert untimed == ["small"]


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
