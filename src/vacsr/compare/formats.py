"""A comparison table as Markdown, CSV and LaTeX. HTML is drawn from the same :func:`grid`, by whoever renders pages."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vacsr.compare.results import Column, ComparisonTable, Printed, Published, Summary, write_table_json
from vacsr.files import csv_cell, write_text

_ABSENT = "–"
_BETTER, _WORSE = "†", "‡"
_LEGEND = (
    f"{_BETTER} better, {_WORSE} worse than the best baseline of the column, or than the row it varies: the 95% "
    "interval of the difference leaves out 0. It comes from a paired bootstrap over queries and knows nothing of the "
    "spread over training seeds."
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


class Shown(NamedTuple):
    """A figure as it is read."""

    mean: str
    spread: str = ""
    bold: bool = False
    mark: str = ""
    """† or ‡: differs from the best baseline."""

    @property
    def rest(self) -> str:
        """What follows the mean."""
        return (f" ± {self.spread}" if self.spread else "") + self.mark


class Line(NamedTuple):
    """A row as it is read."""

    name: str
    seeds: str
    cells: list[Shown]


class Grid(NamedTuple):
    """One setting's table as it is read."""

    setting: str
    head: list[str]
    lines: list[Line]
    notes: list[str]


def grid(table: ComparisonTable, setting: str) -> Grid:
    """The rows of one setting: what others published first, then ours; the best mean of ours in bold."""
    rows, columns = table.shown_rows(setting), table.columns_of(setting)
    best = {column: table.leading(setting, column) for column in columns}
    theirs = table.published_rows(setting)
    lines = [_published_line(entry, columns) for entry in theirs]
    for row in rows:
        cells = [_shown(table, setting, row, column, bold=row in best[column]) for column in columns]
        lines.append(Line(row, str(table.seeds(setting, row)), cells))
    head = ["method", "seeds", *(column.head for column in columns)]
    return Grid(setting, head, lines, _notes(table, setting, lines, theirs))


def _shown(table: ComparisonTable, setting: str, row: str, column: Column, *, bold: bool) -> Shown:
    if column.published:
        return _printed(table.beside(setting, row, column.key), column)
    found = table.summary(setting, row, column.key)
    if found is None:
        return Shown(_ABSENT)
    spread = f"{found.std:.{column.digits}f}" if found.seeds > 1 else ""
    return Shown(f"{found.mean:z.{column.digits}f}", spread, bold, _mark(table, setting, row, column))


def _mark(table: ComparisonTable, setting: str, row: str, column: Column) -> str:
    tested = table.difference(setting, row, column.key)
    if tested is None or not tested.clear or column.best == "none":
        return ""
    return _BETTER if (tested.difference > 0) == (column.best == "high") else _WORSE


def _published_line(entry: Published, columns: tuple[Column, ...]) -> Line:
    shown = [_printed(None if column.published else entry.printed(column.key), column) for column in columns]
    return Line(f"{entry.name} (published)", _ABSENT, shown)


def _printed(found: Printed | None, column: Column) -> Shown:
    return Shown(_ABSENT if found is None else found.text(column.digits))


def _notes(table: ComparisonTable, setting: str, lines: list[Line], theirs: list[Published]) -> list[str]:
    """Marks and bold explained, and where others' figures stand."""
    notes = [_LEGEND] if any(cell.mark for line in lines for cell in line.cells) else []
    seeds = {table.seeds(setting, row) for row in table.shown_rows(setting)}
    if len(seeds) > 1 and any(column.best != "none" for column in table.columns_of(setting)):
        notes.append(f"Bold is the best mean; where a row with fewer than {max(seeds)} seeds is ahead, none is.")
    keys = [column.key for column in table.columns_of(setting) if column.published]
    quoted = [
        entry
        for entry in table.published
        if entry.beside and entry.setting in ("", setting) and any(entry.number(key) is not None for key in keys)
    ]
    notes += [f"Published: {source}." for source in _sources(theirs)]
    return notes + [f"Published, on other data than ours: {source}." for source in _sources(quoted)]


def _sources(entries: list[Published]) -> list[str]:
    """Each source once, with all that is to be said of its figures."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        said = found.setdefault(entry.source, [])
        said += [entry.note] if entry.note and entry.note not in said else []
    return [f"{source} ({'; '.join(said)})" if said else source for source, said in found.items()]


def to_markdown(table: ComparisonTable) -> str:
    """One table a setting; best mean of each column in bold."""
    parts = [f"# {table.title}", *([table.note] if table.note else [])]
    for setting in table.settings:
        shown = grid(table, setting)
        lines = [shown.head, ["---"] * len(shown.head)]
        for line in shown.lines:
            cells = [f"**{cell.mean}**{cell.rest}" if cell.bold else cell.mean + cell.rest for cell in line.cells]
            lines.append([line.name, line.seeds, *cells])
        body = "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines)
        parts += [f"## {setting}\n\n{body}", *shown.notes]
    return "\n\n".join(parts) + "\n"


def to_csv(table: ComparisonTable) -> str:
    """All settings in one sheet: mean and standard deviation of each column in full, and whose the figures are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [csv_cell(name) for column in table.columns for name in (column.head, f"{column.head} std")]
    writer.writerow(["setting", "method", "whose", "seeds", *figures])
    for setting in table.settings:
        for entry in table.published_rows(setting):
            found = [None if c.published else entry.printed(c.key) for c in table.columns]
            values = [part for one in found for part in (None if one is None else one.whole, None)]
            writer.writerow([csv_cell(setting), csv_cell(entry.name), "published", "", *values])
        for row in table.shown_rows(setting):
            numbers = [part for column in table.columns for part in _numbers(table, setting, row, column)]
            writer.writerow([csv_cell(setting), csv_cell(row), "ours", table.seeds(setting, row), *numbers])
    return text.getvalue()


def _numbers(table: ComparisonTable, setting: str, row: str, column: Column) -> tuple[float | str | None, float | None]:
    if column.published:
        printed = table.beside(setting, row, column.key)
        return None if printed is None else printed.whole, None
    found = table.summary(setting, row, column.key)
    return (None, None) if found is None else (found.mean, found.std if found.seeds > 1 else None)


def to_latex(table: ComparisonTable) -> str:
    """One `table` a setting in booktabs' style; it needs \\usepackage{booktabs}."""
    return "\n".join(_latex_table(table, setting) for setting in table.settings)


def _latex_table(table: ComparisonTable, setting: str) -> str:
    shown = grid(table, setting)
    lines = [" & ".join(map(latex, shown.head)), r"\midrule"]
    for line in shown.lines:
        cells = [_latex_cell(cell) for cell in line.cells]
        lines.append(" & ".join([latex(line.name), latex(line.seeds), *cells]))
    body = "\n".join(line if line.startswith(r"\midrule") else rf"{line} \\" for line in lines)
    told = [f"{table.title}, {setting}.", *([table.note] if table.note else []), *shown.notes]
    caption = " ".join(map(latex, told))
    places = "lr" + "r" * (len(shown.head) - 2)
    return (
        f"\\begin{{table}}[t]\n\\centering\n\\caption{{{caption}}}\n"
        f"\\begin{{tabular}}{{{places}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def _latex_cell(cell: Shown) -> str:
    mean = latex(cell.mean.replace("-", "−"))  # a minus, not a hyphen
    return (rf"\textbf{{{mean}}}" if cell.bold else mean) + latex(cell.rest)


def latex(text: str) -> str:
    """Plain text as LaTeX.

    >>> latex("50% of a_b ± 1")
    '50\\\\% of a\\\\_b $\\\\pm$ 1'
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def differences_to_markdown(table: ComparisonTable, against: str) -> str:
    """Every row's mean minus that of ``against``, and how many standard errors that is (Welch)."""
    parts = [_differences(table, setting, against) for setting in table.settings]
    return "\n\n".join([f"# {table.title}: difference from {against} (standard errors)", *parts]) + "\n"


def _differences(table: ComparisonTable, setting: str, against: str) -> str:
    columns = [column for column in table.columns_of(setting) if not column.published]
    head = ["method", *(column.head for column in columns)]
    lines = [head, ["---"] * len(head)]
    for row in table.rows:
        pairs = [(table.summary(setting, row, c.key), table.summary(setting, against, c.key)) for c in columns]
        if row != against and any(ours and theirs for ours, theirs in pairs):
            lines.append([row, *(_difference(*pair, column) for pair, column in zip(pairs, columns, strict=True))])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {setting}\n\n{body}"


def _difference(ours: Summary | None, theirs: Summary | None, column: Column) -> str:
    if ours is None or theirs is None:
        return _ABSENT
    gap = ours.mean - theirs.mean
    error = math.sqrt(ours.std**2 / ours.seeds + theirs.std**2 / theirs.seeds)
    counted = f" ({signed(gap / error, 1)})" if error > 0 and min(ours.seeds, theirs.seeds) > 1 else ""
    return f"{signed(gap, column.digits)}{counted}"


def signed(value: float, digits: int) -> str:
    """With its sign, but for what rounds to zero.

    >>> signed(1.25, 1), signed(-0.04, 1), signed(0.04, 1)
    ('+1.2', '0.0', '0.0')
    """
    shown = f"{value:+z.{digits}f}"
    return shown if float(shown) else shown[1:]


FORMATS: dict[str, Callable[[ComparisonTable], str]] = {"md": to_markdown, "csv": to_csv, "latex": to_latex}
"""By the name of the command line's --format."""
FILES = {"md": "table.md", "csv": "table.csv", "latex": "table.tex"}
"""Where each is written."""


def write_results(table: ComparisonTable, out: Path) -> None:
    """The table in every format, results.json, and records.json where a page was asked for."""
    for name, form in FORMATS.items():
        write_text(out / FILES[name], form(table))
    write_table_json(table, out)
