"""A comparison table as Markdown, CSV, LaTeX and HTML, all of :func:`setting_table`."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vacsr.compare.results import RECORDS, RESULTS, Column, ComparisonTable, Published, Summary, write_records
from vacsr.evaluate.report import markdown_table
from vacsr.evaluate.significance import holm
from vacsr.files import csv_cell, write_json, write_text
from vacsr.pages.render import Cell, Row, SettingTable, render

_ABSENT = "–"
_BETTER, _WORSE = "†", "‡"
_LEGEND = (
    f"{_BETTER} better, {_WORSE} worse than the best baseline of the column, or than the row it varies: the 95% "
    "interval of the difference excludes 0. It comes from a paired bootstrap over queries; variation between training "
    "seeds is not included."
)
_CORRECTED = (
    "\\* p < .05 by Welch's t-test over seeds, corrected for the number of rows by Holm's method, but not for that of "
    "columns and settings."
)
_GREEK = (
    "alpha beta gamma delta varepsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau varphi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "→": r"$\to$", "∞": r"$\infty$", "×": r"$\times$",
    "≥": r"$\ge$", "≤": r"$\le$", "≈": r"$\approx$", "·": r"$\cdot$", "²": "$^2$", "…": r"\ldots{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}",  # a bracket after a line's end would be its option
    "≠": r"$\ne$", "√": r"$\surd$", "\u2009": r"\,", "\u202f": r"\,",
    **{letter: f"$\\{name}$" for letter, name in zip("αβγδεζηθκλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK.split(), strict=True)},
    _BETTER: r"$^\dagger$", _WORSE: r"$^\ddagger$",
}  # fmt: skip


def setting_table(table: ComparisonTable, setting: str) -> SettingTable:
    """The rows of one setting: what others published first, then ours; the best mean of ours in bold."""
    rows, columns, theirs = table.shown_rows(setting), table.columns_of(setting), table.published_rows(setting)
    best = {column: table.leading(setting, column) for column in columns}
    lines = []
    for entry in theirs:
        cells = [_printed(None if column.published else entry.printed(column.key), column) for column in columns]
        lines.append(Row(f"{entry.name} (published)", [Cell(_ABSENT), *cells]))
    for row in rows:
        cells = [_cell(table, setting, row, column, best=row in best[column]) for column in columns]
        lines.append(Row(row, [Cell(str(table.seeds(setting, row))), *cells]))
    head = ["method", "seeds", *(column.head for column in columns)]
    return SettingTable(setting, f"{table.title}, {setting}", head, lines, _notes(table, setting, lines, theirs))


def _cell(table: ComparisonTable, setting: str, row: str, column: Column, *, best: bool) -> Cell:
    if column.published:
        return _printed(table.beside(setting, row, column.key), column)
    summary = table.summary(setting, row, column.key)
    if summary is None:
        return Cell(_ABSENT)
    tested, mark = table.difference(setting, row, column.key), ""
    if tested is not None and tested.clear and column.best != "none":
        mark = _BETTER if (tested.difference > 0) == (column.best == "high") else _WORSE
    spread = f"{summary.std:.{column.digits}f}" if summary.seeds > 1 else ""
    return Cell(f"{summary.mean:z.{column.digits}f}", best, spread, mark)


def _printed(ends: tuple[float, float] | None, column: Column) -> Cell:
    """What others printed: a number, or a range."""
    return Cell(_ABSENT if ends is None else "–".join(dict.fromkeys(f"{end:z.{column.digits}f}" for end in ends)))


def _notes(table: ComparisonTable, setting: str, lines: list[Row], theirs: list[Published]) -> list[str]:
    """What marks and bold mean, and the sources of others' numbers."""
    notes = [_LEGEND] if any(cell.mark for line in lines for cell in line.cells) else []
    seeds = {table.seeds(setting, row) for row in table.shown_rows(setting)}
    if len(seeds) > 1 and any(column.best != "none" for column in table.columns_of(setting)):
        notes.append(f"Bold is the best mean; where a row with fewer than {max(seeds)} seeds is ahead, none is.")
    keys = [column.key for column in table.columns_of(setting) if column.published]
    quoted = [
        entry
        for entry in table.published
        if entry.beside and entry.setting in ("", setting) and any(entry.printed(key) for key in keys)
    ]
    notes += [f"Published: {source}." for source in _sources(theirs)]
    return notes + [f"Published, on other data than ours: {source}." for source in _sources(quoted)]


def _sources(entries: list[Published]) -> list[str]:
    """Each source once, with the notes on its numbers."""
    notes: dict[str, dict[str, None]] = {}
    for entry in entries:
        notes.setdefault(entry.source, {}).update({entry.note: None} if entry.note else {})
    return [f"{source} ({'; '.join(texts)})" if texts else source for source, texts in notes.items()]


def to_markdown(table: ComparisonTable) -> str:
    """One table per setting; the best mean of each column in bold."""
    parts = [f"# {table.title}", *([table.note] if table.note else [])]
    for setting in table.settings:
        shown = setting_table(table, setting)
        rows = []
        for row in shown.rows:
            cells = [(f"**{cell.text}**" if cell.best else cell.text) + cell.rest for cell in row.cells]
            rows.append([row.name, *cells])
        parts += [f"## {setting}\n\n{markdown_table(shown.head, rows)}", *shown.notes]
    return "\n\n".join(parts) + "\n"


def to_csv(table: ComparisonTable) -> str:
    """All settings in one sheet: mean and standard deviation of each column in full, and whose the numbers are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [csv_cell(name) for column in table.columns for name in (column.head, f"{column.head} std")]
    writer.writerow(["setting", "method", "whose", "seeds", *names])
    for setting in table.settings:
        for entry in table.published_rows(setting):
            printed = [None if column.published else entry.printed(column.key) for column in table.columns]
            numbers = [number for ends in printed for number in (_whole(ends), None)]
            writer.writerow([csv_cell(setting), csv_cell(entry.name), "published", "", *numbers])
        for row in table.shown_rows(setting):
            numbers = [number for column in table.columns for number in _numbers(table, setting, row, column)]
            writer.writerow([csv_cell(setting), csv_cell(row), "ours", table.seeds(setting, row), *numbers])
    return text.getvalue()


def _numbers(table: ComparisonTable, setting: str, row: str, column: Column) -> tuple[float | str | None, float | None]:
    if column.published:
        return _whole(table.beside(setting, row, column.key)), None
    summary = table.summary(setting, row, column.key)
    return (None, None) if summary is None else (summary.mean, summary.std if summary.seeds > 1 else None)


def _whole(ends: tuple[float, float] | None) -> float | str | None:
    """All that was printed: a number, or both ends of a range."""
    if ends is None:
        return None
    low, high = (end + 0.0 for end in ends)  # -0.0 becomes 0.0
    return low if low == high else f"{low}–{high}"


def to_latex(table: ComparisonTable) -> str:
    """One `table` per setting in booktabs' style; it needs \\usepackage{booktabs}."""
    lines = []
    for setting in table.settings:
        shown = setting_table(table, setting)
        caption = " ".join(latex(text) for text in (f"{table.title}, {setting}.", table.note, *shown.notes) if text)
        lines += [r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(shown.head) - 1)}}}", r"\toprule"]
        lines += [rf"{' & '.join(map(latex, shown.head))} \\", r"\midrule"]
        lines += [rf"{' & '.join([latex(row.name), *map(_latex_cell, row.cells)])} \\" for row in shown.rows]
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _latex_cell(cell: Cell) -> str:
    number = latex(cell.text.replace("-", "−"))  # a minus, not a hyphen
    return (rf"\textbf{{{number}}}" if cell.best else number) + latex(cell.rest)


def latex(text: str) -> str:
    """Plain text as LaTeX.

    >>> latex("50% of a_b ± 1")
    '50\\\\% of a\\\\_b $\\\\pm$ 1'
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def differences_to_markdown(table: ComparisonTable, against: str) -> str:
    """Every row's mean minus that of ``against``, how many standard errors that is (Welch), and `*` where it is clear
    after a correction for the number of rows."""
    parts = [f"# {table.title}: difference from {against} (standard errors)"]
    for setting in table.settings:
        columns = [column for column in table.columns_of(setting) if not column.published]
        names = [row for row in table.shown_rows(setting) if row != against]
        by_column = [_differences(table, setting, names, against, column) for column in columns]
        rows = [row for row in map(list, zip(names, *by_column, strict=True)) if {*row[1:]} != {_ABSENT}]
        parts.append(f"## {setting}\n\n{markdown_table(['method', *(column.head for column in columns)], rows)}")
    parts += [_CORRECTED] if any("*" in cell for cell in parts[1:]) else []
    return "\n\n".join(parts) + "\n"


def _differences(table: ComparisonTable, setting: str, names: list[str], against: str, column: Column) -> list[str]:
    theirs = table.summary(setting, against, column.key)
    gaps = {name: _gap(table.summary(setting, name, column.key), theirs) for name in names}
    tested = {name: gap.p for name, gap in gaps.items() if gap is not None and gap.p is not None}
    clear = {name for name, p in zip(tested, holm([*tested.values()]), strict=True) if p < 0.05}
    shown = []
    for name, gap in gaps.items():
        counted = f" ({signed(gap.errors, 1)})" if gap is not None and gap.errors is not None else ""
        text = _ABSENT if gap is None else f"{signed(gap.difference, column.digits)}{counted}"
        shown.append(text + "*" * (name in clear))
    return shown


class _Gap(NamedTuple):
    """A difference of two means, in standard errors too, and its p by Welch's test; None where no seeds vary."""

    difference: float
    errors: float | None = None
    p: float | None = None


def _gap(ours: Summary | None, theirs: Summary | None) -> _Gap | None:
    if ours is None or theirs is None:
        return None
    gap, error = ours.mean - theirs.mean, math.sqrt(ours.std**2 / ours.seeds + theirs.std**2 / theirs.seeds)
    if error == 0 or min(ours.seeds, theirs.seeds) < 2:
        return _Gap(gap)
    from scipy.stats import ttest_ind_from_stats

    sides = ours.mean, ours.std, ours.seeds, theirs.mean, theirs.std, theirs.seeds
    return _Gap(gap, gap / error, float(ttest_ind_from_stats(*sides, equal_var=False).pvalue))


def signed(value: float, digits: int) -> str:
    """With its sign, but for what rounds to zero.

    >>> signed(1.25, 1), signed(-0.04, 1), signed(0.04, 1)
    ('+1.2', '0.0', '0.0')
    """
    shown = f"{value:+z.{digits}f}"
    return shown if float(shown) else shown[1:]


def to_html(table: ComparisonTable) -> str:
    """A fragment for other pages: a heading, a table and its notes per setting."""
    return render("tables.html", tables=[setting_table(table, setting) for setting in table.settings], note=table.note)


FORMATS: dict[str, Callable[[ComparisonTable], str]] = {
    "md": to_markdown, "csv": to_csv, "latex": to_latex, "html": to_html
}  # fmt: skip
"""By the name of the command line's --format."""
FILES = {"md": "table.md", "csv": "table.csv", "latex": "table.tex", "html": "table.html"}  # where each is written


def write_results(table: ComparisonTable, out: Path) -> None:
    """The table in every format, results.json, and records.json where a page was asked for."""
    for name, form in FORMATS.items():
        write_text(out / FILES[name], form(table))
    write_json(out / RESULTS, table.to_dict())
    if table.records is not None:
        write_records(out / RECORDS, table.records)
