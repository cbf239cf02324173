"""Precision along the recall as an SVG file that needs no page around it: four settings, one key."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vacsr.report import svg
from vacsr.report.svg import Scale

_WIDTH, _HEIGHT, _PLOT = 720.0, 262.0, 190.0  # of the picture, of a panel, of its plot
_KEY = 64.0
_SIGNALS = {
    "audit of vacsr": ("vacsr audit", "vacsr"),
    "cosine of vacsr": ("vacsr cosine", "vacsr dashed"),
    "loss GMM of infonce": ("infonce loss GMM", "gmm"),
    "audit of infonce": ("infonce audit", "infonce"),
    "cosine of infonce": ("infonce cosine", "infonce dashed"),
    "laplace-coupled of infonce": ("infonce laplace-coupled", "analytic"),
}
_STYLE = """<style>
svg { --paper: #ffffff; --ink: #1d2129; --soft: #555d69; --fine: #e3e1da;
  --vacsr: #3a3fb5; --infonce: #b5476b; --gmm: #b35c00; --analytic: #6b7280; }
@media (prefers-color-scheme: dark) { svg { --paper: #14161b; --ink: #e9e8e3; --soft: #a9b0bc; --fine: #2d333d;
  --vacsr: #a9b1ff; --infonce: #f08fb0; --gmm: #f2ac5c; --analytic: #9aa4b2; } }
.paper { fill: var(--paper); } text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.name { font-weight: 650; font-size: 13px; } .tick, .label { fill: var(--soft); } .grid { stroke: var(--fine); }
.line { fill: none; stroke: var(--hue); stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 1 5; } .vacsr { --hue: var(--vacsr); } .infonce { --hue: var(--infonce); }
.gmm { --hue: var(--gmm); } .analytic { --hue: var(--analytic); }
</style>"""


class Panel(NamedTuple):
    """One setting."""

    setting: str
    title: str
    low: float
    """Of the y axis, in percent."""
    high: float


PANELS = (
    Panel("noise-20", "wrong captions, 20% noise", 20.0, 100.0),
    Panel("noise-50", "wrong captions, 50% noise", 20.0, 100.0),
    Panel("judged-test", "missing matches, people's grades", 0.0, 100.0),
    Panel("scenes", "missing matches, exact truth", 0.0, 40.0),
)


def draw(records: Sequence[Mapping[str, Any]]) -> str:
    """The whole file; curves are means over seeds."""
    parts = [_STYLE, f'<rect class="paper" width="{_WIDTH:g}" height="{_KEY + 2 * _HEIGHT:g}"/>', *_key()]
    told = []
    for place, panel in enumerate(PANELS):
        found = {name: curve(records, panel.setting, signal) for name, (signal, _) in _SIGNALS.items()}
        left, top = _WIDTH / 2 * (place % 2), _KEY + _HEIGHT * (place // 2)
        parts += _panel(panel, found, left=left, top=top)
        ends = "; ".join(f"{name} {_ends(line)}" for name, line in found.items() if line)
        told.append(f"{panel.title}: {ends}.")
    label = "Precision in percent from low to high recall. " + " ".join(told)
    drawn = str(svg.picture(parts, height=_KEY + 2 * _HEIGHT, label=label, width=_WIDTH))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def curve(records: Sequence[Mapping[str, Any]], setting: str, signal: str) -> list[tuple[float, float]]:
    """Recall and mean precision; nothing where it was not measured."""
    if "laplace" in signal and not setting.startswith("noise"):
        signal += ", low first"  # a match is a pair that it is sure of
        if setting == "scenes":
            signal = signal.replace("infonce", "infonce layer")
    same = [one for one in records if (one["setting"], one["signal"]) == (setting, signal)]
    recalls = same[0]["precision_at_recall"] if same else {}
    return [(float(r), statistics.fmean(one["precision_at_recall"][r] for one in same)) for r in recalls]


def _ends(line: Sequence[tuple[float, float]]) -> str:
    return f"from {line[0][1]:.0f} to {line[-1][1]:.0f}"


def _key() -> Iterator[str]:
    for place, (name, (_, style)) in enumerate(_SIGNALS.items()):
        x, y = 20 + 235.0 * (place % 3), 24 + 22.0 * (place // 3)
        yield svg.line(x, y - 4, x + 30, y - 4, style=f"line {style}")
        yield svg.words(name, x + 38, y)


def _panel(
    panel: Panel, found: Mapping[str, Sequence[tuple[float, float]]], *, left: float, top: float
) -> Iterator[str]:
    known = [line for line in found.values() if line]
    bottom = top + 24 + _PLOT
    x = Scale(min(line[0][0] for line in known), 100.0, left + 40, left + _WIDTH / 2 - 16)
    y = Scale(panel.low, panel.high, bottom, bottom - _PLOT)
    yield svg.words(panel.title, left + 40, top + 12, style="name")
    yield from svg.y_axis(y, left=x.start, right=x.stop)
    yield from svg.x_axis(x, top=bottom - _PLOT, bottom=bottom, label="recall, percent (up: precision)")
    for name, line in found.items():
        if line:
            yield svg.path([(x(recall), y(value)) for recall, value in line], style=f"line {_SIGNALS[name][1]}")
