"""Sweeps: one parameter at a time, its default marked; ours, also by the paper's measure, and the paper's points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vacsr.report.figures import Array
from vacsr.report.html import Html
from vacsr.report.lines import Line, Marks, fitted, lines
from vacsr.report.records import SweepPoint
from vacsr.report.svg import number
from vacsr.report.tables import Column, ComparisonTable, Summary


class Sweeps(NamedTuple):
    """All sweeps of a comparison."""

    points: Sequence[SweepPoint]
    figure: str
    """What the means are of, such as "test RSUM"."""
    paper_figure: str = ""
    """What the paper's figures are of, such as "mAP@R, COCO, ViT-B/32"."""
    alike_figure: str = ""
    """What ours are of that are of the paper's kind, such as "mAP@R, both directions"."""


class SweepFigure(NamedTuple):
    """The drawings of one parameter's sweep."""

    name: str
    ours: Html
    alike: Html | None
    paper: Html | None


def sweeps_of(table: ComparisonTable) -> list[Sweeps]:
    """The table's own curves: of its first figure with a better end, one group a setting.

    The paper's are of the first column with published figures for two rows or more; beside them stand ours of the same
    name on our data.
    """
    column = next((c for c in table.columns if c.best != "none" and not c.published), None)
    if column is None or not table.sweeps:
        return []
    found = []
    for setting in table.settings:
        theirs = _published(table, setting)
        points = list(_points(table, setting, column, theirs))
        where = f", {setting}" if len(table.settings) > 1 else ""
        if points and theirs is None:
            found.append(Sweeps(points, f"{column.head}{where}"))
        elif points and theirs is not None:
            said = theirs.head.removeprefix("paper: ")
            alike = f"{said.partition(',')[0]}, mean of both directions" if ".mean." in theirs.key else said
            found.append(Sweeps(points, f"{column.head}{where}", said, f"{alike}{where}"))
    return found


def _points(table: ComparisonTable, setting: str, column: Column, theirs: Column | None) -> Iterator[SweepPoint]:
    """Those of every row that was run."""
    for row, sweep in table.sweeps:
        ours = table.summary(setting, row, column.key)
        if ours is None:
            continue
        point = SweepPoint(sweep.name, sweep.value, sweep.default, ours.mean, _std(ours))
        if theirs is not None:
            alike, paper = table.summary(setting, row, _own(theirs)), table.beside(setting, row, theirs.key)
            point = point._replace(
                alike=None if alike is None else (alike.mean, _std(alike)),
                paper=None if paper is None else paper.middle,
            )
        yield point


def _std(found: Summary) -> float | None:
    return found.std if found.seeds > 1 else None


def _own(theirs: Column) -> str:
    """The key of our figure of the same name, whichever protocol theirs is of."""
    split, _, figure = theirs.key.partition(".")
    return f"{split.partition('/')[0]}.{figure}"


def _published(table: ComparisonTable, setting: str) -> Column | None:
    for column in table.columns:
        known = [table.beside(setting, row, column.key) for row, _ in table.sweeps if column.published]
        if sum(value is not None for value in known) >= 2:
            return column
    return None


def sweep_figures(sweeps: Sweeps) -> Iterator[SweepFigure]:
    """One a parameter, in the order of their first points. By the paper's measure our axis is as long as theirs."""
    for name in dict.fromkeys(point.name for point in sweeps.points):
        points = sorted((point for point in sweeps.points if point.name == name), key=lambda point: point.value)
        ours = _ours(sweeps.figure, [(point.mean, point.std) for point in points])
        alike, paper = _alike(points, sweeps), _paper(points, sweeps)
        spans = [high - low for low, high in (fitted([line]) for line in (alike, paper) if line is not None)]
        least = max(spans, default=0.0)
        yield SweepFigure(
            name,
            _draw(ours, points, label=_said(ours)),
            None if alike is None else _draw(alike, points, label=_said(alike), least=least),
            None if paper is None else _draw(paper, points, label="as printed in the paper", least=least),
        )


def _ours(name: str, figures: Sequence[tuple[float, float | None]]) -> Line:
    """A line with a band; points of one seed are rings without one."""
    spread = _known([std for _, std in figures])
    single, several = np.isnan(spread), not np.isnan(spread).all()
    return Line(
        name,
        _places(figures),
        np.array([mean for mean, _ in figures]),
        "vacsr",
        dots=True,
        spread=spread if several else None,
        hollow=single if several else None,
    )


def _said(line: Line) -> str:
    if line.spread is None or line.hollow is None:
        return "one seed"
    return "mean over seeds, band: one std" + (", ring: one seed" if line.hollow.any() else "")


def _alike(points: Sequence[SweepPoint], sweeps: Sweeps) -> Line | None:
    """None where some point has no such figure, or where the paper gives fewer than two."""
    figures = [point.alike for point in points if point.alike is not None]
    if len(figures) < len(points) or _paper(points, sweeps) is None:
        return None
    return _ours(sweeps.alike_figure, figures)


def _paper(points: Sequence[SweepPoint], sweeps: Sweeps) -> Line | None:
    """Points without a line, for nobody knows what lies between; None where the paper gives fewer than two figures."""
    values = _known([point.paper for point in points])
    if (~np.isnan(values)).sum() < 2:
        return None
    return Line(f"paper: {sweeps.paper_figure}", _places(points), values, "published", joined=False)


def _draw(drawn: Line, points: Sequence[SweepPoint], *, label: str, least: float = 0.0) -> Html:
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
        ends=fitted([drawn], least=least),
        height=150,
    )


def _known(values: Sequence[float | None]) -> Array:
    """NaN for None. [P]"""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _places(points: Sequence[object]) -> Array:
    """Even steps: values such as 0, 5e-5, 1e-2 fit no common axis. [P]"""
    return np.arange(len(points), dtype=np.float64)
