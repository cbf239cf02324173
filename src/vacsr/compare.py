"""Methods × settings × seeds from a table file: each cell a run folder, finished cells are never repeated."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from rich.console import Console

from vacsr.config import Config, Recipe
from vacsr.errors import EnvironmentProblem, MissingExtra, UsageError, VacsrError
from vacsr.files import write_json, write_text
from vacsr.recipes import dump_yaml, merge, parse, parse_overrides, read_yaml, recipe_from
from vacsr.report.tables import CellValues, Column, ComparisonTable
from vacsr.train.recipe import run_recipe


class Variant(Config):
    """A row or a setting: a name and what it changes in the base recipe."""

    name: str
    set: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields; `method: {name: vacsr, preset: paper}` and so on."""
    seeds: tuple[int, ...] | None = None
    """Other seeds than the table's."""


class Table(Config):
    """A table file."""

    title: str
    base: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields that all cells share."""
    rows: tuple[Variant, ...]
    settings: tuple[Variant, ...] = (Variant(name="clean"),)
    seeds: tuple[int, ...] = (0,)
    columns: tuple[Column, ...] = ()


class Cell(NamedTuple):
    """One run of the table."""

    row: str
    setting: str
    seed: int
    recipe: Recipe
    folder: Path

    def finished(self) -> bool:
        """Its report exists and its recipe is the one asked for now."""
        config = self.folder / "config.yaml"
        done = (self.folder / "report.json").is_file() and config.is_file()
        return done and config.read_text(encoding="utf-8") == dump_yaml(self.recipe)

    def outdated(self) -> bool:
        """Its folder holds the training of another recipe; one that differs in what it reports is not that."""
        config = self.folder / "config.yaml"
        if not config.is_file():
            return False
        before = read_yaml(config)
        return any(before.get(key) != value for key, value in _training(self.recipe).items())


def _training(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"evaluate"})


def read_table(path: Path, overrides: Sequence[str] = ()) -> Table:
    """A table file; overrides change its base recipe."""
    raw = read_yaml(path)
    table = parse(Table, merge(raw, {"base": merge(raw.get("base") or {}, parse_overrides(overrides))}))
    for kind, variants in (("row", table.rows), ("setting", table.settings)):
        names = [variant.name for variant in variants]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{path} has two {kind}s named '{twice}', which would share their folders — rename one")
        slash = next((name for name in names if "/" in name or name in ("", ".", "..")), None)
        if slash is not None:
            raise UsageError(f"{path}: the {kind} '{slash}' becomes a folder's name — leave out '/' and give it a word")
    return table


def cells(table: Table, out: Path, *, seeds: Sequence[int] = ()) -> Iterator[Cell]:
    """Every cell, row by row: the seeds and settings of a row come together so that a worker can reuse its kernels."""
    for row in table.rows:
        for setting in table.settings:
            for seed in seeds or row.seeds or table.seeds:
                raw = merge(table.base, setting.set)
                if "name" in row.set.get("method", {}):
                    raw["method"] = {}  # another method's fields would not fit
                raw = merge(raw, row.set)
                raw = merge(raw, {"train": {"seed": seed}, "data": {"noise": {"seed": seed}}})
                recipe = recipe_from(raw)
                yield Cell(row.name, setting.name, seed, recipe, out / setting.name / row.name / f"seed-{seed}")


def compare(
    table: Table, out: Path, *, seeds: Sequence[int] = (), jobs: int = 1, rows: Sequence[str] = ()
) -> ComparisonTable:
    """Run what is missing (of ``rows`` only, if given), then write table.md and results.json from all reports."""
    unknown = [name for name in rows if name not in {row.name for row in table.rows}]
    if unknown:
        raise UsageError(f"no row '{unknown[0]}' — the table has: {', '.join(row.name for row in table.rows)}")
    every = list(cells(table, out, seeds=seeds))
    todo = [cell for cell in every if not rows or cell.row in rows]
    console = Console(stderr=True)
    missing = [cell for cell in todo if not cell.finished()]
    console.print(f"{len(todo)} cells, {len(todo) - len(missing)} already done", highlight=False)
    failures = list(_run_all(missing, jobs=jobs, console=console))
    result = collect(table, [cell for cell in every if cell.finished()])
    write_json(out / "results.json", result.to_json())
    write_text(out / "table.md", result.to_markdown())
    if failures:
        raise failures[0]
    return result


def _run_all(missing: Sequence[Cell], *, jobs: int, console: Console) -> Iterator[VacsrError]:
    """Run cells one by one, or a group of one row a worker; errors come out, the other cells go on."""
    groups: dict[str, list[Cell]] = {}
    for cell in missing:
        groups.setdefault(cell.row if jobs > 1 else str(cell.folder), []).append(cell)
    if jobs <= 1:
        for (cell,) in groups.values():
            console.print(f"{cell.setting} / {cell.row} / seed {cell.seed}", highlight=False)
            yield from _run_group([cell], True)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread, initargs=(jobs,))
    try:
        waiting: dict[Future[list[VacsrError]], str] = {
            pool.submit(_run_group, group, False): name for name, group in groups.items()
        }
        total = len(waiting)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                name = waiting.pop(future)
                console.print(f"{name} done, {total - len(waiting)} of {total} rows", highlight=False)
                yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, rows not yet begun stay so


def _one_thread(jobs: int) -> None:
    """Share the cores among the workers."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def _run_group(group: Sequence[Cell], progress: bool) -> list[VacsrError]:
    failures: list[VacsrError] = []
    for cell in group:
        try:
            run_cell(cell, progress=progress)
        except VacsrError as error:
            # MissingExtra words its own message, so its parent carries this one.
            kind = EnvironmentProblem if isinstance(error, MissingExtra) else type(error)
            failures.append(kind(f"{cell.setting} / {cell.row} / seed {cell.seed}: {error}"))
    return failures


def run_cell(cell: Cell, *, progress: bool) -> None:
    """Train and report one cell: go on with its own checkpoint, start afresh after a change of its recipe."""
    if cell.outdated():
        shutil.rmtree(cell.folder)
    if run_recipe(cell.recipe, cell.folder, resume=True, progress=progress).run.interrupted:
        raise KeyboardInterrupt  # one Ctrl-C stops the table, not just this cell


def collect(table: Table, done: Sequence[Cell]) -> ComparisonTable:
    """Read the reports of finished cells."""
    values = [CellValues(cell.row, cell.setting, cell.seed, _by_split(cell.folder / "report.json")) for cell in done]
    order = [row.name for row in table.rows], [setting.name for setting in table.settings]
    return ComparisonTable(table.title, table.columns, tuple(order[0]), tuple(order[1]), tuple(values))


def _by_split(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text(encoding="utf-8"))
    return {result["split"]: result for result in report["results"]}
