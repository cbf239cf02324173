"""What the bootstrap said of each difference, folded below the table on the page of a comparison."""

from __future__ import annotations

import re

import pytest

from vacsr.report.comparison import comparison_page
from vacsr.report.formats import to_html
from vacsr.report.tables import CellValues, Column, Comparison, ComparisonTable
from vacsr.report.tested import differences_to_html

RSUM = Column(key="test.rsum", name="R<SUM>")
ERROR = Column(key="test.error", best="low", digits=2, settings=("noisy",))
PAPER = Column(key="test.rsum", name="paper", published=True)


def compared(setting: str, row: str, key: str, *figures: float) -> Comparison:
    return Comparison(setting, row, key, "a&b", *figures)


def table(*comparisons: Comparison) -> ComparisonTable:
    rows, settings = ("a&b", "ours", "other"), ("clean", "noisy")
    values = tuple(CellValues(row, where, 0, {"test": {"rsum": 1.0}}) for row in rows for where in settings)
    return ComparisonTable("t", (RSUM, PAPER, ERROR), rows, settings, values, ("a&b",), comparisons)


def lines(found: ComparisonTable, setting: str) -> list[list[str]]:
    """Cells of the folded table, head first."""
    (shown,) = differences_to_html(found, setting)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", shown)]


def test_a_row_for_each_difference_of_the_setting() -> None:
    found = table(
        compared("noisy", "other", "test.error", -0.5, -0.75, -0.25, 0.0002),
        compared("noisy", "other", "test.rsum", 2.0, -1.26, 4.0, 0.345),
        compared("noisy", "ours", "test.rsum", -3.0, -5.0, -1.0, 0.0128),
        compared("clean", "ours", "test.error", 1.0, 1.0, 1.0, 0.5),
        compared("clean", "ours", "test.rsum", 1.0, 0.0, 2.0, 1.0),
    )
    assert lines(found, "noisy") == [
        ["row", "figure", "against", "difference", "95% interval", "p"],
        ["ours", "R&lt;SUM&gt;", "a&amp;b", "-3.0", "-5.0 to -1.0", "0.013"],
        ["other", "R&lt;SUM&gt;", "a&amp;b", "+2.0", "-1.3 to +4.0", "0.345"],
        ["other", "test.error", "a&amp;b", "-0.50", "-0.75 to -0.25", "&lt;0.001"],
    ]
    assert lines(found, "clean")[1:] == [["ours", "R&lt;SUM&gt;", "a&amp;b", "+1.0", "0.0 to +2.0", "1.000"]]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ((0.3, 0.04, 0.6), ["+0.30", "+0.04 to +0.60"]),
        ((0.3, -0.001, 0.6), ["+0.300", "-0.001 to +0.600"]),
        ((0.0, 0.0, 0.0), ["0.0", "0.0 to 0.0"]),
        ((0.0, -1e-15, 1e-15), ["0.0000", "0.0000 to 0.0000"]),
    ],
)
def test_one_sees_whether_the_interval_holds_zero(figures: tuple[float, float, float], said: list[str]) -> None:
    assert lines(table(compared("clean", "ours", "test.rsum", *figures, 0.5)), "clean")[1][3:5] == said


def test_it_is_folded_on_the_page_below_the_table_of_its_setting() -> None:
    found = table(compared("noisy", "ours", "test.rsum", 2.0, 1.0, 4.0, 0.02))
    whole = comparison_page(found, [])
    assert whole.count("<details") == 1
    order = [
        whole.index(part) for part in ("t, noisy</span>", "† better", "<details class", "Differences, noisy</span>")
    ]
    assert order == sorted(order)
    assert "<summary>One difference, with its interval and p</summary>" in whole
    assert "<details" not in to_html(found)


def test_nothing_is_shown_where_nothing_was_tested() -> None:
    assert differences_to_html(table(), "clean") == []
    assert "<details" not in comparison_page(table(), [])
