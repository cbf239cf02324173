"""Rows of a table that can never finish: all of them are told of before the first cell runs."""

from __future__ import annotations

from collections.abc import Sequence

from vacsr.compare.cell import Cell
from vacsr.compare.start import check_started
from vacsr.compare.table import Table
from vacsr.config.io import recipe_from
from vacsr.errors import UsageError
from vacsr.fewshot import FewshotRecipe, check_fewshot
from vacsr.train.run import check_recipe


def check_cells(table: Table, asked: Sequence[Cell]) -> None:
    """Refuse ``asked`` where a recipe alone shows that its cell cannot finish; the message names row and setting."""
    if asked and table.start is not None:
        try:
            check_recipe(recipe_from(table.start.recipe))
        except UsageError as error:
            raise UsageError(f"what the cells start from cannot be trained: {error}") from error
    refused: dict[str, tuple[str, UsageError]] = {}
    seen: set[tuple[str, str]] = set()
    for cell in asked:
        if (cell.row, cell.setting) in seen:  # seeds are alike
            continue
        seen.add((cell.row, cell.setting))
        try:
            _check_recipe(cell)
            check_started(table, cell.recipe)
        except UsageError as error:
            refused.setdefault(cell.row, (cell.setting, error))
    if refused:
        raise _told(refused, all_of_them=len(refused) == len({cell.row for cell in asked}))


def _check_recipe(cell: Cell) -> None:
    if isinstance(cell.recipe, FewshotRecipe):
        check_fewshot(cell.recipe)
    else:
        check_recipe(cell.recipe, timed=cell.task == "efficiency")


def _told(refused: dict[str, tuple[str, UsageError]], *, all_of_them: bool) -> UsageError:
    """The first with its reason, the others by name, and how to do without them where some are left."""
    first, *others = refused
    setting, error = refused[first]
    more = f" (nor can {', '.join(others)})" if others else ""
    message = f"row '{first}' can never finish in '{setting}'{more}: {error}"
    drop = f"drop: [{', '.join(refused)}]"
    return UsageError(message if all_of_them else f"{message}; or leave it out by --with a file that has {drop}")
