"""What a benchmark found: rows of figures as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vacsr.bench.figure import Mark, Row, dots
from vacsr.report.svg import number

Cell = str | float | None


@dataclass(frozen=True)
class BenchResult:
    """Figures of several ways, taken in one run."""

    bench: str
    where: str
    """GPU or CPU, threads, torch."""
    settings: Mapping[str, Any]
    """Sizes: what the figures are of."""
    rows: Sequence[Mapping[str, Cell]]
    """One a way; ``way`` names it, ``problem`` says why it has no figures."""
    columns: Mapping[str, str]
    """Keys that the table shows, with their heads."""
    drawn: Sequence[str]
    """The keys that the figure shows, a panel each."""
    notes: Sequence[str] = ()
    label: str = "way"
    """The key that names a row of the figure."""

    def to_json(self) -> dict[str, Any]:
        """Everything but how it is shown."""
        known = {"bench": self.bench, "where": self.where, "settings": dict(self.settings)}
        return {"schema": 1, **known, "rows": [dict(row) for row in self.rows], "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A table, and under it what it was measured on."""
        lines = [list(self.columns.values()), [_rule(self.rows, key) for key in self.columns]]
        lines += [[_shown(row, key) for key in self.columns] for row in self.rows]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([*table, "", self._told(), *self.notes])

    def to_svg(self) -> str:
        """The drawn figures, as a file of its own. A way that failed says why; one without any of them is left out."""
        rows = [
            Row(str(row[self.label]), [_mark(row, key) for key in self.drawn])
            for row in self.rows
            if row.get("problem") or any(isinstance(row.get(key), float) for key in self.drawn)
        ]
        return dots(rows, panels=[self.columns[key] for key in self.drawn], title=self.bench, note=self._told())

    def _told(self) -> str:
        sizes = ", ".join(f"{name} {_figure(value)}" for name, value in self.settings.items())
        return f"{sizes}; {self.where}."


def _rule(rows: Sequence[Mapping[str, Cell]], key: str) -> str:
    return "---:" if any(isinstance(row.get(key), float) for row in rows) else "---"


def _shown(row: Mapping[str, Cell], key: str) -> str:
    """A cell; a way without figures says why in its name."""
    value = row.get(key)
    if key == "way" and row.get("problem"):
        return f"{value} ({row['problem']})"
    return "–" if value is None else _figure(value)


def _mark(row: Mapping[str, Cell], key: str) -> Mark:
    """Of the figure: a value, or why there is none."""
    value = row.get(key)
    if isinstance(value, float):
        return Mark(value, _figure(value))
    return Mark(None, str(row.get("problem") or "–"))


def _figure(value: Any) -> str:
    """Three digits of a float, the rest as it is.

    >>> _figure(0.0123456), _figure(1234.5), _figure(5000), _figure("a")
    ('0.0123', '1,234', '5,000', 'a')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return number(float(f"{value:.3g}"))
