import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from vacsr.compare.formats import FORMATS, to_csv, to_latex, to_markdown
from vacsr.compare.results import Column, ComparisonTable, Difference, Published, Sweep, read_results
from vacsr.errors import DataError
from vacsr.files import json_text
from vacsr.pages.curves import RunRecord

RSUM, ERROR = Column(key="test.rsum", name="R|SUM_%"), Column(key="test.error", name="σ error", best="low", digits=2)
PAPER = Column(key="test.theirs", name="paper: RSUM", published=True)
VALUES = {("a", 0): 300.0, ("a", 1): 310.0, ("b", 0): 320.0, ("c", 0): 100.0}
QUOTED = Published(
    name="A", beside="a", values={"test.theirs": 541.4, "test.rsum": 1.0}, source="their table 1", note="COCO"
)
OWN = Published(
    name="P2RM & co", values={"test.i2t.r1": 10.0, "test.t2i.r1": 20.0, "test.rsum": 999.9}, source="theirs"
)


def table(*, published: tuple[Published, ...] = ()) -> ComparisonTable:
    values = [
        RunRecord(row, "clean", seed, {"test": {"rsum": value, "error": value / 100 if row == "a" else None}})
        for (row, seed), value in VALUES.items()
    ]
    return ComparisonTable(
        "Small & <good>", (RSUM, ERROR, PAPER), ("a", "b", "c"), ("clean",), tuple(values),
        baselines=("a",),
        differences=(
            Difference("clean", "b", "test.rsum", "a", 15.0, 5.0, 25.0, 0.001),
            Difference("clean", "c", "test.rsum", "a", -205.0, -210.0, -200.0, 0.0002),
        ),
        published=published,
        sweeps=(("a", Sweep(name="alpha", value=5e-5, default=True)),),
    )  # fmt: skip


def test_markdown_with_marks_and_what_others_published() -> None:
    lines = to_markdown(table(published=(QUOTED, OWN))).splitlines()
    assert lines[4] == "| method | seeds | R\\|SUM_% | σ error | paper: RSUM |"
    assert lines[6:10] == [
        "| P2RM & co (published) | – | 999.9 | – | – |",
        "| a | 2 | 305.0 ± 7.1 | **3.05** ± 0.07 | 541.4 |",
        "| b | 1 | 320.0† | – | – |",
        "| c | 1 | 100.0‡ | – | – |",
    ]
    told = "\n".join(lines[10:])
    assert "where a row with fewer than 2 seeds is ahead, none is." in told
    assert "† better, ‡ worse than the best baseline" in told
    assert "Published: theirs." in told
    assert "Published, on other data than ours: their table 1 (COCO)." in told


def test_where_less_is_better_the_marks_change_sides() -> None:
    shown = to_markdown(replace(table(), columns=(Column(key="test.rsum", best="low"),)))
    assert "| b | 1 | 320.0‡ |" in shown
    assert "| c | 1 | 100.0† |" in shown


def test_a_printed_range_is_shown_as_a_range() -> None:
    ranged = QUOTED.model_copy(update={"upper": {"test.theirs": 541.9}})
    own = OWN.model_copy(update={"upper": {"test.rsum": 1001.9}})
    found = table(published=(ranged, own))
    assert "| 541.4–541.9 |" in to_markdown(found)
    assert "| 999.9–1001.9 |" in to_markdown(found)
    assert "541.4--541.9" in to_latex(found)
    theirs, ours, *_ = csv.DictReader(io.StringIO(to_csv(found)))
    assert (theirs["R|SUM_%"], ours["paper: RSUM"]) == ("999.9–1001.9", "541.4–541.9")


def test_a_mark_needs_a_clear_interval_and_an_end_that_is_better() -> None:
    for low, high in ((-5.0, 25.0), (0.0, 25.0), (-5.0, 0.0)):
        unclear = Difference("clean", "b", "test.rsum", "a", 15.0, low, high, 0.2)
        shown = to_markdown(replace(table(), differences=(unclear,)))
        assert not {"†", "‡"} & set(shown)
    small = Difference("clean", "b", "test.rsum", "a", 0.5, 0.1, 0.9, 0.01)
    assert "| b | 1 | 320.0† |" in to_markdown(replace(table(), differences=(small,)))
    low = replace(table(), columns=(RSUM.model_copy(update={"best": "low"}),))
    assert "| b | 1 | 320.0‡ |" in to_markdown(low)
    none = replace(table(), columns=(RSUM.model_copy(update={"best": "none"}),))
    assert "†" not in to_markdown(none)
    assert "**" not in to_markdown(none)


def test_csv_has_the_full_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(table(published=(QUOTED, OWN))))))
    assert [(row["method"], row["whose"], row["seeds"]) for row in rows] == [
        ("P2RM & co", "published", ""),
        ("a", "ours", "2"),
        ("b", "ours", "1"),
        ("c", "ours", "1"),
    ]
    assert float(rows[1]["R|SUM_%"]) == 305.0
    assert float(rows[1]["R|SUM_% std"]) == pytest.approx(50**0.5)
    assert rows[1]["paper: RSUM"] == "541.4"
    assert rows[2]["R|SUM_% std"] == rows[2]["σ error"] == ""


def test_names_in_a_csv_are_no_formulas() -> None:
    evil = "=HYPERLINK(0)"
    columns, rows = (RSUM.model_copy(update={"name": evil}),), (RunRecord(evil, evil, 0, {"test": {"rsum": -1.0}}),)
    published = (Published(name=evil, setting=evil, values={"test.rsum": 1.0}, source="theirs"),)
    table = ComparisonTable("", columns, (evil,), (evil,), rows, published=published)
    lines = list(csv.reader(io.StringIO(to_csv(table))))
    assert len(lines) == 3
    assert {cell[:2] for line in lines for cell in line if "HYPERLINK" in cell} == {"'="}
    assert lines[-1][4] == "-1.0"


def test_what_rounds_to_zero_has_no_minus() -> None:
    """In full, as CSV has it, -0.004 is no zero; what others printed may be -0.0."""
    values = (RunRecord("a", "clean", 0, {"test": {"error": -0.004}}),)
    theirs = Published(name="p", values={"test.error": -0.0}, upper={"test.error": 0.004}, source="theirs")
    beside = Published(name="q", values={"test.theirs": -0.0}, source="theirs", beside="a")
    small = ComparisonTable("t", (ERROR, PAPER), ("a",), ("clean",), values, published=(theirs, beside))
    lines = to_markdown(small).splitlines()
    assert lines[6:8] == ["| p (published) | – | 0.00 | – |", "| a | 1 | **0.00** | 0.0 |"]
    assert r"a & 1 & \textbf{0.00} & 0.0 \\" in to_latex(small)
    printed, ours = csv.DictReader(io.StringIO(to_csv(small)))
    assert (printed["σ error"], ours["σ error"], ours["paper: RSUM"]) == ("0.0–0.004", "-0.004", "0.0")
    below = replace(small, values=(values[0]._replace(report={"test": {"error": -0.006}}),))
    assert "| **-0.01** |" in to_markdown(below)


def test_latex_escapes_and_sets_the_best_in_bold() -> None:
    found = to_latex(table(published=(OWN,)))
    assert r"\caption{Small \& \textless{}good\textgreater{}, clean." in found
    assert r"method & seeds & R\textbar{}SUM\_\% & $\sigma$ error & paper: RSUM \\" in found
    assert r"P2RM \& co (published) & -- & 999.9 & -- & -- \\" in found
    assert r"b & 1 & 320.0$^\dagger$ & -- & -- \\" in found
    assert r"305.0 $\pm$ 7.1 & \textbf{3.05} $\pm$ 0.07" in found
    odd = replace(table(), note="a_b ≥ [1]", title="x")
    assert r"\caption{x, clean. a\_b $\ge$ {[}1{]} " in to_latex(odd)
    greek = replace(table(), note="λ = 0.1, Δ ≠ ω", title="x")
    assert r"$\lambda$ = 0.1, $\Delta$ $\ne$ $\omega$ " in to_latex(greek)
    low = replace(table(), values=(RunRecord("a", "clean", 0, {"test": {"rsum": -1.5}}),))
    assert r"a & 1 & \textbf{$-$1.5} & -- & -- \\" in to_latex(low)
    order = [found.index(word) for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")]
    assert order == sorted(order)


def test_the_same_table_comes_back_from_its_data(tmp_path: Path) -> None:
    """In every format; a key with `mean` in it included."""
    columns = (RSUM, PAPER, Column(key="test.mean.r1"), Column(key="test/eccv.i2t.map_at_r"))
    report = {
        "test": {"rsum": 300.0, "i2t": {"r1": 10.0}, "t2i": {"r1": 20.0}},
        "test/eccv": {"i2t": {"map_at_r": 30.0}},
    }
    full = replace(
        table(published=(QUOTED, OWN)), columns=columns, values=(RunRecord("a", "clean", 0, report),), note="Mind this."
    )
    path = tmp_path / "results.json"
    path.write_text(json_text(full.to_dict()), encoding="utf-8")
    values, differences = read_results(path)
    again = replace(full, values=values, differences=differences)
    for name, form in FORMATS.items():
        assert form(again) == form(full), name
    assert again.to_dict() == full.to_dict()
    assert "| a | 1 | **300.0** | 541.4 | **15.0** | **30.0** |" in to_markdown(again)
    assert "| P2RM & co (published) | – | 999.9 | – | 15.0 | – |" in to_markdown(again)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 3}',
        '{"schema": 2, "title": "x"}',
        '{"schema": 1, "title": "x", "cells": []}',
        '{"schema": 2, "cells": [{"row": "a", "setting": "b", "seed": "x", "values": {}}], "comparisons": []}',
        '{"schema": 2, "cells": [{"row": "a", "setting": "b", "seed": 1, "values": []}], "comparisons": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"results.json.* — "):
        read_results(path)
    with pytest.raises(DataError, match=r"absent\.json"):
        read_results(tmp_path / "absent.json")
