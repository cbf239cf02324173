"""The tables of docs/ that are quoted from docs/results/: which page shows what, and how it is written.

`python docs/results/refresh.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from vacsr.errors import DataError
from vacsr.files import write_text
from vacsr.report.stored import read_results
from vacsr.report.tables import Column, ComparisonTable


class Quoted(NamedTuple):
    """A column of a table in docs/; two keys stand as `i2t / t2i`."""

    name: str
    keys: tuple[str, ...]
    form: Literal["0", "1", "2", "r"] = "1"
    """Digits, or r: a correlation without its zero."""
    spread: bool = False
    bold: bool = False
    """Mark the highest, of several keys by the first."""
    marks: bool = False
    """† and ‡ as the comparison has them; the higher figure must be the better one."""


class Page(NamedTuple):
    """A page of docs/ and what it quotes."""

    name: str
    folder: str
    """Of docs/results/."""
    columns: tuple[Quoted, ...]
    heads: Mapping[str, str]
    """What the first column is called, by setting."""
    seeds: bool = False
    """Whether the second column is how many there are."""


_SIGMA = Quoted("σ–R@1 i2t / t2i", ("test.uncertainty.corr_r1_i2t", "test.uncertainty.corr_r1_t2i"), "r")
_AURC = Quoted("AURC i2t / t2i", ("test.uncertainty.aurc_i2t", "test.uncertainty.aurc_t2i"))
_NOISE = {"clean": "clean", "noise-20": "20% caption noise", "noise-50": "50% caption noise"}
PAGES = (
    Page(
        "results-methods.md",
        "noise",
        (
            Quoted("RSUM", ("test.rsum",), spread=True, bold=True),
            Quoted("mAP@R i2t / t2i", ("test.i2t.map_at_r", "test.t2i.map_at_r")),
            Quoted("τ-c experts", ("test.judgments.expert_tau_c",), spread=True, bold=True),
            Quoted("τ-b crowd", ("test.judgments.crowd_tau_b",), spread=True, bold=True),
            _SIGMA,
            _AURC,
            Quoted("FN AUROC of σ", ("test.uncertainty.auroc_false_negative",)),
            Quoted("of score", ("test.judgments.auroc_false_negative_score",)),
        ),
        _NOISE,
    ),
    Page(
        "results-scenes.md",
        "scenes",
        (
            Quoted("exact mAP@R", ("test.exact.map_at_r",), "2", spread=True, bold=True),
            Quoted("exact τ-b", ("test.exact.tau_b",), "2", spread=True, bold=True),
            Quoted("RSUM", ("test.rsum",), spread=True, bold=True),
            Quoted("FN AUROC of σ", ("test.exact.auroc_false_negative",), bold=True),
            Quoted("of score", ("test.exact.auroc_false_negative_score",), bold=True),
            _SIGMA,
        ),
        {"4000-scenes-20-epochs": "4,000 scenes, 20 epochs", "1000-scenes-20-epochs": "1,000 scenes, 20 epochs"},
    ),
    Page(
        "results-flickr8k.md",
        "flickr8k",
        (
            Quoted("i2t R@1/5/10", ("test.i2t.r1", "test.i2t.r5", "test.i2t.r10")),
            Quoted("t2i R@1/5/10", ("test.t2i.r1", "test.t2i.r5", "test.t2i.r10")),
            Quoted("RSUM", ("test.rsum",), spread=True, bold=True),
            Quoted("mAP@R i2t / t2i", ("test.i2t.map_at_r", "test.t2i.map_at_r"), bold=True),
            Quoted("τ-c experts", ("test.judgments.expert_tau_c",), spread=True, bold=True),
            Quoted("τ-b crowd", ("test.judgments.crowd_tau_b",), spread=True, bold=True),
            _SIGMA,
            _AURC,
            Quoted("FN AUROC of σ", ("test.uncertainty.auroc_false_negative",)),
            Quoted("of score", ("test.judgments.auroc_false_negative_score",)),
            Quoted("RSUM dev", ("dev.rsum",), spread=True, bold=True),
        ),
        _NOISE,
        seeds=True,
    ),
    Page(
        "results-flickr8k.md",
        "frame",
        (
            Quoted("RSUM", ("test.rsum",), marks=True),
            Quoted("mAP@R i2t / t2i", ("test.i2t.map_at_r", "test.t2i.map_at_r"), marks=True),
            Quoted("τ-c experts", ("test.judgments.expert_tau_c",)),
            Quoted("RSUM dev", ("dev.rsum",), marks=True),
        ),
        {"clean": "frame"},
    ),
    Page(
        "results-efficiency.md",
        "efficiency",
        (
            Quoted("parameters, M", ("step.parameters",), "2"),
            Quoted("of the method, M", ("step.method_parameters",), "2"),
            Quoted("inference, ms", ("step.inference.ms",), "2"),
            Quoted("images/s", ("step.inference.images_per_s",), "0"),
            Quoted("peak GiB", ("step.inference.peak_gib",), "2"),
            Quoted("training, ms", ("step.training.ms",), "2"),
            Quoted("images/s", ("step.training.images_per_s",), "0"),
            Quoted("peak GiB", ("step.training.peak_gib",), "2"),
        ),
        {
            "vit-b32": "ViT-B/32, eager",
            "vit-b32-compiled": "ViT-B/32, compiled, CUDA graph",
            "vit-b16": "ViT-B/16, eager",
        },
    ),
)


def quoted(text: str, page: Page, stored: ComparisonTable) -> str:
    """A page's text with its tables as the stored results have them."""
    for setting, head in page.heads.items():
        lines = text.split("\n")
        start = next((n for n, line in enumerate(lines) if line.startswith(f"| {head} |")), None)
        if start is None:
            raise DataError(f"{page.name} has no table that begins with '| {head} |' — put the line where it belongs")
        end = next((n for n in range(start, len(lines)) if not lines[n].startswith("|")), len(lines))
        text = "\n".join([*lines[:start], *_rows(head, page, stored, setting), *lines[end:]])
    return text


def _rows(head: str, page: Page, stored: ComparisonTable, setting: str) -> list[str]:
    """The lines of one table."""
    first = [[head, *(["seeds"] if page.seeds else []), *(column.name for column in page.columns)]]
    for row in stored.shown_rows(setting):
        seeds = [str(stored.seeds(setting, row))] if page.seeds else []
        first.append([row, *seeds, *(_cell(column, stored, setting, row) for column in page.columns)])
    lines = [f"| {' | '.join(cells)} |" for cells in first]
    return [lines[0], "|" + "---|" * len(first[0]), *lines[1:]]


def _cell(column: Quoted, stored: ComparisonTable, setting: str, row: str) -> str:
    found = [summary for key in column.keys if (summary := stored.summary(setting, row, key))]
    if len(found) < len(column.keys):
        return "–"
    shown = " / ".join(
        _number(summary.mean, column.form) + (_mark(stored, setting, row, key) if column.marks else "")
        for summary, key in zip(found, column.keys, strict=True)
    )
    if column.bold and row in stored.leading(setting, Column(key=column.keys[0])):
        shown = f"**{shown}**"
    if column.spread and found[0].seeds > 1:
        shown += f" ± {_number(found[0].std, column.form)}"
    return shown


def _mark(stored: ComparisonTable, setting: str, row: str, key: str) -> str:
    tested = stored.comparison(setting, row, key)
    return "" if tested is None or not tested.clear else "†" if tested.difference > 0 else "‡"


def _number(value: float, form: str) -> str:
    """In the style of the pages: −.60 for -0.604 as a correlation."""
    if form != "r":
        return f"{value:z.{form}f}"
    shown = f"{abs(value):.2f}"
    return ("−" if round(value, 2) < 0 else "") + (shown[1:] if shown.startswith("0") else shown)


def refresh_pages(docs: Path, *, write: bool) -> list[str]:
    """Names of the pages whose tables were not those of the stored results; with ``write`` they are now."""
    behind = []
    for page in PAGES:
        text = (docs / page.name).read_text(encoding="utf-8")
        fresh = quoted(text, page, read_results(docs / "results" / page.folder / "results.json"))
        if fresh != text:
            behind.append(page.name)
            if write:
                write_text(docs / page.name, fresh)
    return behind
