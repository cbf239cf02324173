"""The tested differences of one setting as a folded table: how large, how sure, against which row."""

from __future__ import annotations

from vacsr.report import html
from vacsr.report.tables import Column, Comparison, ComparisonTable, signed

_HEAD = ("row", "figure", "against", "difference", "95% interval", "p")
_MORE = 3  # digits beyond the column's, at most
_SAID = (
    "The difference is the row's figure less that of the row it stands against. The interval and the two-sided p come "
    "from a paired bootstrap over queries and know nothing of the spread over training seeds. Each p is of one "
    "difference alone, however many are listed."
)


def differences_to_html(table: ComparisonTable, setting: str) -> list[html.Html]:
    """Row by row, in the order of the columns; nothing where nothing was tested."""
    columns = [column for column in table.columns_of(setting) if not column.published]
    found = [
        (column, tested)
        for row in table.rows
        for column in columns
        if (tested := table.comparison(setting, row, column.key)) is not None
    ]
    if not found:
        return []
    rows = [_row(column, tested) for column, tested in found]
    body = html.table(_HEAD, rows, caption=f"Differences, {setting}")
    summary = html.tag("summary", html.text(_counted(len(rows))))
    return [html.tag("details", html.join(summary, html.paragraph(_SAID, style="note"), body), {"class": "tested"})]


def _counted(number: int) -> str:
    return "One difference, with its interval and p" if number == 1 else f"{number} differences, with intervals and p"


def _row(column: Column, tested: Comparison) -> html.Row:
    digits = _digits(tested, column.digits)
    difference, low, high = (signed(value, digits) for value in (tested.difference, tested.low, tested.high))
    cells = (column.head, tested.against, difference, f"{low} to {high}", p_text(tested.p))
    return html.Row(tested.row, [html.Cell(cell) for cell in cells])


def _digits(tested: Comparison, least: int) -> int:
    """Those of the column, or more where an end that is not 0 would read as 0: one sees whether the interval has 0."""
    ends = [abs(end) for end in (tested.low, tested.high) if end]
    tried = range(least, least + _MORE)
    return next((digits for digits in tried if all(round(end, digits) for end in ends)), least + _MORE)


def p_text(p: float) -> str:
    """Three digits, which is about what ten thousand draws can tell.

    >>> p_text(0.0127987), p_text(0.0002), p_text(1.0)
    ('0.013', '<0.001', '1.000')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"
