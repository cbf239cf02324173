"""Dots on logarithmic axes with their names and numbers, as an SVG file that needs no page around it.

A dot says where a value lies; a bar's length would say nothing on an axis that has no zero, and on one that has, a
hundredth of the longest bar cannot be seen.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from vacsr.report import svg
from vacsr.report.svg import Scale

_LETTER = 7.2  # pixels of a letter at 12 px in a wide font, so that names are never cut
_PANEL, _SHOWN, _GAP = 330.0, 64.0, 26.0  # a panel, the room it keeps for the last number, between two
_TOP, _STEP = 58.0, 24.0
_LONGEST = 60  # letters of a name; longer ones are shortened
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1d2129; } .label, .tick { fill: #555d69; } .failed { fill: #a05a00; }
.head { font-weight: 600; } .value { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; }
.ground { fill: #ffffff; } .area { fill: #3a3fb5; } .grid { stroke: #e2e0d9; } .stem { stroke: #a9adde; }
@media (prefers-color-scheme: dark) {
text { fill: #e9e8e3; } .label, .tick { fill: #a9b0bc; } .failed { fill: #f0b04a; }
.ground { fill: #14161b; } .value { stroke: #14161b; }
.area { fill: #a9b1ff; } .grid { stroke: #2e343e; } .stem { stroke: #555b96; } }
</style>"""


class Mark(NamedTuple):
    """One value, or what is said instead of it."""

    value: float | None
    said: str


class Row(NamedTuple):
    """One way: a mark in every panel."""

    name: str
    marks: Sequence[Mark]


def dots(rows: Sequence[Row], *, panels: Sequence[str], title: str, note: str) -> str:
    """Rows one below the other, panels side by side."""
    names = [textwrap.shorten(row.name, _LONGEST, placeholder=" …") for row in rows]
    left = 12 + _LETTER * max((len(name) for name in names), default=0) + 10
    width = left + len(panels) * (_PANEL + _GAP)
    bottom = _TOP + _STEP * len(rows)
    parts = [svg.words(title, 12, 22, style="head")]
    for place, panel in enumerate(panels):
        marks = [row.marks[place] for row in rows]
        parts += _panel(marks, head=panel, start=left + place * (_PANEL + _GAP), bottom=bottom)
    for place, name in enumerate(names):
        parts.append(svg.words(name, left - 10, _TOP + _STEP * place + 16, anchor="end"))
    lines = textwrap.wrap(note, int((width - 24) / _LETTER))
    for place, said in enumerate(lines):
        parts.append(svg.words(said, 12, bottom + 46 + 16 * place, style="label"))
    height = bottom + 46 + 16 * len(lines)
    told = ", ".join(f"{row.name} {' and '.join(mark.said for mark in row.marks)}" for row in rows)
    ground = svg.path([(0, 0), (width, 0), (width, height), (0, height)], style="ground", closed=True)
    drawn = str(svg.picture([_STYLE, ground, *parts], height=height, label=f"{title}: {told}", width=width))
    size = f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto"'
    return drawn.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" {size} ', 1) + "\n"


def _panel(marks: Sequence[Mark], *, head: str, start: float, bottom: float) -> list[str]:
    """One figure of all rows."""
    low, high = log_ends([mark.value for mark in marks if mark.value is not None])
    scale = Scale(math.log10(low), math.log10(high), start, start + _PANEL - _SHOWN)
    parts = [svg.words(f"{head} (logarithmic)", start, _TOP - 12, style="label")]
    for tick in log_ticks(low, high):
        at = scale(math.log10(tick))
        parts.append(svg.line(at, _TOP, at, bottom, style="grid"))
        parts.append(svg.words(f"{tick:,g}", at, bottom + 16, style="tick", anchor="middle"))
    for place, mark in enumerate(marks):
        middle = _TOP + _STEP * place + _STEP / 2
        if mark.value is None:
            said = textwrap.shorten(mark.said, int(_PANEL / _LETTER), placeholder=" …")
            parts.append(svg.words(said, start + 6, middle + 4, style="failed"))
            continue
        at = scale(math.log10(mark.value)) if mark.value > 0 else start
        parts.append(svg.line(start, middle, at, middle, style="stem"))
        parts.append(svg.dot(at, middle, style="area"))
        parts.append(svg.words(mark.said, at + 9, middle + 4, style="value"))
    return parts


def log_ends(values: Sequence[float]) -> tuple[float, float]:
    """A power of ten clearly below the smallest, and the largest; what is not above 0 has no place here.

    >>> log_ends([0.02, 30.0]), log_ends([1.0]), log_ends([])
    ((0.01, 30.0), (0.1, 1.0), (0.1, 1.0))
    """
    known = [value for value in values if value > 0] or [1.0]
    return 10.0 ** math.floor(math.log10(min(known) / 1.3)), max(known)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, every second one where there are many; within two of them also twice and five times.

    >>> log_ticks(0.01, 30.0), log_ticks(0.1, 0.7)
    ([0.01, 0.1, 1.0, 10.0], [0.1, 0.2, 0.5])
    """
    first, last = round(math.log10(low)), math.floor(math.log10(high) + 1e-9)
    step = 1 + (last - first) // 6
    factors = (1, 2, 5) if last - first < 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1, step) for factor in factors]
    return [tick for tick in found if tick <= high * (1 + 1e-9)]
