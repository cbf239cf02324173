"""Figures beside each other, and in words which rows are not in them and why: a lone curve would mislead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from vacsr.report.curves import Drawn, Made
from vacsr.report.html import Html, figure, join, paragraph, tag


class Panel(NamedTuple):
    """A figure of several rows, or where it would be."""

    title: str
    made: Made | None
    said: str
    """Its caption."""
    wants: str
    """What a row must have left behind to be in it, in words."""


def panels_to_html(drawn: Drawn, panels: Sequence[Panel], *, sigma: bool = False) -> list[Html]:
    """The figures, and below them what no figure of the group shows; what only some lack stands in their captions.

    ``sigma`` is of figures in which methods without a σ have no place; these are not named.
    """
    rows = [row for row in drawn.styles if not (sigma and drawn.without_sigma(row))]
    made = [(panel, panel.made) for panel in panels if panel.made is not None]
    if not made:
        return note(left_out(drawn, rows, wants="stored data"))
    lines = [left_out(drawn, rows, shown=found.rows, wants=panel.wants) for panel, found in made]
    shared = [line for line in lines[0] if len(made) > 1 and all(line in others for others in lines)]
    figures = [
        figure(found.picture, " ".join([panel.said, *(line for line in own if line not in shared)]), title=panel.title)
        for (panel, found), own in zip(made, lines, strict=True)
    ]
    return [grid(figures, two=True), *note([*_undrawn(panels), *shared])]


def left_out(drawn: Drawn, rows: Iterable[str], *, wants: str, shown: Collection[str] = ()) -> list[str]:
    """A sentence for each reason why some of ``rows`` are not ``shown``."""
    rest = [row for row in rows if row not in shown]
    lacking = [row for row in rest if drawn.seeds(row)]
    unrun = [row for row in rest if row not in lacking]
    lines = [f"Not drawn, for want of {wants}: {', '.join(lacking)}."] if lacking else []
    return [*lines, f"Not run in {drawn.setting}: {', '.join(unrun)}."] if unrun else lines


def _undrawn(panels: Iterable[Panel]) -> list[str]:
    """Figures for which no row has what they want."""
    titles: dict[str, list[str]] = {}
    for panel in panels:
        if panel.made is None:
            titles.setdefault(panel.wants, []).append(f"“{panel.title}”")
    return [f"No figure {' and '.join(names)}, for want of {wants}." for wants, names in titles.items()]


def note(lines: Sequence[str]) -> list[Html]:
    """Sentences in small print; nothing where there are none."""
    return [paragraph(" ".join(lines), style="note")] if lines else []


def grid(figures: Sequence[Html], *, two: bool = False) -> Html:
    """Figures beside each other: two in a line, or three where that leaves no single one behind."""
    return tag("div", join(*figures), {"class": "figures two" if two or len(figures) in (1, 2, 4) else "figures"})
