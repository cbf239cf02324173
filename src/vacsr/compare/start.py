"""The model that a table's cells begin with: trained before them, once, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from vacsr.backbones import scheme_of
from vacsr.compare.cell import Cell, run_cell
from vacsr.compare.table import Table
from vacsr.config import BackboneConfig, Recipe
from vacsr.config.io import recipe_from
from vacsr.errors import UsageError
from vacsr.fewshot.config import FewshotRecipe
from vacsr.methods import build_method
from vacsr.train.run import clear_folder, run_lock

# In these a cell may differ from what it starts from.
_FREE = ("start", "weights", "augment", "variance_block", "checkpointing")


def start_cell(table: Table, missing: Sequence[Cell]) -> Cell | None:
    """What must be trained before ``missing`` can be; None where nothing is, or where it is there already."""
    if table.start is None:
        return None
    folder, recipe = Path(table.start.folder).expanduser(), recipe_from(table.start.recipe)
    found = Cell("start", "first", recipe.train.seed, recipe, folder)
    needed = any(cell.recipe.backbone.start == table.start.folder for cell in missing)
    return found if needed and not found.reported() else None


def check_started(table: Table, recipe: Recipe | FewshotRecipe) -> None:
    """Refuse a cell that the table's own start, once trained, would not fit."""
    if table.start is None or recipe.backbone.start != table.start.folder:
        return
    start, where = recipe_from(table.start.recipe), f"{table.start.folder}, which it starts from,"
    if isinstance(recipe, FewshotRecipe):
        _check_prompted(recipe, start, where)
        return
    theirs = start.backbone
    for name in BackboneConfig.model_fields:
        own, other = getattr(recipe.backbone, name), getattr(theirs, name)
        if name not in _FREE and own != other:
            message = f"backbone.{name} is {own!r}, {where} has {other!r}"
            raise UsageError(f"{message} — set it the same, or start from another model")


def _check_prompted(recipe: FewshotRecipe, start: Recipe, where: str) -> None:
    """Few-shot methods need one network with towers, and one token of each that speaks for all."""
    own, theirs = recipe.backbone.spec, start.backbone
    if scheme_of(theirs.spec).cached:
        raise UsageError(f"{where} reads cached features — start from a run with clip: or tiny: towers")
    if own not in (BackboneConfig().spec, theirs.spec):
        raise UsageError(f"backbone.spec is {own!r}, {where} has {theirs.spec!r} — leave backbone.spec out")
    if theirs.pooling == "gpo":
        message = f"{where} pools with gpo, which has no one token that prompts could speak through"
        raise UsageError(f"{message} — train it with backbone.pooling=cls or mean")
    with torch.random.fork_rng(devices=[]):
        networks = build_method(start.method, dim=theirs.head.dim).networks
    if networks > 1:
        raise UsageError(f"{where} has two networks — start from a method with one, such as infonce")


def refuse_other_start(start: Cell) -> None:
    """A folder with another run is not overwritten unasked."""
    reason = start.outdated()
    if reason is not None:
        raise UsageError(
            f"{start.folder}, which the cells start from, holds a run of another recipe: {reason} — move it away, "
            "or add --fresh to train it again together with the cells that stand on it"
        )


def train_start(start: Cell, every: Sequence[Cell], *, console: Console, fresh: bool) -> None:
    """Train it, by all cores. With ``fresh`` a run of another recipe goes first, and the cells that stood on it."""
    if fresh and start.outdated() is not None:
        for cell in every:
            if Path(cell.recipe.backbone.start).expanduser() == start.folder and cell.folder.exists():
                with run_lock(cell.folder):
                    clear_folder(cell.folder)
    console.print(f"first: what the cells start from, into {start.folder}", highlight=False)
    run_cell(start, progress=True, fresh=fresh)
