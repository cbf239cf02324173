"""A table from start to end: run what is missing, collect the reports, test against baselines, write it all down."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from vacsr.compare.cells import Cell, check_cells, list_cells, read_history, read_report, start_cell, train_start
from vacsr.compare.differences import tested_photos, tested_queries
from vacsr.compare.page import write_pages
from vacsr.compare.results import RECORDS, ComparisonTable, look_up, read_records, read_results
from vacsr.compare.table import Table, read_table
from vacsr.compare.workers import run_cells
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.fewshot import averaged_metrics
from vacsr.files import make_folder
from vacsr.pages.curves import RunRecord
from vacsr.train.checkpoint import check_not_file
from vacsr.train.distributed import ranks


def compare(
    table: Table | str | Path,
    out: str | Path | None = None,
    *,
    runs: Path | None = None,
    seeds: Sequence[int] = (),
    jobs: int = 1,
    rows: Sequence[str] = (),
    settings: Sequence[str] = (),
    fresh: bool = False,
    only_collect: bool = False,
    page: bool = False,
) -> ComparisonTable:
    """Run what is missing, then write the table in every format and as results.json.

    With ``rows`` or ``settings`` only theirs is run. ``table`` may be the path of a table file; ``out`` is then
    runs/TABLE unless given, as on the command line. Run folders lie in ``runs``, which several tables may share, or in
    ``out``. What the cells start from is trained first,
    where the table says how and it is not there. Rows that can never finish are refused before anything runs. So are
    runs of another recipe, which are in the way, or with ``fresh`` they are deleted, as are unfinished ones of other
    data. ``only_collect`` takes what is finished. ``page`` adds page.html, and what its plots are drawn from as
    records.json.
    """
    if not isinstance(table, Table):
        path = Path(table)
        table, out = read_table(path), out or Path("runs") / path.stem
    if out is None:
        raise UsageError("a table that was not read from a file has no folder — pass out=DIR")
    out = Path(out)
    check_not_file(out)
    _check_call(table, rows, settings, jobs=jobs)
    every = list(list_cells(table, runs or out, seeds=seeds))
    asked = [c for c in every if (not rows or c.row in rows) and (not settings or c.setting in settings)]
    todo = [] if only_collect else asked
    missing = [cell for cell in todo if not cell.finished()]
    check_cells(table, missing)
    start = start_cell(table, missing)
    if not fresh:
        _refuse_outdated([*missing, *([start] if start else [])])
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
    _warn_of_empty(result)
    write_pages(replace(result, records=run_records(done)) if page else result, out)
    if failures:
        raise failures[0]
    return result


def _check_call(table: Table, rows: Sequence[str], settings: Sequence[str], *, jobs: int) -> None:
    if ranks() > 1:
        raise UsageError(
            f"a table runs its cells in --jobs, and torchrun has started {ranks()} ranks — start it without torchrun"
        )
    runnable = [row.name for row in table.rows if row.seeds != ()]
    for kind, asked, known in (("row", rows, runnable), ("setting", settings, [one.name for one in table.settings])):
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise UsageError(f"no {kind} '{unknown[0]}' to run — the table has: {', '.join(known)}")
    if table.task == "efficiency" and jobs > 1:
        raise UsageError(f"--jobs {jobs}: steps timed side by side slow each other — leave --jobs out for this table")


def _refuse_outdated(missing: Sequence[Cell]) -> None:
    outdated = [(cell, reason) for cell in missing if (reason := cell.outdated()) is not None]
    if outdated:
        cell, reason = outdated[0]
        more = f" (and {len(outdated) - 1} more like it)" if len(outdated) > 1 else ""
        raise UsageError(
            f"{cell.folder} holds a run of another recipe: {reason}{more} — move it away or choose another --out, "
            "or add --fresh to start those cells again"
        )


def _warn_of_empty(result: ComparisonTable) -> None:
    """A misspelt key looks like a metric that no method has."""
    ours = [column for column in result.columns if not column.published]
    empty = [column for column in ours if all(look_up(v.report, column.key) is None for v in result.values)]
    if empty and result.values:
        named = ", ".join(f"{column.name} ({column.key})" if column.name else column.key for column in empty)
        warnings.warn(f"no run has a number for: {named} — compare the key with report.json", stacklevel=3)


def collect(table: Table, done: Sequence[Cell]) -> ComparisonTable:
    """Read the reports of finished cells, add their average, and test rows against the best baseline."""
    values = [RunRecord(cell.row, cell.setting, cell.seed, read_report(cell), folder=cell.folder) for cell in done]
    settings = [setting.name for setting in table.settings]
    if table.average:
        values += _averages(values, settings, name=table.average)
        settings.insert(0, table.average)
    result = ComparisonTable(
        title=table.heading(),
        columns=table.columns,
        rows=tuple(row.name for row in table.rows),
        settings=tuple(settings),
        values=tuple(values),
        baselines=table.baselines(),
        published=tuple(table.published_here()),
        sweeps=tuple((row.name, point) for row in table.rows for point in row.sweep),
        note=table.note,
        page=table.page,
    )
    find = tested_photos if table.task == "fewshot" else tested_queries
    return replace(result, differences=find(table, result, done))


def _averages(values: Sequence[RunRecord], settings: Sequence[str], *, name: str) -> Iterator[RunRecord]:
    """One more run for every row and seed that has a report in all settings."""
    reports = {(run.row, run.seed, run.setting): run.report for run in values}
    for row, seed in dict.fromkeys((run.row, run.seed) for run in values):
        known = [reports[row, seed, setting] for setting in settings if (row, seed, setting) in reports]
        if len(known) == len(settings):
            yield RunRecord(row, name, seed, averaged_metrics(known))


def run_records(done: Sequence[Cell]) -> tuple[RunRecord, ...]:
    return tuple(RunRecord(c.row, c.setting, c.seed, read_report(c), read_history(c), c.folder) for c in done)


def redraw(table: Table, stored: Path, out: Path | None = None, *, page: bool = False) -> ComparisonTable:
    """The table again from a results.json, without the runs: numbers and tests as stored, all else as the table says.

    With ``out`` it is written there, and with ``page`` also what a page is drawn from, the records.json beside the
    results.
    """
    runs, differences = read_results(stored)
    fresh = collect(table, ())
    values = tuple(run for run in runs if run.row in fresh.rows and run.setting in fresh.settings)
    if not values:
        raise DataError(f"{stored} has no cell of this table's rows and settings — give the results of the same table")
    if page and out is None:
        raise UsageError("a page needs a folder — add --out")
    records = read_records(stored.with_name(RECORDS)) if page else None
    result = replace(fresh, values=values, differences=differences, records=records)
    if out is not None:
        write_pages(result, out)
    return result
