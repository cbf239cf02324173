"""Sweeps: one parameter at a time, its default marked, and the paper's own curve beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vacsr.report.html import Html
from vacsr.report.lines import Line, Marks, fitted, lines
from vacsr.report.records import SweepPoint
from vacsr.report.svg import number
from vacsr.report.tables import Column, ComparisonTable


class Sweeps(NamedTuple):
    """All sweeps of a comparison."""

    points: Sequence[SweepPoint]
    figure: str
    """What the means are of, such as "test RSUM"."""
    paper_figure: str = ""
    """What the paper's figures are of, such as "mAP@R, COCO, ViT-B/32"."""


class SweepFigure(NamedTuple):
    """The drawing of one parameter's sweep."""

    name: str
    ours: Html
    paper: Html | None


def sweeps_of(table: ComparisonTable) -> list[Sweeps]:
    """The table's own curves: of its first figure with a better end, one group a setting.

    The paper's are of the first column with published figures for two rows or more.
    """
    column = next((c for c in table.columns if c.best != "none" and not c.published), None)
    if column is None or not table.sweeps:
        return []
    found = []
    for setting in table.settings:
        theirs = _published(table, setting)
        points = []
        for row, sweep in table.sweeps:
            ours = table.summary(setting, row, column.key)
            paper = None if theirs is None else table.beside(setting, row, theirs.key)
            if ours is not None:
                points.append(SweepPoint(sweep.name, sweep.value, sweep.default, ours.mean, ours.std, paper))
        where = f", {setting}" if len(table.settings) > 1 else ""
        if points:
            found.append(Sweeps(points, f"{column.head}{where}", "" if theirs is None else theirs.head))
    return found


def _published(table: ComparisonTable, setting: str) -> Column | None:
    for column in table.columns:
        known = [table.beside(setting, row, column.key) for row, _ in table.sweeps if column.published]
        if sum(value is not None for value in known) >= 2:
            return column
    return None


def sweep_figures(sweeps: Sweeps) -> Iterator[SweepFigure]:
    """One a parameter, in the order of their first points."""
    for name in dict.fromkeys(point.name for point in sweeps.points):
        points = sorted((point for point in sweeps.points if point.name == name), key=lambda point: point.value)
        yield SweepFigure(name, _ours(points, sweeps), _paper(points, sweeps))


def _ours(points: Sequence[SweepPoint], sweeps: Sweeps) -> Html:
    spread = np.array([point.std for point in points])
    drawn = Line(
        sweeps.figure,
        _places(points),
        np.array([point.mean for point in points]),
        "vacsr",
        dots=True,
        spread=spread if spread.any() else None,
    )
    return _draw(drawn, points, label="mean over seeds" + (", band: one standard deviation" if spread.any() else ""))


def _paper(points: Sequence[SweepPoint], sweeps: Sweeps) -> Html | None:
    """None where the paper gives fewer than two figures."""
    values = np.array([np.nan if point.paper is None else point.paper for point in points])
    if (~np.isnan(values)).sum() < 2:
        return None
    drawn = Line(f"paper: {sweeps.paper_figure}", _places(points), values, "published", dots=True)
    return _draw(drawn, points, label="as printed in the paper")


def _draw(drawn: Line, points: Sequence[SweepPoint], *, label: str) -> Html:
    chosen = next((float(place) for place, point in enumerate(points) if point.default), None)
    names = [number(point.value) for point in points]
    marks = Marks(_places(points).tolist(), names, chosen, "default")
    name = points[0].name
    return lines(
        [drawn],
        x_label=name,
        y_label=label,
        title=f"{drawn.name} by {name}",
        marks=marks,
        ends=fitted([drawn]),
        height=150,
    )


def _places(points: Sequence[SweepPoint]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Even steps: values such as 0, 5e-5, 1e-2 fit no common axis."""
    return np.arange(len(points), dtype=np.float64)
