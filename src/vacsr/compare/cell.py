"""The cells of a table: a recipe and a folder each, finished or not, and whether another run is in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.compare.recognition import joint_figures
from vacsr.compare.table import Table
from vacsr.config import Recipe
from vacsr.config.io import dump_yaml, read_yaml, recipe_from
from vacsr.errors import ConfigError, DataError, OtherRun
from vacsr.fewshot import fewshot_from, run_fewshot
from vacsr.fewshot.config import FewshotRecipe
from vacsr.files import write_json, write_text
from vacsr.train.checkpoint import NO_EFFECT, READING, first_difference
from vacsr.train.run import check_folder, clear_folder, holds_run, run_lock, run_recipe


class Cell(NamedTuple):
    """One run of the table."""

    row: str
    setting: str
    seed: int
    recipe: Recipe | FewshotRecipe
    folder: Path
    task: str = "train"
    measures: tuple[str, ...] = ()
    steps: int = 100

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.setting} / {self.row} / seed {self.seed}"

    def reported(self) -> bool:
        """Its report exists and is what the recipe asked for now would give."""
        return (self.folder / "report.json").is_file() and self._difference(report=True) is None

    def finished(self) -> bool:
        """The report and all that is measured besides."""
        return self.reported() and all((self.folder / f"{name}.json").is_file() for name in self.measures)

    def outdated(self) -> str | None:
        """In what its folder's run was trained by another recipe; None where it was not, or there is nothing to train.

        A report counts however its loss was walked; a checkpoint is one for the very same walk.
        """
        return self._difference(report=False) if holds_run(self.folder) and not self.reported() else None

    def _difference(self, *, report: bool) -> str | None:
        """The first field that differs. The old recipe is read anew, so that fields it did not know have defaults."""
        try:
            raw = read_yaml(self.folder / "config.yaml")
            before = fewshot_from(raw) if self.task == "fewshot" else recipe_from(raw)
        except ConfigError as error:
            return f"its recipe cannot be read: {error}"
        timed = self.task == "efficiency"  # a step's time depends on where it runs, and on how its loss is walked
        old, new = (_fields(recipe, report=report, timed=timed) for recipe in (before, self.recipe))
        return first_difference(old, new)


def _fields(recipe: Recipe | FewshotRecipe, *, report: bool, timed: bool) -> dict[str, Any]:
    """What decides the weights; with ``report`` up to rounding, and also the figures."""
    alike = report and not timed
    left_out = set() if timed else {*NO_EFFECT, *(("tile",) if alike else ())}
    excluded: dict[str, Any] = {"train": left_out} | ({} if report else {"evaluate": True})
    excluded |= {"method": {"objective": {"fused"}}} if alike else {}
    if isinstance(recipe, FewshotRecipe):
        excluded["train"] = {*left_out, *READING}
        excluded |= {} if report else {"data": {"targets"}}
    return recipe.model_dump(mode="json", exclude=excluded)


def cells(table: Table, out: Path, *, seeds: Sequence[int] = ()) -> Iterator[Cell]:
    """Every cell once, row by row."""
    for row in table.rows:
        for setting in table.settings:
            for seed in dict.fromkeys(seeds or setting.seeds or row.seeds or table.seeds):
                folder = out / setting.name / row.name / f"seed-{seed}"
                recipe = table.recipe(row, setting, seed=seed)
                yield Cell(row.name, setting.name, seed, recipe, folder, table.task, table.measures, table.steps)


def run_cell(cell: Cell, *, progress: bool, fresh: bool = False) -> None:
    """Train and report one cell: go on with its own checkpoint; with ``fresh``, a run of another recipe goes first.

    So does one whose checkpoint is of other data. A cell that another process is training is refused.
    """
    with run_lock(cell.folder):
        if fresh and cell.outdated() is not None:
            clear_folder(cell.folder)
        if not _filled(cell, progress=progress, fresh=fresh):
            clear_folder(cell.folder)
            _fill(cell, progress=progress)


def _filled(cell: Cell, *, progress: bool, fresh: bool) -> bool:
    """False where a checkpoint of other data is in the way and may go: what was loaded for it is let go first."""
    try:
        _fill(cell, progress=progress)
    except OtherRun as error:
        if not fresh:
            hint = "bring back what that run had, or add --fresh to start the cell again"
            raise OtherRun(f"{str(error).partition(' — ')[0]} — {hint}") from error
        return False
    return True


def _fill(cell: Cell, *, progress: bool) -> None:
    """Do what is missing; another process may have done some since this one looked."""
    if not cell.reported():
        for name in cell.measures:
            (cell.folder / f"{name}.json").unlink(missing_ok=True)
        if _run(cell, progress=progress):
            raise KeyboardInterrupt  # one Ctrl-C stops the table, not just this cell
    if "tolerance" in cell.measures and not (cell.folder / "tolerance.json").is_file():
        from vacsr.compare.tolerance import run_tolerance

        assert isinstance(cell.recipe, Recipe), "only such tables have measures"
        write_json(cell.folder / "tolerance.json", run_tolerance(cell.folder, cell.recipe))


def _run(cell: Cell, *, progress: bool) -> bool:
    """Fill the cell's folder; True where it was interrupted."""
    if isinstance(cell.recipe, FewshotRecipe):
        return run_fewshot(cell.recipe, cell.folder, resume=True, progress=progress).interrupted
    if cell.task == "efficiency":
        _measure_steps(cell.recipe, cell.folder, steps=cell.steps)
        return False
    return run_recipe(cell.recipe, cell.folder, resume=True, progress=progress).run.interrupted


def _measure_steps(recipe: Recipe, folder: Path, *, steps: int) -> None:
    from vacsr.bench.training import measure_recipe

    check_folder(folder, resume=True)
    (folder / "report.json").unlink(missing_ok=True)
    measured = measure_recipe(recipe, steps=steps)
    write_text(folder / "config.yaml", dump_yaml(recipe))
    write_json(folder / "report.json", {"schema": 1, "results": [{"split": "step", **measured}]})


def read_report(cell: Cell) -> dict[str, Any]:
    """A finished cell's report by split; `test/eccv` is one protocol of a split, `test` the first of its protocols.

    What is measured besides (`tolerance.json`, by split) stands in the split under its own name. Of few-shot cells
    there is also what the splits make together, and how much learns.
    """
    report: dict[str, Any] = {}
    raw = _json(cell.folder / "report.json")
    for result in raw["results"]:
        report.setdefault(result["split"], result)
        if "protocol" in result:
            report[f"{result['split']}/{result['protocol']}"] = result
    for name in cell.measures:
        for split, found in _json(cell.folder / f"{name}.json").items():
            report[split] = {**report.get(split, {}), name: found}
    if cell.task == "fewshot":
        report |= {**joint_figures(report), "trainable": raw["trainable"]}
    return report


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        message = f"{path} is not whole JSON ({error}) — delete its folder and run the same command again"
        raise DataError(message) from error
