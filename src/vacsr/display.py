"""Results as tables: a pandas DataFrame, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vacsr.errors import EnvironmentProblem


def data_frame(rows: Iterable[dict[str, Any]]) -> Any:
    """A pandas DataFrame, one row per dictionary; names of nested ones are joined by dots, lists are left out.

    >>> data_frame([{"split": "test", "i2t": {"r1": 50.0, "bins": [1, 2]}}]).to_dict("records")
    [{'split': 'test', 'i2t.r1': 50.0}]
    """
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentProblem("pandas is not installed — run: pip install pandas, or use to_dict()") from error
    frame = pandas.json_normalize(list(rows))
    return frame.loc[:, ~frame.map(lambda cell: isinstance(cell, list | tuple)).any()]


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """What a notebook shows of a result.

    >>> html_table(["id"], [["<b>"]])
    '<table><tr><th>id</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
