"""What a table file must keep to, told before anything runs: names, columns, what the page shows, rows' recipes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from vacsr.compare.page import PAGE, RECORDS
from vacsr.compare.table import Table, TableRow, Variant
from vacsr.errors import ConfigError, UsageError
from vacsr.report.formats import FILES
from vacsr.report.tables import Column

_WRITTEN = (*FILES.values(), "results.json", RECORDS, PAGE)


def check_table(table: Table, where: str) -> None:
    """Refuse a table that could not be run or shown; ``where`` names the file it was read from."""
    for kind in ("rows", "settings", "seeds"):
        if not getattr(table, kind):
            raise UsageError(f"{where} has no {kind}, so that nothing could be shown — give at least one")
    _check_names(table.rows, "row", where)
    _check_names(table.settings, "setting", where)
    _check_columns(table.columns, where)
    rows = [row.name for row in table.rows]
    lost = next((row for row in table.rows if row.against and row.against not in rows), None)
    if lost is not None:
        raise UsageError(f"{where}: '{lost.name}' is against '{lost.against}', which is no row — name one of them")
    for entry in table.published:
        if entry.beside and entry.beside not in rows:
            message = f"{where}: no row '{entry.beside}' that '{entry.name}' could stand beside"
            raise UsageError(f"{message} — name a row, or leave beside: out")
    _check_recipes(table, where)


def _check_names(variants: Sequence[Variant], kind: str, where: str) -> None:
    """Names become folders, so they are told apart and can be one."""
    names = [variant.name for variant in variants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where} has two {kind}s named '{twice}', which would share their folders — rename one")
    slash = next((name for name in names if "/" in name or name in ("", ".", "..")), None)
    if slash is not None:
        raise UsageError(f"{where}: the {kind} '{slash}' becomes a folder's name — leave out '/' and give it a word")
    taken = next((name for name in names if name.lower() in _WRITTEN), None)
    if taken is not None:
        message = f"{where}: the {kind} '{taken}' becomes a folder's name, and a file of the table is called so"
        raise UsageError(f"{message} — rename it")


def _check_columns(columns: Sequence[Column], where: str) -> None:
    """A figure stands once in a table; beside ours may stand what others published."""
    for one, two in combinations(columns, 2):
        together = not one.settings or not two.settings or set(one.settings) & set(two.settings)
        if (one.key, one.published) == (two.key, two.published) and together:
            raise UsageError(f"{where} has two columns of the key '{one.key}' — take one out")


def _check_recipes(table: Table, where: str) -> None:
    """Every cell has a recipe; what does not fit is told with its row, unless all rows have it."""
    for row in table.rows:
        for setting in table.settings:
            try:
                table.recipe(row, setting, seed=table.seeds[0])
            except ConfigError as error:
                blamed = "" if _shared(table, setting, error) else f", row '{row.name}' in setting '{setting.name}'"
                raise ConfigError(f"{where}{blamed}: {error}") from error


def _shared(table: Table, setting: Variant, error: ConfigError) -> bool:
    """The same is wrong without any row or setting."""
    bare = Variant(name=setting.name)
    try:
        table.recipe(TableRow(name="base"), bare, seed=table.seeds[0])
    except ConfigError as other:
        return str(other) == str(error)
    return False


def check_page(table: Table, where: str) -> None:
    """The page shows rows and settings that are there; a slip would leave a part of it out."""
    asked, known = table.page.gallery, {"row": table.rows, "setting": table.settings}
    named = [("row", name) for name in (*table.page.drawn, *(asked.rows if asked else ()))]
    named += [("setting", asked.setting)] if asked else []
    for kind, name in named:
        names = [variant.name for variant in known[kind]]
        if name not in names:
            raise UsageError(f"{where}: page names the {kind} '{name}' — choose from: {', '.join(names)}")
