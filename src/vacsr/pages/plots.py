"""Plots for pages: matplotlib draws them, SVG text comes out.

Text stays text and colours become variables of style.css, so one drawing serves light and dark screens. The same data
give the same bytes.
"""

import io
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

Array = npt.NDArray[np.float64]

WIDTH = 340  # of every plot in points, about a phone's column: text keeps its size there
_LEFT, _RIGHT, _BOTTOM = 36, WIDTH - 10, 42
_ENTRY = 17  # height of a legend entry
_RIDGE, _GAP = 40, 22  # height of a histogram, and of the text above it


class Line(NamedTuple):
    name: str
    x: Array  # [P]
    y: Array  # [P], NaN where unknown
    colour: str = "vacsr"  # its name in style.css
    dashed: bool = False
    dots: bool = False
    std: Array | None = None
    """[P]: a band this far above and below the line. NaN marks points of a single seed, drawn as rings."""
    joined: bool = True  # False draws points without a line


class Histogram(NamedTuple):
    """Counts per bin."""

    name: str
    counts: Array  # [B]
    colour: str
    note: str = ""  # mean, median and so on, shown beside the name
    median: float | None = None


@cache
def palette() -> dict[str, str]:
    """The light colours of style.css by name."""
    style = files("vacsr.pages").joinpath("style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", style[: style.index("@media")]))


def line_plot(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    ticks: Sequence[float] | None = None,
    tick_labels: Sequence[str] | None = None,
    y_range: tuple[float, float] | None = None,
    marked: float | None = None,
    height: int = 190,
    digits: int = 1,
) -> Markup:
    """Lines over one pair of axes, the legend above them.

    The y axis includes 0 unless ``y_range`` is given. ``marked`` draws a vertical line at the default value. ``title``
    and the ends of each line, to ``digits`` decimals, are read to people who cannot see the plot.
    """
    lines = [line for line in lines if not np.isnan(line.y).all()]
    top = 22 + _ENTRY * len(lines)
    with matplotlib.rc_context(_style(title)):
        figure = Figure(figsize=(WIDTH / 72, (top + height + _BOTTOM) / 72))
        axes = _axes(figure, left=_LEFT, right=_RIGHT, bottom=_BOTTOM, height=height)
        axes.grid(visible=True)
        axes.set_ylim(*(y_range or _with_zero(lines)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(x_label)
        if ticks is None:
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.margins(x=0)
        else:
            axes.set_xticks(ticks, tick_labels)
            room = 0.0 if max(ticks) > min(ticks) else 0.5
            axes.set_xlim(min(ticks) - room, max(ticks) + room)
        axes.yaxis.set_major_formatter(_number)
        if tick_labels is None:
            axes.xaxis.set_major_formatter(_number)
        if marked is not None:
            _mark_default(axes, marked)
        for position, line in enumerate(lines):
            _draw_line(axes, line)
            _draw_entry(figure, line, y=1 - (28 + _ENTRY * position) / (top + height + _BOTTOM))
        _text(figure, 2, y_label, y=1 - 12 / (top + height + _BOTTOM), color=palette()["soft"], size=11.5)
        return _svg(figure, f"{title}. {_spoken(lines, digits)}")


def histogram_plot(groups: Sequence[Histogram], *, edges: Array, label: str, title: str) -> Markup:
    """One histogram per group, stacked over one axis; each is as high as the others, and a stroke marks its median.

    ``edges`` [B + 1] are those of the bins of every group.
    """
    inner = len(groups) * (_RIDGE + _GAP)
    with matplotlib.rc_context(_style(title)):
        figure = Figure(figsize=(WIDTH / 72, (inner + _BOTTOM) / 72))
        axes = _axes(figure, left=8, right=WIDTH - 8, bottom=_BOTTOM, height=inner)
        axes.grid(visible=True, axis="x")
        axes.set(xlim=(float(edges[0]), float(edges[-1])), ylim=(0, inner), yticks=[], xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(_number)
        for position, group in enumerate(groups):
            _draw_histogram(axes, group, edges, base=inner - (position + 1) * (_RIDGE + _GAP))
        spoken = "; ".join(f"{group.name}: {group.note}" for group in groups if group.note)
        return _svg(figure, f"{title}. {spoken}.")


def value_range(lines: Sequence[Line], *, margin: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """Ends of a y axis that holds the lines with their bands and little else, but spans at least ``least``."""
    low, high = _extent(lines)
    size = (high - low) or abs(high) or 1.0
    more = max(margin * size, (least - (high - low)) / 2)
    return low - more, high + more


def _extent(lines: Sequence[Line]) -> tuple[float, float]:
    known = [line for line in lines if not np.isnan(line.y).all()]
    low = [float(np.nanmin(line.y - _band(line))) for line in known]
    high = [float(np.nanmax(line.y + _band(line))) for line in known]
    return min(low, default=0.0), max(high, default=0.0)


def _with_zero(lines: Sequence[Line]) -> tuple[float, float]:
    """From 0, or from below it where a line goes there."""
    low, high = _extent(lines)
    low, high = min(0.0, 1.08 * low), max(0.0, 1.08 * high)
    return (low, high) if high > low else (0.0, 1.0)


def _band(line: Line) -> Array:
    return np.zeros_like(line.y) if line.std is None else np.nan_to_num(line.std)


def _style(title: str) -> Any:
    """Settings of every plot. The title salts the ids, so that plots of one page do not share them."""
    colours = palette()
    return {
        "svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False, "axes.unicode_minus": False,
        "font.size": 11.5, "axes.labelsize": 11.5, "xtick.labelsize": 11.5, "ytick.labelsize": 11.5,
        "text.color": colours["ink"], "axes.labelcolor": colours["soft"], "xtick.color": colours["soft"],
        "ytick.color": colours["soft"], "axes.edgecolor": colours["rule"], "grid.color": colours["fine"],
        "xtick.major.size": 0, "xtick.major.pad": 6, "ytick.major.size": 0, "axes.labelpad": 5, "grid.linewidth": 1.0,
        "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.axisbelow": True,
        "axes.facecolor": "none", "figure.facecolor": "none", "lines.linewidth": 2.2, "lines.markersize": 6,
    }  # fmt: skip


def _axes(figure: Figure, *, left: float, right: float, bottom: float, height: float) -> Axes:
    total = figure.get_figheight() * 72
    return figure.add_axes((left / WIDTH, bottom / total, (right - left) / WIDTH, height / total))


def _draw_line(axes: Axes, line: Line) -> None:
    colour, known = palette()[line.colour], ~np.isnan(line.y)
    x, y = line.x[known], line.y[known]
    if line.std is not None and len(x) > 1:
        band = line.std[known]
        axes.fill_between(x, y - band, y + band, color=colour, alpha=0.14, linewidth=0)  # NaN leaves gaps
        alone = ~np.isnan(band) & np.isnan(np.r_[np.nan, band[:-1]]) & np.isnan(np.r_[band[1:], np.nan])
        axes.vlines(x[alone], (y - band)[alone], (y + band)[alone], color=colour, alpha=0.4, linewidth=5)
    if line.joined:
        axes.plot(x, y, color=colour, linestyle=(0, (1, 1.6)) if line.dashed else "-", clip_on=False)
    if line.dots or not line.joined or len(x) == 1:
        ring = np.zeros(len(x), dtype=bool) if line.std is None else np.isnan(line.std[known])
        for hollow, face in ((ring, palette()["sheet"]), (~ring, colour)):
            axes.plot(x[hollow], y[hollow], "o", color=colour, markerfacecolor=face, clip_on=False, zorder=3)


def _draw_entry(figure: Figure, line: Line, *, y: float) -> None:
    """A line of the legend; matplotlib's own leaves out names that begin with an underscore."""
    at, middle = (4 / WIDTH, 30 / WIDTH), y + 4 / (figure.get_figheight() * 72)
    colour = palette()[line.colour]
    if line.joined:
        style: Any = (0, (1, 1.6)) if line.dashed else "-"
        figure.add_artist(Line2D(at, (middle, middle), color=colour, linestyle=style))
    else:
        figure.add_artist(Line2D([sum(at) / 2], [middle], color=colour, marker="o", linestyle=""))
    _text(figure, 38, line.name, y=y, size=12)


def _draw_histogram(axes: Axes, group: Histogram, edges: Array, *, base: float) -> None:
    colour, top = palette()[group.colour], base + _RIDGE
    axes.axhline(base, color=palette()["rule"], linewidth=1)
    highest = float(group.counts.max(initial=0.0))
    if highest > 0:
        heights = base + _RIDGE * group.counts / highest
        axes.stairs(heights, edges, baseline=base, fill=True, color=colour, alpha=0.3, linewidth=0)
        axes.stairs(heights, edges, baseline=base, color=colour, linewidth=1.6)
    if group.median is not None:
        axes.vlines(group.median, base, top, color=colour, linewidth=2.2)
    beside: Any = {"transform": axes.get_yaxis_transform(), "fontsize": 11.5}
    axes.text(0, top + 6, group.name, color=colour, weight="bold", **beside)
    axes.text(1, top + 6, group.note, color=palette()["soft"], ha="right", **beside)


def _mark_default(axes: Axes, at: float) -> None:
    soft = palette()["soft"]
    axes.axvline(at, color=soft, linestyle=(0, (3, 3)), linewidth=1)
    left = at > sum(axes.get_xlim()) / 2
    axes.annotate(
        "default", (at, 1), (-5 if left else 5, -11), xycoords=("data", "axes fraction"), textcoords="offset points",
        color=soft, ha="right" if left else "left",
    )  # fmt: skip


def _text(figure: Figure, x: float, text: str, *, y: float, **style: Any) -> None:
    figure.text(x / WIDTH, y, text, va="baseline", **style)


def _number(value: float, position: float = 0) -> str:
    """As short as possible.

    >>> _number(0.1), _number(-2.0), _number(1e-12)
    ('0.1', '-2', '0')
    """
    return f"{value:.4g}" if abs(value) > 1e-9 else "0"


def _spoken(lines: Sequence[Line], digits: int) -> str:
    """The ends of each line, or every point that stands alone."""
    parts = []
    for line in lines:
        known = [f"{value:z.{digits}f}" for value in line.y[~np.isnan(line.y)]]
        parts.append(f"{line.name}: {f'from {known[0]} to {known[-1]}' if line.joined else ', '.join(known)}")
    return "; ".join(parts) + "." if parts else "No data."


def _svg(figure: Figure, label: str) -> Markup:
    """The drawing without what a page does not need: document type, metadata, fonts, white ground, ids of groups."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    body = out.getvalue().partition("</metadata>")[2]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r" ?font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", body)
    body = re.sub(r"\s*\n\s*", "\n", body).replace("xlink:href", "href")
    names = {colour: name for name, colour in reversed(palette().items())}
    body = re.sub(
        r"#[0-9a-f]{6}\b(?=[;\"])", lambda match: f"var(--{names[match[0]]})" if match[0] in names else match[0], body
    )
    size = f"{figure.get_figwidth() * 72:g} {figure.get_figheight() * 72:g}"
    return Markup(f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(label)}">{body}')
