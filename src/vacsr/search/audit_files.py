"""An audit on the disk: two CSV files and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from vacsr.data import PairSet, PhotoSet
from vacsr.files import write_text
from vacsr.search.audit import AuditReport, Known
from vacsr.search.audit_page import Pictures, audit_page

WRONG, MISSING, PAGE = "wrong.csv", "missing.csv", "index.html"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_KNOWN = ("score", "grade", "uncertainty", "agreement")


def write_audit(
    folder: Path, report: AuditReport, pairs: PairSet | PhotoSet, *, title: str, photos: Pictures | None = None
) -> None:
    """Write all three, each whole or not at all. ``photos``: pictures for data that hold none."""
    write_text(folder / WRONG, _storable(_csv_text(*_wrong_table(report, pairs))))
    write_text(folder / MISSING, _storable(_csv_text(*_missing_table(report, pairs))))
    write_text(folder / PAGE, _storable(audit_page(report, pairs, title=title, photos=photos)))


Table = tuple[Sequence[str], list[list[str]]]


def _wrong_table(report: AuditReport, pairs: PairSet | PhotoSet) -> Table:
    head = ["rank", "suspicion", "image", "caption_id", "caption", *_KNOWN]
    head += ["better_image", "better_image_grade", "better_image_agreement"]
    head += ["better_caption_id", "better_caption", "better_caption_grade", "better_caption_agreement"]
    lines = []
    for rank, pair in enumerate(report.wrong, start=1):
        line = [str(rank), f"{pair.suspicion:.4f}", _image(pairs, pair.row), *_caption(pairs, pair.col)]
        line += [*_said(pair.known), _image(pairs, pair.better_row), *_short(pair.better_image)]
        lines.append([*line, *_caption(pairs, pair.better_col), *_short(pair.better_caption)])
    return head, lines


def _missing_table(report: AuditReport, pairs: PairSet | PhotoSet) -> Table:
    head = ["rank", "image", "caption_id", "caption", *_KNOWN, "labelled_image", "labelled_grade", "labelled_agreement"]
    lines = []
    for rank, pair in enumerate(report.missing, start=1):
        line = [str(rank), _image(pairs, pair.row), *_caption(pairs, pair.col), *_said(pair.known)]
        lines.append([*line, _image(pairs, pair.own_row), *_short(pair.own)])
    return head, lines


def _image(pairs: PairSet | PhotoSet, row: int | None) -> str:
    """An image's id, or nothing where there is no image."""
    return "" if row is None else _cell(pairs.image_ids[row])


def _caption(pairs: PairSet | PhotoSet, col: int | None) -> list[str]:
    """A caption's id and words, or nothing where there is none or they are unknown."""
    if col is None:
        return ["", ""]
    return [_cell(pairs.caption_ids[col]), "" if pairs.captions is None else _cell(pairs.captions[col])]


def _cell(said: str) -> str:
    """What others wrote: never a formula to a program that shows tables, nor the end of a line.

    >>> _cell("=1+1"), _cell("one\\rtwo")
    ("'=1+1", 'one two')
    """
    return (f"'{said}" if said.startswith(_FORMULA) else said).replace("\r", " ")


def _said(known: Known) -> list[str]:
    sigma = "" if known.uncertainty is None else f"{known.uncertainty:.4f}"
    return [f"{known.score:.4f}", f"{known.grade:.4f}", sigma, f"{known.agreement:.4f}"]


def _short(known: Known | None) -> list[str]:
    return ["", ""] if known is None else [f"{known.grade:.4f}", f"{known.agreement:.4f}"]


def _storable(text: str) -> str:
    """Halves of surrogate pairs, which UTF-8 cannot hold, as their numbers."""
    return text.encode(errors="backslashreplace").decode()


def _csv_text(head: Sequence[str], lines: list[list[str]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([head, *lines])
    return file.getvalue()
