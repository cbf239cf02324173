"""What figures are drawn with: scales, round ticks, lines and words in SVG. Colours come from page.css by class."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from vacsr.report.html import Html

WIDTH = 340
"""Of every figure, in SVG units: at this width on a phone, words keep their size."""


@dataclass(frozen=True)
class Scale:
    """Maps the numbers from ``low`` to ``high`` onto the picture from ``start`` to ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Where a number lies; beyond the ends it is moved to the end.

        >>> Scale(0, 10, 100, 200)(5)
        150.0
        """
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About ``count`` round numbers within low to high.

    >>> ticks(0.03, 0.41)
    [0.1, 0.2, 0.3, 0.4]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def number(value: float) -> str:
    """As short as it can be.

    >>> number(0.1), number(-2.0), number(1e-12)
    ('0.1', '-2', '0')
    """
    return f"{value:.4g}" if abs(value) > 1e-9 else "0"


def picture(parts: Sequence[str], *, height: float, label: str, width: float = WIDTH) -> Html:
    """The whole drawing; ``label`` is read to those who cannot see it."""
    box = f'viewBox="0 0 {width:g} {height:g}"'
    inner = "\n".join(parts)
    return Html(f'<svg {box} role="img" aria-label="{html.escape(label)}">\n{inner}\n</svg>')


def line(x1: float, y1: float, x2: float, y2: float, *, style: str) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]], *, style: str, closed: bool = False) -> str:
    """A line through points, or the area inside."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{style}" d="M{steps}{"Z" if closed else ""}"/>'


def words(said: str, x: float, y: float, *, style: str = "", anchor: str = "start") -> str:
    """A line of text; ``anchor`` is start, middle or end."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(said)}</text>'


def dot(x: float, y: float, *, style: str) -> str:
    """A mark on a line."""
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def x_axis(
    scale: Scale,
    *,
    top: float,
    bottom: float,
    label: str,
    marks: Sequence[float] | None = None,
    names: Sequence[str] = (),
) -> list[str]:
    """Fine vertical lines with their numbers below, or with ``names`` instead, and what they mean."""
    parts = []
    places = ticks(scale.low, scale.high) if marks is None else marks
    for value, name in zip(places, names or [number(place) for place in places], strict=True):
        at = scale(value)
        parts.append(line(at, top, at, bottom, style="grid"))
        parts.append(words(name, at, bottom + 14, style="tick", anchor="middle"))
    parts.append(words(label, (scale.start + scale.stop) / 2, bottom + 31, style="label", anchor="middle"))
    return parts


def y_axis(scale: Scale, *, left: float, right: float) -> list[str]:
    """Fine horizontal lines with their numbers on the left."""
    parts = []
    for value in ticks(scale.low, scale.high):
        at = scale(value)
        parts.append(line(left, at, right, at, style="grid"))
        parts.append(words(number(value), left - 5, at + 4, style="tick", anchor="end"))
    return parts
