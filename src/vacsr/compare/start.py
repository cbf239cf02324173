"""The model that a table's cells begin with: trained before them, once, in a run folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vacsr.compare.cell import Cell, run_cell
from vacsr.compare.table import Table
from vacsr.errors import UsageError
from vacsr.recipes import recipe_from


def start_cell(table: Table, missing: Sequence[Cell]) -> Cell | None:
    """What must be trained before ``missing`` can be; None where nothing is, or where it is there already."""
    if table.start is None:
        return None
    folder, recipe = Path(table.start.folder).expanduser(), recipe_from(table.start.recipe)
    found = Cell("start", "first", recipe.train.seed, recipe, folder)
    needed = any(cell.recipe.backbone.start == table.start.folder for cell in missing)
    return found if needed and not found.reported() else None


def refuse_other_start(start: Cell) -> None:
    """A folder with another run is not overwritten unasked."""
    reason = start.outdated()
    if reason is not None:
        raise UsageError(
            f"{start.folder}, which the cells start from, holds a run of another recipe: {reason} — move it away, "
            "or add --fresh to train it again together with the cells that stand on it"
        )


def train_start(start: Cell, every: Sequence[Cell], *, console: Console) -> None:
    """Train it, by all cores. A run of another recipe goes first, and with it the cells that stood on it."""
    if start.outdated() is not None:
        for cell in every:
            if Path(cell.recipe.backbone.start).expanduser() == start.folder and cell.folder.exists():
                shutil.rmtree(cell.folder)
    console.print(f"first: what the cells start from, into {start.folder}", highlight=False)
    run_cell(start, progress=True, fresh=True)
