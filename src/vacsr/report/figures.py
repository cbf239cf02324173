"""Figures as SVG text: distributions one below the other over one axis. Data in, drawing out."""

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
    medians = ", ".join(f"{group.name} {np.median(group.values):z.3f}" for group in groups if len(group.values))
    return svg.picture(parts, height=bottom + 38, label=f"{title}. Medians: {medians}.")


class Counts(NamedTuple):
    """A distribution that was counted already."""

    name: str
    counts: Array
    """[B], one a bin."""
    style: str
    """A class of page.css."""
    note: str = ""
    """What is said of it: mean, median and so on."""
    median: float | None = None


def histograms(groups: Sequence[Counts], *, edges: Array, label: str, title: str) -> Html:
    """One histogram a group, one below the other over one axis, each as high as the others; a stroke is the median.

    ``edges`` [B + 1] are of the bins of all groups.
    """
    scale = Scale(float(edges[0]), float(edges[-1]), 8, WIDTH - 8)
    bottom = len(groups) * (_RIDGE + _GAP) + 2.0
    parts = svg.x_axis(scale, top=_GAP, bottom=bottom, label=label)
    for place, group in enumerate(groups):
        parts += _bars(group, edges, scale, base=(place + 1) * (_RIDGE + _GAP))
    told = "; ".join(f"{group.name}: {group.note}" for group in groups if group.note)
    return svg.picture(parts, height=bottom + 38, label=f"{title}. {told}.")


def _bars(group: Counts, edges: Array, scale: Scale, *, base: float) -> list[str]:
    parts = [
        svg.words(group.name, scale.start, base - _RIDGE - 6, style=f"name {group.style}"),
        svg.words(group.note, scale.stop, base - _RIDGE - 6, style="tick", anchor="end"),
        svg.line(scale.start, base, scale.stop, base, style="axis"),
    ]
    highest = float(group.counts.max(initial=0.0))
    if highest > 0:
        heights = base - _RIDGE * group.counts / highest
        across = [scale(edge) for edge in np.repeat(edges, 2)[1:-1]]
        steps = list(zip(across, np.repeat(heights, 2).tolist(), strict=True))
        outline = [(across[0], base), *steps, (across[-1], base)]
        parts.append(svg.path(outline, style=f"area {group.style}", closed=True))
    if group.median is not None:
        at = scale(group.median)
        parts.append(svg.line(at, base, at, base - _RIDGE, style=f"median {group.style}"))
    return parts


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
    shown = f"median {median:z.3f} · {count}"
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
