"""Lines over one pair of axes, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vacsr.report import svg
from vacsr.report.figures import Array
from vacsr.report.html import Html
from vacsr.report.svg import WIDTH, Scale

Mask = npt.NDArray[np.bool_]
_LEFT, _RIGHT = 36.0, WIDTH - 10.0
_ENTRY = 17.0  # height of a line's name


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
    spread: Array | None = None
    """[P]; a band reaches this far above and below the line, and is open where this is NaN."""
    joined: bool = True
    """Whether there is a line; without it points stand alone."""
    hollow: Mask | None = None
    """[P]; which dots are only a ring."""


class Marks(NamedTuple):
    """What stands below the x axis, where round numbers will not do."""

    at: Sequence[float]
    names: Sequence[str] = ()
    """As many as marks, or none for their numbers."""
    chosen: float | None = None
    """A place to mark with a vertical stroke."""
    chosen_name: str = ""


def lines(
    drawn: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    title: str,
    marks: Marks | None = None,
    ends: tuple[float, float] | None = None,
    height: float = 190,
    digits: int = 1,
) -> Html:
    """Lines over one pair of axes, the names above.

    The y axis holds 0, so that a small difference looks small, unless ``ends`` are given. ``digits`` is how exactly
    the lines' ends are told to those who cannot see them.
    """
    known = [entry for entry in drawn if len(entry.x) and not np.isnan(entry.y).all()]
    if not known:
        return svg.picture([svg.words("no figures", 2, 12, style="label")], height=20, label=f"{title}. No figures.")
    top = 22.0 + _ENTRY * len(known)
    x = Scale(*_x_ends(known, marks), _LEFT, _RIGHT)
    y = Scale(*(ends or _y_ends(known)), top + height, top)
    parts = [svg.words(y_label, 2, 12, style="label")]
    for place, entry in enumerate(known):
        parts += _key(entry, y=28.0 + _ENTRY * place)
    parts += svg.y_axis(y, left=_LEFT, right=_RIGHT)
    at, names = (None, ()) if marks is None else (marks.at, marks.names)
    parts += svg.x_axis(x, top=top, bottom=top + height, label=x_label, marks=at, names=names)
    parts += _chosen(marks, x, top=top, bottom=top + height)
    for entry in known:
        parts += _line(entry, x, y)
    return svg.picture(parts, height=top + height + 38, label=f"{title}. {_told(known, digits=digits)}")


def fitted(drawn: Sequence[Line], *, room: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """Ends of a y axis that holds the lines with their bands and little else, but spans ``least`` or more."""
    low = min(float(np.nanmin(entry.y - _band(entry))) for entry in drawn if not np.isnan(entry.y).all())
    high = max(float(np.nanmax(entry.y + _band(entry))) for entry in drawn if not np.isnan(entry.y).all())
    size = (high - low) or abs(high) or 1.0
    more = max(room * size, (least - (high - low)) / 2)
    return low - more, high + more


def _spread(entry: Line) -> Array:
    return np.full_like(entry.y, np.nan) if entry.spread is None else entry.spread


def _band(entry: Line) -> Array:
    return np.nan_to_num(_spread(entry))


def _x_ends(drawn: Sequence[Line], marks: Marks | None) -> tuple[float, float]:
    places = [*(float(entry.x.min()) for entry in drawn), *(float(entry.x.max()) for entry in drawn)]
    places += [] if marks is None else [float(at) for at in marks.at]
    low, high = min(places), max(places)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _y_ends(drawn: Sequence[Line]) -> tuple[float, float]:
    """From 0, or from below it where a line goes there."""
    low = min(0.0, *(float(np.nanmin(entry.y - _band(entry))) for entry in drawn), 0.0)
    high = max(0.0, *(float(np.nanmax(entry.y + _band(entry))) for entry in drawn), 0.0)
    if high == low:
        return 0.0, 1.0
    return 1.08 * low, 1.08 * high


def _key(entry: Line, *, y: float) -> list[str]:
    """What a line is called."""
    sign = svg.line(4, y - 4, 30, y - 4, style=f"line {entry.style}")
    return [
        sign if entry.joined else svg.dot(17, y - 4, style=entry.style),
        svg.words(entry.name, 38, y, style="entry"),
    ]


def _chosen(marks: Marks | None, x: Scale, *, top: float, bottom: float) -> list[str]:
    if marks is None or marks.chosen is None:
        return []
    at = x(marks.chosen)
    side = "end" if at > (x.start + x.stop) / 2 else "start"
    return [
        svg.line(at, top, at, bottom, style="chosen"),
        svg.words(marks.chosen_name, at + (-5 if side == "end" else 5), top + 11, style="tick", anchor=side),
    ]


def _line(entry: Line, x: Scale, y: Scale) -> list[str]:
    known = ~np.isnan(entry.y)
    points = [(x(a), y(b)) for a, b in zip(entry.x[known], entry.y[known], strict=True)]
    parts = _bands(entry, known, x, y) if entry.spread is not None and len(points) > 1 else []
    parts += [svg.path(points, style=f"line {entry.style}")] if entry.joined else []
    if not (entry.dots or not entry.joined or len(points) == 1):
        return parts
    rings = np.zeros(len(points), dtype=bool) if entry.hollow is None else entry.hollow[known]
    return parts + [
        svg.dot(a, b, style=f"{entry.style}{' hollow' if ring else ''}")
        for (a, b), ring in zip(points, rings, strict=True)
    ]


def _bands(entry: Line, known: Mask, x: Scale, y: Scale) -> list[str]:
    """One where points with a spread follow each other, an upright stroke where one stands alone."""
    parts = []
    places = np.flatnonzero(known & ~np.isnan(_spread(entry)))
    for group in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        band = _band(entry)[group]
        across = [x(value) for value in entry.x[group]]
        upper = list(zip(across, [y(value) for value in entry.y[group] + band], strict=True))
        lower = list(zip(across, [y(value) for value in entry.y[group] - band], strict=True))
        if len(group) == 1:
            parts.append(svg.line(*upper[0], *lower[0], style=f"whisker {entry.style}"))
        elif len(group):
            parts.append(svg.path([*upper, *reversed(lower)], style=f"band {entry.style}", closed=True))
    return parts


def _told(drawn: Sequence[Line], *, digits: int) -> str:
    """The ends of each line in words, or every point that stands alone."""
    parts = []
    for entry in drawn:
        known = [f"{value:z.{digits}f}" for value in entry.y[~np.isnan(entry.y)]]
        said = f"from {known[0]} to {known[-1]}" if entry.joined else ", ".join(known)
        parts.append(f"{entry.name}: {said}")
    return "; ".join(parts) + "."
