"""Bars with their names and numbers, as an SVG file that needs no page around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vacsr.report import svg
from vacsr.report.svg import Scale

_WIDTH, _NAMES, _BAR, _STEP = 720.0, 250.0, 14.0, 26.0
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1d2129; } .label { fill: #555d69; } .area { fill: #3a3fb5; }
@media (prefers-color-scheme: dark) { text { fill: #e9e8e3; } .label { fill: #a9b0bc; } .area { fill: #a9b1ff; } }
</style>"""


class Bar(NamedTuple):
    """One bar."""

    name: str
    value: float
    shown: str


def bars(found: Sequence[Bar], *, title: str, note: str) -> str:
    """One below the other from 0, the longest over all the width."""
    scale = Scale(0.0, max((bar.value for bar in found), default=1.0) or 1.0, _NAMES, _WIDTH - 70)
    parts = [_STYLE, svg.words(title, 4, 16)]
    for place, bar in enumerate(found):
        top = 30 + _STEP * place
        end = max(scale(bar.value), _NAMES + 1)
        box = [(_NAMES, top), (end, top), (end, top + _BAR), (_NAMES, top + _BAR)]
        parts.append(svg.words(bar.name, _NAMES - 8, top + 11, anchor="end"))
        parts.append(svg.path(box, style="area", closed=True))
        parts.append(svg.words(bar.shown, end + 6, top + 11))
    bottom = 30 + _STEP * len(found) + 14
    parts.append(svg.words(note, 4, bottom, style="label"))
    told = ", ".join(f"{bar.name} {bar.shown}" for bar in found)
    drawn = str(svg.picture(parts, height=bottom + 10, label=f"{title}: {told}", width=_WIDTH))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"
