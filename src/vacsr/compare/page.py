"""The page of a table: what runs left behind, kept as data beside the results, and drawn with or without the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vacsr.compare.cell import Cell, read_report
from vacsr.compare.table import Table
from vacsr.errors import DataError
from vacsr.files import write_text
from vacsr.report.comparison import write_comparison
from vacsr.report.gallery import Gallery
from vacsr.report.records import RunRecord, read_run
from vacsr.report.tables import ComparisonTable

RECORDS, PAGE = "records.json", "page.html"
_DIGITS = 5  # of a figure that is only drawn


def run_records(done: Sequence[Cell]) -> list[RunRecord]:
    """Report and history of every finished cell."""
    return [read_run(c.folder, row=c.row, setting=c.setting, seed=c.seed)._replace(report=read_report(c)) for c in done]


def write_records(path: Path, records: Sequence[RunRecord]) -> None:
    """As data, short: one run a line, figures to five digits. A split's first protocol stands under its name alone."""
    lines = []
    for run in records:
        report = {split: result for split, result in run.report.items() if "/" not in split}
        entry = {"row": run.row, "setting": run.setting, "seed": run.seed, "report": report, "history": run.history}
        lines.append(json.dumps(_short(entry), ensure_ascii=False, separators=(",", ":")))
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def read_records(path: Path) -> list[RunRecord]:
    """What :func:`write_records` wrote; the models are not there any more, so nothing can be asked of them."""
    try:
        return [RunRecord(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror} — it lies beside results.json after --page") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} does not hold what runs left behind ({error}) — write it again with --page") from error


def write_page(table: Table, result: ComparisonTable, records: Sequence[RunRecord], *, out: Path) -> None:
    """The page of a comparison in one file, as the table's ``page`` asks for it."""
    asked = table.page.gallery
    shown = None if asked is None else Gallery(asked.setting, asked.rows, asked.photos)
    write_comparison(result, records, out / PAGE, gallery=shown, drawn=table.page.drawn)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
