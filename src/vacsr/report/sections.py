"""Sections of a comparison's page that are drawn from reports alone. Each is None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vacsr.report.curves import (
    DIRECTIONS,
    KINDS,
    Drawn,
    accuracy_by_sigma,
    all_pairs,
    dev_by_epoch,
    loss_by_step,
    risk_by_coverage,
    score_histogram,
    sigma_by_rank,
)
from vacsr.report.diagram import model_diagram
from vacsr.report.gradient import gradient_figure, largest_plain_gradient
from vacsr.report.html import Cell, Html, Row, figure, join, paragraph, table, tag, text
from vacsr.report.panels import Panel, grid, left_out, note, panels_to_html
from vacsr.report.records import RunRecord
from vacsr.report.sweeps import Sweeps, sweep_figures
from vacsr.report.tables import ComparisonTable

MOST = 8
"""Rows in a figure, unless more are asked for."""
_OWN = ("vacsr", "infonce", "sigmoid")  # methods with a colour of their own
_HUES = 8  # numbered colours of page.css


class Look(NamedTuple):
    """What the figures are drawn from, and how."""

    runs: Sequence[RunRecord]
    settings: Sequence[str]
    styles: Mapping[str, str]
    """Classes of page.css by row."""
    split: str
    left_out: int
    """Rows that have reports and no place in the figures."""
    unrun: Sequence[str] = ()
    """Rows that were to be drawn and have no report at all."""

    @classmethod
    def of(cls, compared: ComparisonTable, runs: Sequence[RunRecord], *, drawn: Sequence[str], split: str) -> Look:
        """The rows to draw, and their colours."""
        present = {run.row for run in runs}
        swept = {row for row, _ in compared.sweeps}
        rows = [row for row in compared.rows if row in present]
        plain = [row for row in rows if row not in swept] or rows
        shown = [row for row in drawn if row in present] or plain[:MOST]
        settings = [name for name in compared.settings if any(run.setting == name for run in runs)]
        unrun = [row for row in drawn if row not in present]
        return cls(runs, settings, row_styles(shown), split, len(rows) - len(shown), unrun)

    def drawn(self, setting: str) -> Drawn:
        """One setting."""
        return Drawn(self.runs, setting, self.styles, self.split)


def row_styles(rows: Sequence[str]) -> dict[str, str]:
    """A colour for every row: their own for the best known methods, numbered for others, then dashed.

    >>> row_styles(["infonce", "vacsr-paper", "vacsr-default", "pcmepp"])
    {'infonce': 'infonce', 'vacsr-paper': 'hue-1', 'vacsr-default': 'vacsr', 'pcmepp': 'hue-2'}
    """
    owners: dict[str, str] = {}
    for method in _OWN:
        alike = [row for row in rows if row == method or row.startswith(f"{method}-")]
        named = [row for row in alike if row in (method, f"{method}-default")]
        owners |= {row: method for row in (named or alike)[:1]}
    free = [f"hue-{number}" for number in range(1, _HUES + 1)]
    free += [f"{style} dashed" for style in (*_OWN, *free)]
    left = iter(free)
    return {row: owners[row] if row in owners else next(left, "easy") for row in rows}


_SIGMA_FIGURES = (
    (
        "σ and R@1",
        accuracy_by_sigma,
        "If σ is worth something, the line falls. r is the correlation over the groups.",
        "stored R@1 by σ",
    ),
    (
        "Surest answers only",
        risk_by_coverage,
        "On the right all queries are answered; a good σ makes the line fall to the left. The area is that below it.",
        "stored risks",
    ),
    (
        "σ of the first K and mAP@R",
        sigma_by_rank,
        "Near −1: a low σ of the first answers tells of a good ranking.",
        "stored correlations",
    ),
)


def sigma(look: Look) -> Html | None:
    """σ and R@1, σ and mAP@R, and what is gained by answering only where σ is low."""
    found = {setting: _sigma_panels(look.drawn(setting)) for setting in look.settings}
    if not any(panel.made for panels in found.values() for panel in panels):
        return None
    words = (
        "σ is how unsure a method is of a pair. Queries are sorted by the σ of their best answer. Methods without a σ "
        "are not drawn."
    )
    parts = [paragraph(words)]
    for setting, panels in found.items():
        drawn = look.drawn(setting)
        body = [*panels_to_html(drawn, panels, sigma=True), *_topk_tables(drawn)]
        parts += _headed(setting, look, body)
    return join(*parts)


def _sigma_panels(drawn: Drawn) -> list[Panel]:
    return [
        Panel(f"{name}, {said}", draw(drawn, direction), caption, wants)
        for name, draw, caption, wants in _SIGMA_FIGURES
        for direction, said in DIRECTIONS.items()
    ]


def _topk_tables(drawn: Drawn) -> list[Html]:
    """The correlations in figures, raw over queries and binned, as the paper prints them; one table a direction."""
    made = []
    for direction, said in DIRECTIONS.items():
        curves = [
            (row, kind, curve.mean)
            for kind in ("raw", "binned")
            for row, curve in drawn.curves("uncertainty", f"topk_{direction}", kind)
        ]
        rows = [
            Row(f"{row}, {kind}", [Cell("–" if value != value else f"{value:z.2f}") for value in mean])
            for row, kind, mean in sorted(curves, key=lambda found: list(drawn.styles).index(found[0]))
        ]
        if rows:
            head = ["K", *(str(k + 1) for k in range(max(len(row.cells) for row in rows)))]
            caption = (
                f"Pearson's r of the mean σ of the first K answers with mAP@R, {said}: over queries, and over bins."
            )
            made.append(table(head, rows, caption=caption))
    return made


def histograms(look: Look) -> Html | None:
    """Grades and scores of labelled pairs and of all others, a figure a row."""
    parts, any_drawn = [], False
    for setting in look.settings:
        drawn = look.drawn(setting)
        first = [found[0] for row in look.styles if (found := drawn.seeds(row))]
        grades, scores = (
            {
                run.row: figure(made, all_pairs(run, look.split, kind), title=f"{run.row}: {kind}s")
                for run in first
                if (made := score_histogram(run, look.split, kind)) is not None
            }
            for kind in KINDS
        )
        any_drawn = any_drawn or bool(grades or scores)
        lines = left_out(drawn, look.styles, shown={**grades, **scores}, wants="stored scores")
        ungraded = [row for row in scores if row not in grades]
        lines += [f"Without grades: {', '.join(ungraded)}."] if ungraded else []
        kinds = [list(figures.values()) for figures in (grades, scores) if figures]
        if all(len(figures) == 1 for figures in kinds):  # of a lone row both kinds stand beside each other
            kinds = [[figures[0] for figures in kinds]] if kinds else []
        grids = [grid(figures) for figures in kinds]
        parts += _headed(setting, look, [*grids, *note(lines)])
    if not any_drawn:
        return None
    words = (
        "How the scores of labelled pairs and of all other pairs lie, for the first seed of each row. Each histogram "
        "is as high as the others; the stroke is the median."
    )
    return join(paragraph(words), *parts)


def sweeps(swept: Sequence[Sweeps]) -> Html | None:
    """A figure a parameter; where the paper gives one, beside ours by the same measure."""
    drawn, beside = [], False
    for found in swept:
        for made in sweep_figures(found):
            drawn.append(figure(made.ours, f"Ours: {found.figure}.", title=made.name))
            if made.alike is not None:
                said = f"Ours: {found.alike_figure}."
                drawn.append(figure(made.alike, said, title=f"{made.name}, the paper's measure"))
            if made.paper is not None:
                beside = True
                said = f"The paper's own: {found.paper_figure}. Only these points are printed."
                drawn.append(figure(made.paper, said, title=f"{made.name}, paper"))
    if not drawn:
        return None
    words = "All other parameters keep their defaults. The values stand in even steps; the y axis does not begin at 0."
    if beside:
        words += (
            " The paper's points are of other data than ours. The figure beside them is of ours by the same measure, "
            "and both have a y axis of the same length, so that equal changes look equal."
        )
    return join(paragraph(words), grid(drawn))


def training(look: Look) -> Html | None:
    """Dev RSUM and loss."""
    found = {setting: _training_panels(look.drawn(setting)) for setting in look.settings}
    if not any(panel.made for panels in found.values() for panel in panels):
        return None
    parts = []
    for setting, panels in found.items():
        parts += _headed(setting, look, panels_to_html(look.drawn(setting), panels))
    return join(*parts)


def _training_panels(drawn: Drawn) -> list[Panel]:
    return [
        Panel("Dev RSUM", dev_by_epoch(drawn), "The y axis need not begin at 0.", "a stored dev RSUM"),
        Panel("Loss", loss_by_step(drawn), "First seed. Losses are of unequal kinds.", "stored losses"),
    ]


def model() -> Html:
    """The drawing of the model, and why its sigmoid is straight-through."""
    words = (
        "An image and a text meet in their elementwise product. The adapter makes a Gaussian mixture of it, and "
        "decodes a draw of it in training, its mean at test time. The default adds a scaled cosine to the logit, which "
        "the paper does not have."
    )
    box = {"class": "diagram", "role": "region", "aria-label": "Diagram of the model", "tabindex": "0"}
    why = (
        "The loss is ½(label − p)². Through a plain sigmoid its gradient vanishes where the score is surely wrong, and "
        f"never exceeds {largest_plain_gradient():.2f}. With the sigmoid straight-through it is p − label, as for the "
        "logistic loss."
    )
    drawn = [
        figure(gradient_figure(label), f"Label {label}: {said}", title=title)
        for label, title, said in (
            (1, "Labelled pairs", "the score should rise, so the gradient is negative."),
            (0, "All others", "the score should fall."),
        )
    ]
    return join(
        paragraph(words),
        tag("div", model_diagram(), box),
        tag("h3", text("The gradient of the squared error"), {"class": "part"}),
        paragraph(why),
        grid(drawn, two=True),
    )


def _headed(setting: str, look: Look, body: Sequence[Html]) -> list[Html]:
    """What a setting has to show, under its name where there are several."""
    named = [tag("h3", text(setting), {"class": "part"})] if body and len(look.settings) > 1 else []
    return [*named, *body]
