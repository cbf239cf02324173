"""What a comparison passes to its page: tables with tested differences, sweeps, rows to draw, how much was run."""

from collections.abc import Sequence
from statistics import stdev
from typing import Any

import pytest

from vacsr.compare.formats import to_html
from vacsr.compare.page import page_data, sweeps_of
from vacsr.compare.results import Column, ComparisonTable, Difference, PageConfig, Published, Sweep
from vacsr.pages.curves import RunRecord
from vacsr.pages.render import comparison_page

RSUM = Column(key="test.rsum", name="R<SUM>")
ERROR = Column(key="test.error", best="low", digits=2, settings=("noisy",))
PAPER = Column(key="test.rsum", name="paper", published=True)


def table_of(
    runs: Sequence[RunRecord], columns: Sequence[Column] = (RSUM, PAPER, ERROR), **fields: Any
) -> ComparisonTable:
    rows, settings = (tuple(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("row", "setting"))
    return ComparisonTable("t", tuple(columns), rows, settings, tuple(runs), **fields)


def grid_of_runs(*rows: str, seeds: Sequence[int] = (0,)) -> list[RunRecord]:
    return [
        RunRecord(row, where, seed, {"test": {"rsum": 300.0 + seed}})
        for row in rows
        for where in ("clean", "noisy")
        for seed in seeds
    ]


def with_differences(*differences: Difference) -> ComparisonTable:
    return table_of(grid_of_runs("a&b", "ours", "other"), baselines=("a&b",), differences=differences)


def compared(setting: str, row: str, key: str, *numbers: float) -> Difference:
    return Difference(setting, row, key, "a&b", *numbers)


def lines(table: ComparisonTable, setting: str) -> list[list[str]]:
    (rows,) = [one.differences for one in page_data(table).tables if one.setting == setting]
    return [[row.name, *(cell.text for cell in row.cells)] for row in rows]


def test_a_row_for_each_difference_of_the_setting() -> None:
    table = with_differences(
        compared("noisy", "other", "test.error", -0.5, -0.75, -0.25, 0.0002),
        compared("noisy", "other", "test.rsum", 2.0, -1.26, 4.0, 0.345),
        compared("noisy", "ours", "test.rsum", -3.0, -5.0, -1.0, 0.0128),
        compared("clean", "ours", "test.error", 1.0, 1.0, 1.0, 0.5),  # not a column of clean
        compared("clean", "ours", "test.rsum", 1.0, 0.0, 2.0, 1.0),
    )
    assert lines(table, "noisy") == [
        ["ours", "R<SUM>", "a&b", "-3.0", "-5.0 to -1.0", "0.013"],
        ["other", "R<SUM>", "a&b", "+2.0", "-1.3 to +4.0", "0.345"],
        ["other", "test.error", "a&b", "-0.50", "-0.75 to -0.25", "<0.001"],
    ]
    assert lines(table, "clean") == [["ours", "R<SUM>", "a&b", "+1.0", "0.0 to +2.0", "1.000"]]
    whole = comparison_page(page_data(table))
    assert whole.count('<details class="tested">') == 2
    assert "R&lt;SUM&gt;" in whole
    assert "<details" not in to_html(table)
    assert lines(with_differences(), "clean") == []


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0.3, 0.04, 0.6), ["+0.30", "+0.04 to +0.60"]),
        ((0.3, -0.001, 0.6), ["+0.300", "-0.001 to +0.600"]),
        ((0.0, 0.0, 0.0), ["0.0", "0.0 to 0.0"]),
        ((0.0, -1e-15, 1e-15), ["0.0000", "0.0000 to 0.0000"]),
    ],
)
def test_one_sees_whether_the_interval_includes_zero(numbers: tuple[float, float, float], texts: list[str]) -> None:
    assert lines(with_differences(compared("clean", "ours", "test.rsum", *numbers, 0.5)), "clean")[0][3:5] == texts


def test_cells_are_those_of_the_other_formats() -> None:
    runs = [RunRecord(row, "clean", seed, {"test": {"rsum": value}})
            for row, seed, value in (("a", 0, 300.0), ("a", 1, 310.0), ("b", 0, 320.0))]  # fmt: skip
    clear = Difference("clean", "b", "test.rsum", "a", 15.0, 5.0, 25.0, 0.001)
    published = (Published(name="P2RM & co", values={"test.rsum": 999.9}, source="theirs"),)
    table = table_of(runs, [Column(key="test.rsum")], differences=(clear,), published=published)
    html = to_html(table)
    assert "P2RM &amp; co (published)" in html
    assert '<td>305.0<span class="rest"> ± 7.1</span></td>' in html  # may be set below its mean
    assert "<td>320.0†</td>" in html  # a mark alone may not


def test_plots_show_some_rows_and_the_page_says_how_many_are_left_out() -> None:
    runs = grid_of_runs(*(f"row-{number}" for number in range(12)))
    page = page_data(table_of(runs, records=tuple(runs)))
    assert (len(page.rows), page.left_out, page.settings) == (8, 4, ["clean", "noisy"])
    named = table_of(runs, records=tuple(runs), page=PageConfig(drawn=("row-11", "row-2", "absent")))
    page = page_data(named)
    assert (page.rows, page.not_run) == (["row-11", "row-2"], ["absent"])
    swept = table_of(runs, records=tuple(runs), sweeps=tuple((f"row-{n}", Sweep(name="K", value=n)) for n in range(9)))
    assert page_data(swept).rows == ["row-9", "row-10", "row-11"]  # points of curves have their own plots


def test_sweeps_come_from_the_table_itself() -> None:
    values = (("K=1", 300.0, 1), ("paper", 310.0, 2), ("K=3", 305.0, 3))
    runs = [RunRecord(row, "clean", seed, {"test": {"rsum": v + seed}}) for row, v, _ in values for seed in (0, 1)]
    sweeps = tuple((row, Sweep(name="K", value=value, default=row == "paper")) for row, _, value in values)
    columns = (RSUM, Column(key="paper", name="mAP@R (paper)", published=True))
    published = tuple(
        Published(name="VACSR", values={"paper": value}, source="s", beside=row)
        for row, value in (("K=1", 39.6), ("paper", 40.7))
    )
    (found,) = sweeps_of(table_of(runs, columns, sweeps=sweeps, published=published))
    assert (found.metric, found.paper_metric) == ("R<SUM>", "mAP@R (paper)")
    assert found.points[0] == ("K", 1.0, False, 300.5, pytest.approx(0.7071, abs=1e-3), None, 39.6)
    assert [point.paper for point in found.points] == [39.6, 40.7, None]
    assert [point.default for point in found.points] == [False, True, False]
    (alone,) = sweeps_of(table_of(runs, columns, sweeps=sweeps, published=published[:1]))
    assert alone.paper_metric == ""  # one point is no curve
    assert list(sweeps_of(table_of(runs, columns))) == []


def test_sweeps_by_the_papers_metric_are_of_our_own_data() -> None:
    """Both directions averaged; a printed range is drawn at its middle; one seed has no deviation."""
    numbers = {("K=1", 0): (20.0, 30.0), ("K=1", 1): (22.0, 34.0), ("paper", 0): (24.0, 36.0)}
    runs = [RunRecord(row, "clean", seed, {"test": {"i2t": {"map_at_r": i2t}, "t2i": {"map_at_r": t2i}}})
            for (row, seed), (i2t, t2i) in numbers.items()]  # fmt: skip
    key = "test/eccv.mean.map_at_r"
    columns = (Column(key="test.i2t.map_at_r"), Column(key=key, name="paper: mAP@R, EC", published=True))
    sweeps = tuple((row, Sweep(name="K", value=at, default=at == 2)) for row, at in (("K=1", 1), ("paper", 2)))
    published = (
        Published(name="V", values={key: 40.2}, upper={key: 40.3}, source="s", beside="K=1"),
        Published(name="V", values={key: 40.7}, source="s", beside="paper"),
    )
    (found,) = sweeps_of(table_of(runs, columns, sweeps=sweeps, published=published))
    assert (found.paper_metric, found.alike_metric) == ("mAP@R, EC", "mAP@R, mean of both directions")
    first, second = found.points
    assert first.alike == (pytest.approx(26.5), pytest.approx(stdev([25.0, 28.0])))
    assert (first.paper, second.paper, second.std, second.alike) == (pytest.approx(40.25), 40.7, None, (30.0, None))
