"""Methods × settings × seeds from a table file: each cell a run folder, finished cells are never repeated."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from rich.console import Console

from vacsr.config import Config, Recipe
from vacsr.errors import ConfigError, EnvironmentProblem, MissingExtra, UsageError, VacsrError
from vacsr.files import write_json, write_text
from vacsr.recipes import layered_recipe, parse, parse_overrides, read_yaml, recipe_from
from vacsr.report.tables import CellValues, Column, ComparisonTable
from vacsr.train.checkpoint import NO_EFFECT
from vacsr.train.folder import check_place, holds_run
from vacsr.train.recipe import run_recipe


class Variant(Config):
    """A row or a setting: a name and what it changes in the base recipe."""

    name: str
    set: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields; `method: {name: vacsr, preset: paper}` and so on."""
    seeds: tuple[int, ...] | None = None
    """Other seeds than the table's; a setting's come before a row's."""


class Table(Config):
    """A table file."""

    title: str
    base: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields that all cells share."""
    rows: tuple[Variant, ...]
    settings: tuple[Variant, ...] = (Variant(name="clean"),)
    seeds: tuple[int, ...] = (0,)
    columns: tuple[Column, ...] = ()
    overrides: dict[str, Any] = Field(default_factory=dict)
    """On top of base, row and setting, in this order: the command line's --set."""


class Cell(NamedTuple):
    """One run of the table."""

    row: str
    setting: str
    seed: int
    recipe: Recipe
    folder: Path

    def finished(self) -> bool:
        """Its report exists and is what the recipe asked for now would give."""
        return (self.folder / "report.json").is_file() and self._difference(report=True) is None

    def outdated(self) -> str | None:
        """In what its folder's run was trained by another recipe; None where it was not, or where there is no run."""
        return self._difference(report=False) if holds_run(self.folder) else None

    def _difference(self, *, report: bool) -> str | None:
        """The first field that differs. The old recipe is read anew, so that fields it did not know have defaults."""
        try:
            before = recipe_from(read_yaml(self.folder / "config.yaml"))
        except ConfigError as error:
            return f"its recipe cannot be read: {error}"
        return first_difference(_fields(before, report=report), _fields(self.recipe, report=report))


def _fields(recipe: Recipe, *, report: bool) -> dict[str, Any]:
    """What decides the weights, and with ``report`` also the figures."""
    left_out: dict[str, Any] = {"train": set(NO_EFFECT)} | ({} if report else {"evaluate": True})
    return recipe.model_dump(mode="json", exclude=left_out)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> str | None:
    """The first dotted field in which two configurations differ, with both values.

    >>> first_difference({"train": {"epochs": 20, "lr": 0.1}}, {"train": {"epochs": 1, "lr": 0.2}})
    'train.epochs was 20 and is now 1'
    """
    for key in dict.fromkeys((*now, *before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found = first_difference(old, new, f"{place}{key}.")
            if found is not None:
                return found
        elif old != new:
            return f"{place}{key} was {old!r} and is now {new!r}"
    return None


def read_table(path: Path, overrides: Sequence[str] = ()) -> Table:
    """A table file; overrides change every cell."""
    raw = read_yaml(path)
    table = parse(Table, {**raw, "overrides": parse_overrides(overrides)})
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
            for seed in seeds or setting.seeds or row.seeds or table.seeds:
                drawn = {"train": {"seed": seed}, "data": {"noise": {"seed": seed}}}
                recipe = layered_recipe(table.base, row.set, setting.set, table.overrides, drawn)
                yield Cell(row.name, setting.name, seed, recipe, out / setting.name / row.name / f"seed-{seed}")


def compare(
    table: Table,
    out: Path,
    *,
    seeds: Sequence[int] = (),
    jobs: int = 1,
    rows: Sequence[str] = (),
    fresh: bool = False,
) -> ComparisonTable:
    """Run what is missing (of ``rows`` only, if given), then write table.md and results.json from all reports.

    Runs of another recipe are in the way: they are refused before anything runs, or with ``fresh`` deleted.
    """
    check_place(out)
    unknown = [name for name in rows if name not in {row.name for row in table.rows}]
    if unknown:
        raise UsageError(f"no row '{unknown[0]}' — the table has: {', '.join(row.name for row in table.rows)}")
    every = list(cells(table, out, seeds=seeds))
    todo = [cell for cell in every if not rows or cell.row in rows]
    console = Console(stderr=True)
    missing = [cell for cell in todo if not cell.finished()]
    if not fresh:
        _refuse_outdated(missing)
    console.print(f"{len(todo)} cells, {len(todo) - len(missing)} already done", highlight=False)
    failures = list(_run_all(missing, jobs=jobs, console=console, fresh=fresh))
    result = collect(table, [cell for cell in every if cell.finished()])
    write_json(out / "results.json", result.to_json())
    write_text(out / "table.md", result.to_markdown())
    if failures:
        raise failures[0]
    return result


def _refuse_outdated(missing: Sequence[Cell]) -> None:
    found = [(cell, reason) for cell in missing if (reason := cell.outdated()) is not None]
    if found:
        cell, reason = found[0]
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise UsageError(
            f"{cell.folder} holds a run of another recipe: {reason}{more} — choose another --out, "
            "or add --fresh to start those cells again"
        )


def _run_all(missing: Sequence[Cell], *, jobs: int, console: Console, fresh: bool) -> Iterator[VacsrError]:
    """Run cells one by one, or a group of one row a worker; errors come out, the other cells go on."""
    groups: dict[str, list[Cell]] = {}
    for cell in missing:
        groups.setdefault(cell.row if jobs > 1 else str(cell.folder), []).append(cell)
    if jobs <= 1:
        for (cell,) in groups.values():
            console.print(f"{cell.setting} / {cell.row} / seed {cell.seed}", highlight=False)
            yield from _run_group([cell], True, fresh)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread, initargs=(jobs,))
    try:
        waiting: dict[Future[list[VacsrError]], str] = {
            pool.submit(_run_group, group, False, fresh): name for name, group in groups.items()
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


def _run_group(group: Sequence[Cell], progress: bool, fresh: bool) -> list[VacsrError]:
    failures: list[VacsrError] = []
    for cell in group:
        try:
            run_cell(cell, progress=progress, fresh=fresh)
        except VacsrError as error:
            # MissingExtra words its own message, so its parent carries this one.
            kind = EnvironmentProblem if isinstance(error, MissingExtra) else type(error)
            failures.append(kind(f"{cell.setting} / {cell.row} / seed {cell.seed}: {error}"))
    return failures


def run_cell(cell: Cell, *, progress: bool, fresh: bool = False) -> None:
    """Train and report one cell: go on with its own checkpoint; with ``fresh``, a run of another recipe goes first."""
    if fresh and cell.outdated() is not None:
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
