"""Results as tables: a pandas DataFrame, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vacsr.errors import EnvironmentProblem


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined by dots; lists, which fit no cell, are left out.

    >>> flatten({"split": "test", "i2t": {"r1": 50.0, "bins": [1, 2]}})
    {'split': 'test', 'i2t.r1': 50.0}
    """
    row: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            row |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            row[f"{prefix}{name}"] = value
    return row


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame, one row per mapping."""
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentProblem("pandas is not installed — run: pip install pandas, or use to_dict()") from error
    return pandas.DataFrame([flatten(row) for row in rows])


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """What a notebook shows of a result.

    >>> html_table(["id"], [["<b>"]])
    '<table><tr><th>id</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
