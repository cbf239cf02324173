"""Sweeps: one parameter at a time, its default marked; ours, ours by the paper's metric, and the paper's points."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vacsr.pages.curves import Plot
from vacsr.pages.plots import Array, Line, line_plot, value_range


class SweepPoint(NamedTuple):
    """One value of a parameter, all others at their defaults."""

    name: str  # of the parameter
    value: float
    default: bool
    mean: float
    std: float | None  # None for a single seed
    alike: tuple[float, float | None] | None = None  # mean and deviation of our number of the paper's kind
    paper: float | None = None  # the paper's own number at this value, on its data


class Sweeps(NamedTuple):
    """All sweeps of a setting."""

    points: Sequence[SweepPoint]
    metric: str  # what the means are of, such as "test RSUM"
    paper_metric: str = ""  # what the paper's numbers are of, such as "mAP@R, COCO, ViT-B/32"
    alike_metric: str = ""  # ours of the paper's kind, such as "mAP@R, mean of both directions"


def sweep_plots(sweeps: Sweeps) -> Iterator[Plot]:
    """Ours per parameter; where the paper has points, ours by its metric and the paper's, over axes of equal length."""
    for name in dict.fromkeys(point.name for point in sweeps.points):
        points = sorted((point for point in sweeps.points if point.name == name), key=lambda point: point.value)
        ours = _sweep_line(sweeps.metric, [(point.mean, point.std) for point in points])
        paper = _optional_values([point.paper for point in points])
        yield Plot(name, _sweep_plot(ours, points), f"Ours: {sweeps.metric}.")
        if (~np.isnan(paper)).sum() < 2:
            continue
        theirs = Line(f"paper: {sweeps.paper_metric}", np.arange(float(len(points))), paper, "published", joined=False)
        alike = None
        if all(point.alike is not None for point in points):
            alike = _sweep_line(sweeps.alike_metric, [point.alike for point in points if point.alike is not None])
        ranges = [value_range([line]) for line in (theirs, alike) if line is not None]
        least = max(high - low for low, high in ranges)
        if alike is not None:
            picture = _sweep_plot(alike, points, least=least)
            yield Plot(f"{name}, the paper's metric", picture, f"Ours: {sweeps.alike_metric}.")
        caption = f"The paper's own: {sweeps.paper_metric}. Only these points are printed."
        yield Plot(f"{name}, paper", _sweep_plot(theirs, points, least=least, label="as printed"), caption)


def _sweep_line(name: str, values: Sequence[tuple[float, float | None]]) -> Line:
    """With a band where there are several seeds."""
    std = _optional_values([std for _, std in values])
    x, y = np.arange(float(len(values))), np.array([mean for mean, _ in values])
    return Line(name, x, y, dots=True, std=None if np.isnan(std).all() else std)


def _sweep_plot(line: Line, points: Sequence[SweepPoint], *, least: float = 0.0, label: str = "") -> Markup:
    """Values in even steps: 0, 5e-5 and 1e-2 fit no common axis."""
    if not label:
        rings = ", ring: one seed" if line.std is not None and np.isnan(line.std).any() else ""
        label = "one seed" if line.std is None else f"mean over seeds, band: one std{rings}"
    return line_plot(
        [line],
        title=f"{line.name} by {points[0].name}",
        x_label=points[0].name,
        y_label=label,
        ticks=line.x.tolist(),
        tick_labels=[f"{point.value:.4g}" for point in points],
        marked=next((float(at) for at, point in enumerate(points) if point.default), None),
        y_range=value_range([line], least=least),
        height=150,
    )


def _optional_values(values: Sequence[float | None]) -> Array:
    """NaN for None. [P]"""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
