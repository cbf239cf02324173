"""A table from start to end: run what is missing, collect the reports, test against baselines, write it all down."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from vacsr.compare.cell import Cell, cells, read_report
from vacsr.compare.checks import check_cells
from vacsr.compare.jobs import run_cells
from vacsr.compare.page import RECORDS, read_records, run_records, write_page, write_records
from vacsr.compare.photo_tests import tested_photos
from vacsr.compare.published import placed
from vacsr.compare.recognition import averaged_cells
from vacsr.compare.significance import tested
from vacsr.compare.start import refuse_other_start, start_cell, train_start
from vacsr.compare.table import Table
from vacsr.errors import DataError, UsageError
from vacsr.files import make_folder, write_json, write_text
from vacsr.report.formats import FILES, FORMATS
from vacsr.report.stored import read_results, table_to_json
from vacsr.report.tables import CellValues, ComparisonTable, look_up
from vacsr.train.distributed import ranks
from vacsr.train.run import check_writable


def compare(
    table: Table,
    out: Path,
    *,
    runs: Path | None = None,
    seeds: Sequence[int] = (),
    jobs: int = 1,
    rows: Sequence[str] = (),
    fresh: bool = False,
    only_collect: bool = False,
    page: bool = False,
) -> ComparisonTable:
    """Run what is missing (of ``rows`` only, if given), then write the table in every format and as results.json.

    Run folders lie in ``runs``, which several tables may share, or in ``out``. What the cells start from is trained
    first, where the table says how and it is not there. Rows that can never finish are refused before anything runs.
    So are runs of another recipe, which are in the way, or with ``fresh`` they are deleted, as are unfinished ones of
    other data. ``only_collect`` takes what is finished. ``page`` adds page.html with figures, and what these are drawn
    from as records.json.
    """
    check_writable(out)
    _check_call(table, rows, jobs=jobs)
    every = list(cells(table, runs or out, seeds=seeds))
    todo = [] if only_collect else [cell for cell in every if not rows or cell.row in rows]
    missing = [cell for cell in todo if not cell.finished()]
    check_cells(table, missing)
    start = start_cell(table, missing)
    if not fresh:
        _refuse_outdated(missing)
        if start is not None:
            refuse_other_start(start)
    console = Console(stderr=True)
    if todo:
        console.print(f"{len(todo)} cells, {len(todo) - len(missing)} already done", highlight=False)
        make_folder(out)  # hours of work should not end where nothing can be written
    if start is not None:
        train_start(start, every, console=console, fresh=fresh)
        missing = [cell for cell in todo if not cell.finished()]
    failures = list(run_cells(missing, jobs=jobs, console=console, fresh=fresh))
    done = [cell for cell in every if cell.finished()]
    if only_collect and not done:
        raise DataError(f"no cell of the table is finished in {runs or out} — run it: leave --only-collect out")
    result = collect(table, done)
    _tell_of_empty(result)
    write_results(result, out)
    if page:
        records = run_records(done)
        write_records(out / RECORDS, records)
        write_page(table, result, records, out=out)
    if failures:
        raise failures[0]
    return result


def _check_call(table: Table, rows: Sequence[str], *, jobs: int) -> None:
    if ranks() > 1:
        raise UsageError(
            f"a table runs its cells in --jobs, and torchrun has started {ranks()} ranks — start it without torchrun"
        )
    unknown = [name for name in rows if name not in {row.name for row in table.rows}]
    if unknown:
        raise UsageError(f"no row '{unknown[0]}' — the table has: {', '.join(row.name for row in table.rows)}")
    if table.task == "efficiency" and jobs > 1:
        raise UsageError(f"--jobs {jobs}: steps timed side by side slow each other — leave --jobs out for this table")


def _refuse_outdated(missing: Sequence[Cell]) -> None:
    found = [(cell, reason) for cell in missing if (reason := cell.outdated()) is not None]
    if found:
        cell, reason = found[0]
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise UsageError(
            f"{cell.folder} holds a run of another recipe: {reason}{more} — choose another --out, "
            "or add --fresh to start those cells again"
        )


def _tell_of_empty(result: ComparisonTable) -> None:
    """A key with a slip looks like a figure that no method has."""
    ours = [column for column in result.columns if not column.published]
    empty = [column for column in ours if all(look_up(v.report, column.key) is None for v in result.values)]
    if empty and result.values:
        named = ", ".join(f"{column.name} ({column.key})" if column.name else column.key for column in empty)
        warnings.warn(f"no run has a figure for: {named} — should one? compare the key with report.json", stacklevel=3)


def collect(table: Table, done: Sequence[Cell]) -> ComparisonTable:
    """Read the reports of finished cells, add their average, and test rows against the best baseline."""
    values = [CellValues(cell.row, cell.setting, cell.seed, read_report(cell)) for cell in done]
    settings = [setting.name for setting in table.settings]
    if table.average:
        values += averaged_cells(values, settings, name=table.average)
        settings.insert(0, table.average)
    result = ComparisonTable(
        title=table.heading(),
        columns=table.columns,
        rows=tuple(row.name for row in table.rows),
        settings=tuple(settings),
        values=tuple(values),
        baselines=table.baselines(),
        published=tuple(placed(table.published, data=table.data_spec(), backbone=table.backbone_spec)),
        sweeps=tuple((row.name, point) for row in table.rows for point in row.sweep),
        note=table.note,
    )
    find = tested_photos if table.task == "fewshot" else tested
    return replace(result, comparisons=find(table, result, done))


def redraw(table: Table, stored: Path, out: Path | None = None, *, page: bool = False) -> ComparisonTable:
    """The table again from a results.json, without the runs: figures and tests as stored, all else as the table says.

    With ``out`` it is written there in every format, and with ``page`` also as a page, from the records.json beside
    the results.
    """
    found = read_results(stored)
    fresh = collect(table, ())
    values = tuple(v for v in found.values if v.row in fresh.rows and v.setting in fresh.settings)
    if not values:
        raise DataError(f"{stored} has no cell of this table's rows and settings — give the results of the same table")
    result = replace(fresh, values=values, comparisons=found.comparisons)
    if page and out is None:
        raise UsageError("a page is drawn from stored results, and nobody says where to — add --out")
    if out is not None:
        write_results(result, out)
    if page and out is not None:
        records = read_records(stored.with_name(RECORDS))
        write_records(out / RECORDS, records)  # so that what is drawn can be drawn again
        write_page(table, result, records, out=out)
    return result


def write_results(table: ComparisonTable, out: Path) -> None:
    """Every format, and results.json."""
    for name, form in FORMATS.items():
        write_text(out / FILES[name], form(table))
    write_json(out / "results.json", table_to_json(table))
