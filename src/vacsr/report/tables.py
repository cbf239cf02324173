"""Comparison tables: figures by row, setting and seed, mean ± standard deviation, and what others published."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from vacsr.config import Config


class Column(Config):
    """One figure of the reports."""

    key: str
    """Dotted, split first: `test.rsum`, `test.mean.r1` (both directions), `test/eccv.i2t.map_at_r` (one protocol)."""
    name: str = ""
    """Head of the column; the key unless given."""
    best: Literal["high", "low", "none"] = "high"
    """Which end is set in bold."""
    digits: int = 1
    """After the point."""
    published: bool = False
    """The figure that others published for the row, on their data: never bold, never tested."""
    settings: tuple[str, ...] = ()
    """Those whose tables have the column; empty for all."""

    @property
    def head(self) -> str:
        """What stands above the figures."""
        return self.name or self.key


class Sweep(Config):
    """A row as a point of a curve."""

    name: str
    """The curve: rows of one name belong together."""
    value: float
    """Where the point stands."""
    default: bool = False
    """The value that the method has unless told otherwise."""


class Printed(NamedTuple):
    """A figure of others as they printed it."""

    low: float
    high: float
    """The same, unless they printed a range."""

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.low + self.high) / 2

    @property
    def whole(self) -> float | str:
        """All that was printed: a number, or both ends."""
        low, high = self.low + 0.0, self.high + 0.0  # -0.0 becomes 0.0
        return low if low == high else f"{low}–{high}"

    def text(self, digits: int) -> str:
        """As it stands in a table.

        >>> Printed(40.7, 40.7).text(1), Printed(40.2, 40.3).text(1)
        ('40.7', '40.2–40.3')
        """
        ends = dict.fromkeys(f"{end:z.{digits}f}" for end in self)
        return "–".join(ends)


class Published(Config):
    """Figures that others printed; shown as theirs, never bold, never tested."""

    name: str
    """What they call the method."""
    values: dict[str, float | None]
    """By column key; None where they printed none."""
    upper: dict[str, float] = Field(default_factory=dict)
    """By column key, where they printed a range: its upper end, of which the value is the lower."""
    source: str
    """Where they stand."""
    setting: str = ""
    """Of ours that it belongs to; empty for all."""
    beside: str = ""
    """Our row that the figures stand beside, in columns marked `published`; empty gives them a row of their own."""
    data: str = ""
    """Beginning of data.pairs for which a row of their own may stand among ours, such as `coco:`."""
    note: str = ""
    """What differs, told below the table."""

    def figure(self, key: str) -> float | None:
        """What was printed under a column's key; `mean` is of both directions where these were printed."""
        if key in self.values or ".mean." not in key:
            return self.values.get(key)
        both = [self.values.get(key.replace(".mean.", f".{direction}.")) for direction in ("i2t", "t2i")]
        return None if None in both else statistics.fmean(v for v in both if v is not None)

    def printed(self, key: str) -> Printed | None:
        """The figure, or the range, that was printed under a column's key."""
        value = self.figure(key)
        return None if value is None else Printed(value, self.upper.get(key, value))


class CellValues(NamedTuple):
    """The report of one cell, by split."""

    row: str
    setting: str
    seed: int
    report: dict[str, Any]


class Summary(NamedTuple):
    """Mean and spread over seeds."""

    mean: float
    std: float
    seeds: int


class Comparison(NamedTuple):
    """A row's figure less the best baseline's, and whether queries drawn anew would say the same."""

    setting: str
    row: str
    key: str
    against: str
    difference: float
    low: float
    """The 95% interval of the difference begins here,"""
    high: float
    """and ends here."""
    p: float
    """Two-sided."""

    @property
    def clear(self) -> bool:
        """Zero is outside of the interval."""
        return self.low > 0 or self.high < 0


def look_up(report: dict[str, Any], key: str) -> float | None:
    """Follow a dotted key; None where a method has no such figure, or where the key names a whole section.

    `mean` stands for both directions, where a result has these.

    >>> look_up({"test": {"rsum": 300.0}}, "test.rsum"), look_up({"test": {"uncertainty": None}}, "test.uncertainty.x")
    (300.0, None)
    >>> look_up({"test": {"i2t": {"r1": 20.0}, "t2i": {"r1": 10.0}}}, "test.mean.r1")
    15.0
    """
    value: Any = report
    parts = key.split(".")
    for place, part in enumerate(parts):
        if part == "mean" and isinstance(value, dict) and {"i2t", "t2i"} <= value.keys() and "mean" not in value:
            rest = ".".join(parts[place + 1 :])
            both = [look_up(value, f"{direction}.{rest}") for direction in ("i2t", "t2i")]
            return None if None in both else statistics.fmean(v for v in both if v is not None)
        value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and sample standard deviation (0 for a single value)."""
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


@dataclass(frozen=True)
class ComparisonTable:
    """Rows × settings × columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    settings: tuple[str, ...]
    values: tuple[CellValues, ...]
    baselines: tuple[str, ...] = ()
    """Rows that the others are tested against."""
    comparisons: tuple[Comparison, ...] = ()
    """With the best baseline of each setting and column."""
    published: tuple[Published, ...] = ()
    sweeps: tuple[tuple[str, Sweep], ...] = ()
    """Rows that are points of curves."""
    note: str = ""
    """Told below the title."""

    def summary(self, setting: str, row: str, key: str) -> Summary | None:
        """One figure over its seeds."""
        found = [look_up(v.report, key) for v in self.values if v.setting == setting and v.row == row]
        return summarize([value for value in found if value is not None])

    def columns_of(self, setting: str) -> tuple[Column, ...]:
        """The columns of one setting's table."""
        return tuple(column for column in self.columns if not column.settings or setting in column.settings)

    def shown_rows(self, setting: str) -> list[str]:
        """Rows of which some cell is there."""
        present = {value.row for value in self.values if value.setting == setting}
        return [row for row in self.rows if row in present]

    def seeds(self, setting: str, row: str) -> int:
        """How many runs the figures come from."""
        return len({v.seed for v in self.values if v.row == row and v.setting == setting})

    def best(self, setting: str, column: Column, *, among: Sequence[str]) -> str | None:
        """The row with the best mean, however many seeds it has; the first of equals."""
        if column.best == "none" or column.published:
            return None
        means = {row: found.mean for row in among if (found := self.summary(setting, row, column.key))}
        if not means:
            return None
        return (max if column.best == "high" else min)(means, key=lambda row: means[row])

    def leading(self, setting: str, column: Column) -> list[str]:
        """What is set in bold: the rows with the best mean, all of equals, or none where these have fewer seeds.

        One lucky seed beats a mean over several too easily to be called the best.
        """
        found = {row: one for row in self.shown_rows(setting) if (one := self.summary(setting, row, column.key))}
        first = self.best(setting, column, among=list(found))
        if first is None:
            return []
        most = max(one.seeds for one in found.values())
        return [row for row, one in found.items() if one.seeds == most and math.isclose(one.mean, found[first].mean)]

    def comparison(self, setting: str, row: str, key: str) -> Comparison | None:
        """What was tested of one figure."""
        for found in self.comparisons:
            if (found.setting, found.row, found.key) == (setting, row, key):
                return found
        return None

    def beside(self, setting: str, row: str, key: str) -> Printed | None:
        """What others published of the row that ours is."""
        found = [e.printed(key) for e in self.published if e.beside == row and e.setting in ("", setting)]
        return next((printed for printed in found if printed is not None), None)

    def published_rows(self, setting: str) -> list[Published]:
        """Published figures with a row of their own."""
        keys = [column.key for column in self.columns_of(setting) if not column.published]
        rows = [entry for entry in self.published if not entry.beside and entry.setting in ("", setting)]
        return [entry for entry in rows if any(entry.figure(key) is not None for key in keys)]

    def differences(self, against: str) -> str:
        """Every row's mean minus that of ``against``, and how many standard errors that is (Welch), as Markdown."""
        parts = [self._differences(setting, against) for setting in self.settings]
        return "\n\n".join([f"# {self.title}: difference from {against} (standard errors)", *parts]) + "\n"

    def _differences(self, setting: str, against: str) -> str:
        columns = [column for column in self.columns_of(setting) if not column.published]
        head = ["method", *(column.head for column in columns)]
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            pairs = [(self.summary(setting, row, c.key), self.summary(setting, against, c.key)) for c in columns]
            if row != against and any(ours and theirs for ours, theirs in pairs):
                shown = [_difference(*pair, column) for pair, column in zip(pairs, columns, strict=True)]
                lines.append([row, *shown])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {setting}\n\n{table}"


def _difference(ours: Summary | None, theirs: Summary | None, column: Column) -> str:
    if ours is None or theirs is None:
        return "–"
    gap = ours.mean - theirs.mean
    error = math.sqrt(ours.std**2 / ours.seeds + theirs.std**2 / theirs.seeds)
    counted = f" ({signed(gap / error, 1)})" if error > 0 and min(ours.seeds, theirs.seeds) > 1 else ""
    return f"{signed(gap, column.digits)}{counted}"


def signed(value: float, digits: int) -> str:
    """With its sign, which what rounds to zero has not.

    >>> signed(1.25, 1), signed(-0.04, 1), signed(0.04, 1)
    ('+1.2', '0.0', '0.0')
    """
    shown = f"{value:+z.{digits}f}"
    return shown if float(shown) else shown[1:]
