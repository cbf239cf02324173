"""Precision along the recall as an SVG file: four settings, one legend."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vacsr.pages.plots import palette

PANELS = {
    "noise-20": ("wrong captions, 20% noise", (20, 100)),
    "noise-50": ("wrong captions, 50% noise", (20, 100)),
    "judged-test": ("missing matches, people's grades", (0, 100)),
    "scenes": ("missing matches, exact truth", (0, 40)),
}
"""Title and range of precisions in percent, by setting."""
SIGNALS = {
    "audit of vacsr": ("vacsr audit", "vacsr", "-"),
    "cosine of vacsr": ("vacsr cosine", "vacsr", ":"),
    "loss GMM of infonce": ("infonce loss GMM", "hue-1", "-"),
    "audit of infonce": ("infonce audit", "infonce", "-"),
    "cosine of infonce": ("infonce cosine", "infonce", ":"),
    "laplace-coupled of infonce": ("infonce laplace-coupled", "published", "-"),
}
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
               "axes.spines.right": False, "axes.spines.top": False}  # fmt: skip


def draw(records: Sequence[Mapping[str, Any]]) -> str:
    """Curves are means over seeds."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 6.2), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, (setting, (title, limits)) in zip(panels, PANELS.items(), strict=True):
            axes.set(title=title, ylim=limits, xlabel="recall, %", ylabel="precision, %")
            axes.grid(axis="y", alpha=0.3)
            for name, (signal, colour, line) in SIGNALS.items():
                points = curve(records, setting, signal)
                if points:
                    axes.plot(*zip(*points, strict=True), line, color=palette()[colour], label=name)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def curve(records: Sequence[Mapping[str, Any]], setting: str, signal: str) -> list[tuple[float, float]]:
    """Recall and mean precision; empty where it was not measured."""
    if "laplace" in signal and not setting.startswith("noise"):
        signal += ", low first"  # a match is a pair that it is sure of
        if setting == "scenes":
            signal = signal.replace("infonce", "infonce layer")
    same = [one for one in records if (one["setting"], one["signal"]) == (setting, signal)]
    recalls = same[0]["precision_at_recall"] if same else {}
    return [(float(r), statistics.fmean(one["precision_at_recall"][r] for one in same)) for r in recalls]
