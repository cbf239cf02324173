"""Figures as SVG text: distributions one below the other, and lines over an axis. Data in, drawing out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vacsr.report import svg
from vacsr.report.html import Html
from vacsr.report.svg import WIDTH, Scale

Array = npt.NDArray[np.float64]
_POINTS = 72  # of a distribution's curve
_TAIL = 0.002  # of all values that may lie beyond either end of the axis
_RIDGE, _GAP = 40, 22  # height of a distribution, and of its words above


class Group(NamedTuple):
    """Numbers whose distribution is drawn."""

    name: str
    values: Array
    """[P], none of them NaN."""
    style: str
    """A class of page.css."""
    total: int | None = None
    """Of how many the values are a sample; None where they are all."""


class Line(NamedTuple):
    """A line of a chart."""

    name: str
    x: Array
    """[P]"""
    y: Array
    """[P]; NaN is left out."""
    style: str
    """Classes of page.css."""
    dots: bool = False


def distributions(groups: Sequence[Group], *, label: str, title: str) -> Html:
    """One curve a group, one below the other over one axis, each as high as the others; a stroke marks the median.

    ``label`` names the axis, ``title`` the figure to those who cannot see it. Groups without values stay empty.
    """
    known = [group.values for group in groups if len(group.values)]
    low, high = _range(np.concatenate(known)) if known else (0.0, 1.0)
    scale = Scale(low, high, 8, WIDTH - 8)
    bottom = len(groups) * (_RIDGE + _GAP) + 2.0
    parts = svg.x_axis(scale, top=_GAP, bottom=bottom, label=label)
    for place, group in enumerate(groups):
        parts += _ridge(group, scale, base=(place + 1) * (_RIDGE + _GAP))
    medians = ", ".join(f"{group.name} {np.median(group.values):.3f}" for group in groups if len(group.values))
    return svg.picture(parts, height=bottom + 38, label=f"{title}. Medians: {medians}.")


def _ridge(group: Group, scale: Scale, *, base: float) -> list[str]:
    """A group's curve on its base line, its name and its number above."""
    total = len(group.values) if group.total is None else group.total
    count = f"{total:,} pair{'' if total == 1 else 's'}"
    head = [
        svg.words(group.name, scale.start, base - _RIDGE - 6, style=f"name {group.style}"),
        svg.line(scale.start, base, scale.stop, base, style="axis"),
    ]
    if not len(group.values):
        return [*head, svg.words(count, scale.stop, base - _RIDGE - 6, style="tick", anchor="end")]
    at, height = density(group.values, low=scale.low, high=scale.high)
    curve = [(scale(x), base - _RIDGE * y) for x, y in zip(at, height, strict=True)]
    median = float(np.median(group.values))
    shown = f"median {median:.3f} · {count}"
    return [
        *head,
        svg.words(shown, scale.stop, base - _RIDGE - 6, style="tick", anchor="end"),
        svg.path([(scale.start, base), *curve, (scale.stop, base)], style=f"area {group.style}", closed=True),
        svg.line(scale(median), base, scale(median), base - _RIDGE, style=f"median {group.style}"),
    ]


def density(values: Array, *, low: float, high: float) -> tuple[Array, Array]:
    """A smooth histogram between low and high, its highest point 1. [P] -> places [N], heights [N]"""
    counts, edges = np.histogram(np.clip(values, low, high), bins=_POINTS, range=(low, high))
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / 1.4) ** 2)
    smooth = np.convolve(np.pad(counts.astype(np.float64), 4, mode="reflect"), kernel, mode="valid")
    return (edges[:-1] + edges[1:]) / 2, smooth / smooth.max()


def _range(values: Array) -> tuple[float, float]:
    """Ends of the axis: all values but the farthest, with a little room."""
    low, high = (float(end) for end in np.quantile(values, (_TAIL, 1 - _TAIL)))
    room = 0.02 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def lines(
    drawn: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    title: str,
    marks: Sequence[float] | None = None,
    height: float = 190,
) -> Html:
    """Lines over one pair of axes, the names above. ``marks`` are the ticks of the x axis, round numbers unless given.

    The y axis begins at 0, so that a small difference looks small.
    """
    left, right = 34.0, WIDTH - 10.0
    top = 22.0 + 17.0 * len(drawn)
    x = Scale(min(float(entry.x.min()) for entry in drawn), max(float(entry.x.max()) for entry in drawn), left, right)
    highest = max(float(np.nanmax(entry.y)) for entry in drawn)
    y = Scale(0.0, 1.08 * highest if highest > 0 else 1.0, top + height, top)
    parts = [svg.words(y_label, 2, 12, style="label")]
    for place, entry in enumerate(drawn):
        parts += _key(entry, y=28.0 + 17.0 * place)
    parts += svg.y_axis(y, left=left, right=right)
    parts += svg.x_axis(x, top=top, bottom=top + height, label=x_label, marks=marks)
    for entry in drawn:
        points = [(x(a), y(b)) for a, b in zip(entry.x, entry.y, strict=True) if not np.isnan(b)]
        parts.append(svg.path(points, style=f"line {entry.style}"))
        parts += [svg.dot(a, b, style=entry.style) for a, b in points] if entry.dots else []
    return svg.picture(parts, height=top + height + 38, label=f"{title}. {_told(drawn)}")


def _key(entry: Line, *, y: float) -> list[str]:
    """What a line is called."""
    return [
        svg.line(4, y - 4, 30, y - 4, style=f"line {entry.style}"),
        svg.words(entry.name, 38, y, style="entry"),
    ]


def _told(drawn: Sequence[Line]) -> str:
    """The ends of each line in words."""
    parts = []
    for entry in drawn:
        known = entry.y[~np.isnan(entry.y)]
        if len(known):
            parts.append(f"{entry.name}: from {known[0]:.1f} to {known[-1]:.1f}")
    return "; ".join(parts) + "."
