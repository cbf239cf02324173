"""docs/results/refresh.py: where a cell comes from, what is not lost unseen, and the tables that pages quote."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vacsr.compare import Table, cells, read_table
from vacsr.config.io import dump_yaml, recipe_from
from vacsr.errors import DataError
from vacsr.files import write_text
from vacsr.report.stored import read_results

ROOT = Path(__file__).resolve().parents[1]
TABLE = """
title: Try
base: {data: {pairs: "synthetic:images=8"}, train: {epochs: 1}}
rows:
- {name: infonce, baseline: true, set: {method: {name: infonce}}}
- {name: sigmoid, set: {method: {name: sigmoid}}}
settings: [{name: clean}]
seeds: [0, 1]
columns: [{key: test.rsum, name: RSUM}, {key: test.uncertainty.corr_r1_i2t, name: r}]
"""


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[None]:
    """As when a file of docs/results/ runs as a script: its own folder is where it imports from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/results"))
        yield


@pytest.fixture(scope="module")
def refresh(beside: None) -> Any:
    return importlib.import_module("refresh")


@pytest.fixture(scope="module")
def quoting(beside: None) -> Any:
    return importlib.import_module("quoting")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_text(tmp_path / "try.yaml", TABLE)
    return read_table(tmp_path / "try.yaml")


def put(table: Table, root: Path, figures: dict[tuple[str, int], float], *, epochs: int = 1) -> None:
    """Run folders as a training leaves them, with this RSUM."""
    for cell in cells(table, root):
        if (cell.row, cell.seed) not in figures:
            continue
        raw = cell.recipe.model_dump(mode="json")
        recipe = recipe_from({**raw, "train": {**raw["train"], "epochs": epochs}})
        rsum = figures[cell.row, cell.seed]
        result = {"split": "test", "protocol": "flickr", "rsum": rsum, "uncertainty": {"corr_r1_i2t": -rsum / 1000}}
        write_text(cell.folder / "config.yaml", dump_yaml(recipe))
        write_text(cell.folder / "report.json", json.dumps({"schema": 1, "results": [result]}))
        write_text(cell.folder / "metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"epoch": 1, "dev_rsum": 1.0}\n')


def test_a_cell_comes_from_the_first_folder_that_has_it(refresh: Any, table: Table, tmp_path: Path) -> None:
    new, old, out = tmp_path / "new", tmp_path / "old", tmp_path / "out"
    put(table, old, {("infonce", 0): 300.0, ("infonce", 1): 310.0, ("sigmoid", 0): 200.0})
    put(table, new, {("infonce", 1): 350.0})
    put(table, new, {("sigmoid", 0): 999.0}, epochs=2)  # of another recipe: not this cell
    said = refresh.gather(table, [new, old], out, page=True)
    assert said == f"out: 3 of 4 cells (2 from {old}, 1 from {new}); without a run: 1, of sigmoid"
    found = {(v.row, v.seed): v.report["test"]["rsum"] for v in read_results(out / "results.json").values}
    assert found == {("infonce", 0): 300.0, ("infonce", 1): 350.0, ("sigmoid", 0): 200.0}
    assert (out / "page.html").is_file()
    assert len(json.loads((out / "records.json").read_text(encoding="utf-8"))) == 3


def test_stored_cells_are_not_lost_unseen(refresh: Any, table: Table, tmp_path: Path) -> None:
    runs, fewer, out = tmp_path / "runs", tmp_path / "fewer", tmp_path / "out"
    put(table, runs, {("infonce", 0): 300.0, ("sigmoid", 1): 200.0})
    put(table, fewer, {("infonce", 0): 300.0})
    refresh.gather(table, [runs], out)
    before = (out / "results.json").read_bytes()
    with pytest.raises(DataError, match=r"the first clean / sigmoid / seed 1 — add the --runs"):
        refresh.gather(table, [fewer], out)
    assert (out / "results.json").read_bytes() == before
    refresh.gather(table, [fewer], out, partial=True)
    assert [v.row for v in read_results(out / "results.json").values] == ["infonce"]
    with pytest.raises(DataError, match="no cell of 'Try' is finished"):
        refresh.gather(table, [tmp_path / "none"], out)


def test_cells_are_added_to_kept_reports_and_drawn_with_them(refresh: Any, table: Table, tmp_path: Path) -> None:
    kept, out = tmp_path / "kept.json", tmp_path / "out"
    old = {"report": {"schema": 1, "results": [{"split": "test", "rsum": 250.0}]}, "epochs": []}
    write_text(kept, json.dumps({"schema": 1, "runs": {"clean/sigmoid/seed-1": old, "clean/infonce/seed-0": old}}))
    put(table, tmp_path / "runs", {("infonce", 0): 300.0, ("infonce", 1): 310.0})
    assert refresh.keep(table, [tmp_path / "none"], kept) == 0
    assert refresh.keep(table, [tmp_path / "runs"], kept) == 2
    raw = json.loads(kept.read_text(encoding="utf-8"))["runs"]
    assert list(raw) == ["clean/infonce/seed-0", "clean/infonce/seed-1", "clean/sigmoid/seed-1"]
    assert raw["clean/infonce/seed-1"]["epochs"] == [{"epoch": 1, "dev_rsum": 1.0}]
    assert refresh.draw_kept(table, kept, out) == "out: 3 kept cells of 4"
    found = {(v.row, v.seed): v.report["test"]["rsum"] for v in read_results(out / "results.json").values}
    assert found == {("infonce", 0): 300.0, ("infonce", 1): 310.0, ("sigmoid", 1): 250.0}
    assert {path.name for path in out.iterdir()} == {
        "results.json", "records.json", "page.html", "table.md", "table.csv", "table.tex", "table.html"
    }  # fmt: skip
    write_text(kept, json.dumps({"schema": 1, "runs": {"clean/sigmoid/seed-7": old}}))
    with pytest.raises(DataError, match=r"kept.json has clean/sigmoid/seed-7, which 'Try' has not — add its row"):
        refresh.draw_kept(table, kept, out)


def test_a_page_may_count_seeds_and_one_seed_ahead_takes_no_bold(
    refresh: Any, quoting: Any, table: Table, tmp_path: Path
) -> None:
    put(table, tmp_path, {("infonce", 0): 300.0, ("infonce", 1): 310.0, ("sigmoid", 0): 400.0})
    refresh.gather(table, [tmp_path], tmp_path / "out")
    columns = (quoting.Quoted("RSUM", ("test.rsum",), spread=True, bold=True),)
    page = quoting.Page("p.md", "out", columns, {"clean": "plain"}, seeds=True)
    shown = quoting.quoted("| plain |\n", page, read_results(tmp_path / "out/results.json"))
    assert shown == "| plain | seeds | RSUM |\n|---|---|---|\n| infonce | 2 | 305.0 ± 7.1 |\n| sigmoid | 1 | 400.0 |\n"


def test_folders_are_drawn_again_from_what_is_stored(
    refresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tolerance", "scenes-plans"):
        for file in (ROOT / "docs/results" / name).iterdir():
            if file.suffix == ".json":
                write_text(tmp_path / name / file.name, file.read_text(encoding="utf-8"))
    monkeypatch.setattr(refresh, "RESULTS", tmp_path)
    monkeypatch.setattr(refresh, "refresh_pages", lambda docs, *, write: [])
    assert refresh.main(["--draw", "--only", "tolerance", "--only", "scenes-plans"]) == 0
    assert "tolerance: drawn again" in capsys.readouterr().err
    assert not (tmp_path / "scenes-plans/page.html").exists()
    for name in ("tolerance/page.html", "tolerance/table.md", "scenes-plans/table.html"):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs/results" / name).read_bytes(), (
            f"{name}: refresh.py --draw"
        )
    assert refresh.main(["--runs", str(tmp_path / "none"), "--only", "scenes-plans"]) == 4


def test_a_page_s_table_is_replaced_and_nothing_else(refresh: Any, quoting: Any, table: Table, tmp_path: Path) -> None:
    put(table, tmp_path, {("infonce", 0): 300.0, ("infonce", 1): 310.0, ("sigmoid", 0): 207.25})
    refresh.gather(table, [tmp_path], tmp_path / "out")
    columns = (
        quoting.Quoted("RSUM", ("test.rsum",), spread=True, bold=True),
        quoting.Quoted("r", ("test.uncertainty.corr_r1_i2t", "test.uncertainty.corr_r1_i2t"), "r"),
        quoting.Quoted("none", ("test.exact.tau_b",)),
    )
    page = quoting.Page("p.md", "out", columns, {"clean": "plain labels"})
    text = "# A\n\n| other | x |\n|---|---|\n\n| plain labels | y |\n|---|---|\n| old | 1 |\n\nWords | here.\n"
    expected = (
        "# A\n\n| other | x |\n|---|---|\n\n| plain labels | RSUM | r | none |\n|---|---|---|---|\n"
        "| infonce | **305.0** ± 7.1 | −.30 / −.30 | – |\n| sigmoid | 207.2 | −.21 / −.21 | – |\n\nWords | here.\n"
    )
    stored = read_results(tmp_path / "out/results.json")
    assert quoting.quoted(text, page, stored) == expected
    assert quoting.quoted(expected, page, stored) == expected
    with pytest.raises(DataError, match=r"no table that begins with '\| plain labels \|'"):
        quoting.quoted("# A\n", page, stored)


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(-0.604, "r", "−.60"), (0.39, "r", ".39"), (-1.0, "r", "−1.00"), (-0.001, "r", ".00"), (10.85, "2", "10.85")],
)
def test_figures_are_written_as_on_the_pages(quoting: Any, value: float, form: str, shown: str) -> None:
    assert quoting._number(value, form) == shown


def test_the_pages_quote_what_is_stored(refresh: Any, quoting: Any) -> None:
    assert quoting.refresh_pages(ROOT / "docs", write=False) == []
    assert refresh.main(["--check"]) == 0
    assert refresh.main(["--check", "--runs", "runs"]) == 2
    assert refresh.main(["--check", "--draw"]) == 2
