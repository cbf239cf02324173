"""Comparison tables: mean ± standard deviation over seeds, as Markdown and as data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vacsr.config import Config


class Column(Config):
    """One figure of the reports."""

    key: str
    """Dotted, split first: `test.rsum`, `test.judgments.expert_tau_c`, `dev.i2t.r1`."""
    name: str = ""
    best: Literal["high", "low", "none"] = "high"
    """Which end is set in bold."""
    digits: int = 1


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


def look_up(report: dict[str, Any], key: str) -> float | None:
    """Follow a dotted key; None where a method has no such figure, or where the key names a whole section.

    >>> look_up({"test": {"rsum": 300.0}}, "test.rsum"), look_up({"test": {"uncertainty": None}}, "test.uncertainty.x")
    (300.0, None)
    """
    value: Any = report
    for part in key.split("."):
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

    def summary(self, setting: str, row: str, key: str) -> Summary | None:
        """One figure over its seeds."""
        found = [look_up(v.report, key) for v in self.values if v.setting == setting and v.row == row]
        return summarize([value for value in found if value is not None])

    def to_markdown(self) -> str:
        """One table a setting; best mean of each column in bold."""
        return "\n\n".join([f"# {self.title}", *(self._setting(setting) for setting in self.settings)]) + "\n"

    def _setting(self, setting: str) -> str:
        rows = [row for row in self.rows if any(v.row == row and v.setting == setting for v in self.values)]
        head = ["method", "seeds", *(column.name or column.key for column in self.columns)]
        lines = [head, ["---"] * len(head)]
        best = {column.key: self._best(setting, rows, column) for column in self.columns}
        for row in rows:
            seeds = len({v.seed for v in self.values if v.row == row and v.setting == setting})
            shown = [_shown(self.summary(setting, row, c.key), c, bold=best[c.key] == row) for c in self.columns]
            lines.append([row, str(seeds), *shown])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {setting}\n\n{table}"

    def _best(self, setting: str, rows: Sequence[str], column: Column) -> str | None:
        means = {row: found.mean for row in rows if (found := self.summary(setting, row, column.key))}
        if column.best == "none" or not means:
            return None
        return (max if column.best == "high" else min)(means, key=lambda row: means[row])

    def differences(self, against: str) -> str:
        """Every row's mean minus that of ``against``, and how many standard errors that is (Welch), as Markdown."""
        parts = [self._differences(setting, against) for setting in self.settings]
        return "\n\n".join([f"# {self.title}: difference from {against} (standard errors)", *parts]) + "\n"

    def _differences(self, setting: str, against: str) -> str:
        head = ["method", *(column.name or column.key for column in self.columns)]
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            pairs = [(self.summary(setting, row, c.key), self.summary(setting, against, c.key)) for c in self.columns]
            if row != against and any(ours and theirs for ours, theirs in pairs):
                shown = [_difference(*pair, column) for pair, column in zip(pairs, self.columns, strict=True)]
                lines.append([row, *shown])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {setting}\n\n{table}"

    def to_json(self) -> dict[str, Any]:
        """Every value of every seed."""
        return {
            "schema": 1,
            "title": self.title,
            "cells": [
                {
                    "setting": v.setting,
                    "row": v.row,
                    "seed": v.seed,
                    "values": {c.key: look_up(v.report, c.key) for c in self.columns},
                }
                for v in self.values
            ],
        }


def _difference(ours: Summary | None, theirs: Summary | None, column: Column) -> str:
    if ours is None or theirs is None:
        return "–"
    gap = ours.mean - theirs.mean
    error = math.sqrt(ours.std**2 / ours.seeds + theirs.std**2 / theirs.seeds)
    counted = f" ({gap / error:+.1f})" if error > 0 and min(ours.seeds, theirs.seeds) > 1 else ""
    return f"{gap:+.{column.digits}f}{counted}"


def _shown(found: Summary | None, column: Column, *, bold: bool) -> str:
    if found is None:
        return "–"
    mean = f"{found.mean:.{column.digits}f}"
    spread = f" ± {found.std:.{column.digits}f}" if found.seeds > 1 else ""
    return f"**{mean}**{spread}" if bold else mean + spread
