"""The page of a comparison: its tables, plots and example queries as plain data for :mod:`vacsr.pages`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vacsr.compare.examples import examples_of, load_material
from vacsr.compare.formats import setting_table, signed, write_results
from vacsr.compare.results import Column, ComparisonTable, Difference, Summary
from vacsr.files import write_text
from vacsr.pages.curves import MOST
from vacsr.pages.examples import Examples
from vacsr.pages.render import Cell, Comparison, Row, SettingTable, comparison_page, counted
from vacsr.pages.sweeps import SweepPoint, Sweeps

PAGE = "page.html"
_MORE = 3  # digits of a difference beyond the column's, at most


def write_pages(table: ComparisonTable, out: Path) -> None:
    """All files of a comparison: every format, and page.html where the table has records."""
    write_results(table, out)
    if table.records is not None:
        gallery = table.page.gallery
        material = None if gallery is None else load_material(table.records, gallery)
        examples = None if gallery is None or material is None else examples_of(material, gallery.setting)
        write_text(out / PAGE, comparison_page(page_data(table, examples=examples)))


def page_data(table: ComparisonTable, *, examples: Examples | None = None, split: str = "test") -> Comparison:
    """What the page shows. Plots show the rows that the table names, or else the first that have runs."""
    runs = table.records or ()
    present = {run.row for run in runs}
    rows = [row for row in table.rows if row in present]
    swept = {row for row, _ in table.sweeps}
    plain = [row for row in rows if row not in swept] or rows
    drawn = [row for row in table.page.drawn if row in present] or plain[:MOST]
    return Comparison(
        title=table.title,
        lead=_lead(table),
        note=table.note,
        tables=[_with_differences(table, setting) for setting in table.settings],
        runs=runs,
        rows=drawn,
        settings=[name for name in table.settings if any(run.setting == name for run in runs)],
        left_out=len(rows) - len(drawn),
        not_run=[row for row in table.page.drawn if row not in present],
        sweeps=list(sweeps_of(table)),
        examples=examples,
        examples_wanted=table.page.gallery is not None,
        split=split,
    )


def _lead(table: ComparisonTable) -> str:
    """How much was run: a product only where every row was run in every setting with every seed."""
    runs = len(table.values)
    rows, settings = len({run.row for run in table.values}), len({run.setting for run in table.values})
    seeds = Counter((run.row, run.setting) for run in table.values)
    most, least = max(seeds.values(), default=0), min(seeds.values(), default=0)
    parts = [counted(rows, "row"), counted(settings, "setting")]
    if rows * settings * most == runs:
        return f"{' × '.join([*parts, counted(most, 'seed')])}: {counted(runs, 'run')} under one protocol."
    each = counted(most, "seed") if least == most else f"{least} to {counted(most, 'seed')}"
    gaps = "; not every row in every setting" if len(seeds) < rows * settings else ""
    return f"{counted(runs, 'run')} under one protocol: {', '.join(parts)}, {each} each{gaps}."


def _with_differences(table: ComparisonTable, setting: str) -> SettingTable:
    """One setting's table, and below it the tested differences by row and column."""
    columns = [column for column in table.columns_of(setting) if not column.published]
    rows = []
    for row in table.rows:
        for column in columns:
            tested = table.difference(setting, row, column.key)
            if tested is not None:
                digits = _digits(tested, column.digits)
                difference, low, high = (signed(v, digits) for v in (tested.difference, tested.low, tested.high))
                p = "<0.001" if tested.p < 0.001 else f"{tested.p:.3f}"
                texts = (column.head, tested.against, difference, f"{low} to {high}", p)
                rows.append(Row(row, [Cell(text) for text in texts]))
    return setting_table(table, setting)._replace(differences=rows)


def _digits(tested: Difference, least: int) -> int:
    """The column's, or more where an end other than 0 would read as 0: one sees whether the interval includes 0."""
    ends = [abs(end) for end in (tested.low, tested.high) if end]
    tried = range(least, least + _MORE)
    return next((digits for digits in tried if all(round(end, digits) for end in ends)), least + _MORE)


def sweeps_of(table: ComparisonTable) -> Iterator[Sweeps]:
    """The table's curves, per setting, of its first metric with a better end.

    The paper's points are of the first column with published numbers for two rows or more; beside them are ours of
    the same name on our data.
    """
    column = next((c for c in table.columns if c.best != "none" and not c.published), None)
    if column is None or not table.sweeps:
        return
    rows = [row for row, _ in table.sweeps]
    for setting in table.settings:
        printed = {c: sum(table.beside(setting, row, c.key) is not None for row in rows) for c in table.columns}
        paper = next((c for c in table.columns if c.published and printed[c] >= 2), None)
        points = list(_points(table, setting, column, paper))
        suffix = f", {setting}" if len(table.settings) > 1 else ""
        if points and paper is None:
            yield Sweeps(points, f"{column.head}{suffix}")
        elif points and paper is not None:
            name = paper.head.removeprefix("paper: ")
            alike = f"{name.partition(',')[0]}, mean of both directions" if ".mean." in paper.key else name
            yield Sweeps(points, f"{column.head}{suffix}", name, f"{alike}{suffix}")


def _points(table: ComparisonTable, setting: str, column: Column, paper: Column | None) -> Iterator[SweepPoint]:
    for row, sweep in table.sweeps:
        ours = table.summary(setting, row, column.key)
        if ours is None:
            continue
        point = SweepPoint(sweep.name, sweep.value, sweep.default, *_mean_and_std(ours))
        if paper is not None:
            split, _, metric = paper.key.partition(".")
            alike = table.summary(setting, row, f"{split.partition('/')[0]}.{metric}")  # ours, of any protocol
            printed = table.beside(setting, row, paper.key)
            point = point._replace(
                alike=None if alike is None else _mean_and_std(alike),
                paper=None if printed is None else sum(printed) / 2,
            )
        yield point


def _mean_and_std(summary: Summary) -> tuple[float, float | None]:
    return summary.mean, summary.std if summary.seeds > 1 else None
