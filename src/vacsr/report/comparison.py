"""The page of a comparison: one file with its tables, figures and answers. What has no data is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vacsr.files import write_text
from vacsr.report.formats import to_html
from vacsr.report.gallery import Gallery, ask, load_material
from vacsr.report.html import Html, join, page, paragraph, section, tag, text
from vacsr.report.intervals import SAMPLE, Interval, Words, pick_intervals
from vacsr.report.pictures import Pictures
from vacsr.report.records import RunRecord, entry
from vacsr.report.sections import Look, histograms, model, sigma, sweeps, training
from vacsr.report.sweeps import Sweeps, sweeps_of
from vacsr.report.tables import ComparisonTable

_NO_MODELS = (
    "Queries with their answers and pairs from low grades to high are not shown: they need the trained models and the "
    "photos, which are not stored with this page (of most data sets photos may not be passed on). Where both are at "
    "hand, vacsr compare TABLE.yaml --page shows them."
)
_NOT_ASKED = "Queries with their answers are not shown: the table file names no rows for them, under page.gallery."


class Part(NamedTuple):
    """A section of the page."""

    name: str
    """Its anchor."""
    link: str
    """What the way to it is called."""
    title: str
    body: Html


def write_comparison(
    table: ComparisonTable,
    runs: Sequence[RunRecord],
    out: Path,
    *,
    gallery: Gallery | None = None,
    swept: Sequence[Sweeps] | None = None,
    drawn: Sequence[str] = (),
    split: str = "test",
) -> None:
    """Write :func:`comparison_page` to the file ``out``."""
    write_text(out, comparison_page(table, runs, gallery=gallery, swept=swept, drawn=drawn, split=split))


def comparison_page(
    table: ComparisonTable,
    runs: Sequence[RunRecord],
    *,
    gallery: Gallery | None = None,
    swept: Sequence[Sweeps] | None = None,
    drawn: Sequence[str] = (),
    split: str = "test",
) -> str:
    """The whole page. It needs no network and no scripts.

    ``gallery`` asks runs that still have their models for answers; ``swept`` are curves over a parameter, by default
    those of the table; ``drawn`` are the rows in the figures, by default the first that have data; ``split`` is whose
    results the figures show.
    """
    look = Look.of(table, runs, drawn=drawn, split=split)
    parts = [Part("tables", "Tables", "The tables", to_html(table, tested=True))]
    expected, absent = _expected(look), []
    for name, link, title, body in (
        ("sigma", "Uncertainty", "What the uncertainty is worth", sigma(look)),
        ("scores", "Scores", "How scores lie", histograms(look)),
        ("sweeps", "Sweeps", "One parameter at a time", sweeps(sweeps_of(table) if swept is None else swept)),
        ("training", "Training", "How training went", training(look)),
    ):
        if body is not None:
            parts.append(Part(name, link, title, body))
        elif name in expected:
            absent.append(f"“{title}”")
    answers = [] if gallery is None else _gallery(runs, gallery)
    parts += answers
    parts.append(Part("model", "The model", "The model and its loss", model()))
    main = [section(part.title, part.body, name=part.name) for part in parts]
    missing = [f"Not shown, as no run has stored what it is drawn from: {' and '.join(absent)}."] if absent else []
    missing += [] if answers else [_NO_MODELS if gallery is not None else _NOT_ASKED]
    body = join(_header(table, parts), tag("main", join(*main)), _footer(look, missing))
    return page(f"vacsr · {table.title}", body, description=_lead(table))


def _expected(look: Look) -> set[str]:
    """Sections that a page has unless the runs have not stored what they are drawn from."""
    unsure = any(entry(run, look.split, "uncertainty") for run in look.runs)
    return {"scores", "training", "sigma"} if unsure else {"scores", "training"}


def _header(table: ComparisonTable, parts: Sequence[Part]) -> Html:
    links = [tag("a", text(part.link), {"href": f"#{part.name}"}) for part in parts]
    nav = tag("nav", join(*links), {"aria-label": "Parts of this page"})
    brand = paragraph("vacsr comparison", style="brand")
    return tag("header", join(brand, tag("h1", text(table.title)), paragraph(_lead(table), style="lead"), nav))


def _lead(table: ComparisonTable) -> str:
    """A product only where every row was run in every setting with every seed."""
    runs = len(table.values)
    rows, settings = len({v.row for v in table.values}), len({v.setting for v in table.values})
    seeds = Counter((v.row, v.setting) for v in table.values)
    most = max(seeds.values(), default=0)
    counted = [_counted(rows, "row"), _counted(settings, "setting")]
    if rows * settings * most == runs:
        return f"{' × '.join([*counted, _counted(most, 'seed')])}: {_counted(runs, 'run')} under one protocol."
    least = min(seeds.values())
    each = _counted(most, "seed") if least == most else f"{least} to {_counted(most, 'seed')}"
    gaps = "; not every row in every setting" if len(seeds) < rows * settings else ""
    return f"{_counted(runs, 'run')} under one protocol: {', '.join(counted)}, {each} each{gaps}."


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _gallery(runs: Sequence[RunRecord], plan: Gallery) -> list[Part]:
    """Answers of the runs, and pairs by grade of the first; nothing where no run has its model."""
    material = load_material(runs, plan)
    if material is None:
        return []
    drawn = Pictures(material)
    shown = list(material.scores)
    rule = (
        f"The {plan.split} split, {plan.setting}, one run of each row. The queries were chosen by labels and judgments "
        "alone, before any score was seen. Grades run from 0 to 1. The dot places σ between the lowest and the highest "
        "of all answers here by the same method. Methods measure σ in different ways, so dots compare answers of one "
        "method only."
    )
    answers = join(paragraph(rule), drawn.legend(), drawn.queries(ask(material, plan)))
    found = pick_intervals(material, shown[0], generator=torch.Generator().manual_seed(0))
    intervals = join(paragraph(_graded(shown[0], found, plan)), drawn.intervals(found))
    return [
        Part("answers", "Answers", f"Queries and the best answers of {' and '.join(shown)}", answers),
        Part("intervals", "Grades", "Pairs from low grades to high", intervals),
    ]


def _graded(row: str, found: Sequence[Interval], plan: Gallery) -> str:
    """Between which grades a row's pairs lie, and which pairs these are."""
    words, low, high = Words.of(found), found[0].low, found[-1].high
    pairs = f"The pairs: all labelled ones and up to {SAMPLE:,} others of the {plan.split} split, {plan.setting}."
    if low == high:
        return f"{row} gives every pair the same grade, {words.grade(low)}; one was drawn at random. {pairs}"
    return (
        f"Grades could run from 0 to 1; those that {row} gives run from {words.grade(low)} to {words.grade(high)}. "
        "This range is cut into eight equal parts, and one pair was drawn at random from each part that has any. "
        f"{pairs}"
    )


def _footer(look: Look, missing: Sequence[str]) -> Html:
    """How to read the figures, and what is ``missing`` and why."""
    words = f"Figures are of the {look.split} split. Lines are means over seeds, bands one standard deviation."
    if look.left_out:
        words += f" Figures show {_counted(len(look.styles), 'row')}; {look.left_out} more are in the tables."
    if look.unrun:
        words += f" Not run, and so in no figure: {', '.join(look.unrun)}."
    return tag("footer", join(*(paragraph(line, style="note") for line in (words, *missing))))
