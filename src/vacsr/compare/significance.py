"""Tests rows against the best baseline, or against the row that the table names: a paired bootstrap over queries.

Seeds are averaged query by query first: the test is about the choice of queries, the spread over seeds stands beside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vacsr.compare.cell import Cell
from vacsr.compare.table import Table
from vacsr.errors import DataError
from vacsr.evaluate.outcomes import Outcomes, QueryOutcomes, read_outcomes
from vacsr.report.bootstrap import Array, Part, paired_bootstrap
from vacsr.report.queries import contributions, outcomes_of
from vacsr.report.tables import Column, Comparison, ComparisonTable

_AGREE = 1e-6  # a figure is what its queries say, or it is left untested
_NO_QUERIES = QueryOutcomes(*(torch.empty(0) for _ in range(3)))
_NONE = Outcomes("", "", _NO_QUERIES, _NO_QUERIES, queries="", caption_image=torch.empty(0))  # asks what is kept at all


class _Run(NamedTuple):
    """A finished cell, and how its queries fared."""

    cell: Cell
    outcomes: tuple[Outcomes, ...] = ()
    lost: str = ""
    """Why there are none."""


class _Side(NamedTuple):
    """A row's figure, query by query."""

    queries: str
    """A digest of their ids."""
    parts: dict[str, Array]
    """Per direction, what each query adds, NaN where it is not asked. [Q] each"""
    caption_image: NDArray[np.int64]
    """The image of each caption. [M]"""


class _Test(NamedTuple):
    row: str
    key: str
    against: str
    difference: _Side


def tested(table: Table, result: ComparisonTable, done: Sequence[Cell]) -> tuple[Comparison, ...]:
    """Every figure that is a mean over queries, of every row that is no baseline or names another row."""
    found: list[Comparison] = []
    lost: dict[str, list[_Run]] = {}
    for setting in result.settings:
        runs = [_read(cell) for cell in done if cell.setting == setting]
        needed = tested_rows(table, result, setting, lambda key: contributions(_NONE, key) is not None)
        for run in runs:
            if run.lost and run.cell.row in needed:
                lost.setdefault(run.cell.row, []).append(run)
        groups: dict[tuple[str, str], list[_Test]] = {}
        for test in _tests(table, result, runs, setting):
            groups.setdefault((test.key.partition(".")[0], test.difference.queries), []).append(test)
        for group in groups.values():
            found += _bootstrap(group, setting, draws=table.draws)
    tell_of_lost({row: [(run.cell, run.lost) for run in runs] for row, runs in lost.items()}, what="queries")
    return tuple(found)


def _read(cell: Cell) -> _Run:
    try:
        return _Run(cell, read_outcomes(cell.folder / "outcomes.safetensors"))
    except DataError as error:
        return _Run(cell, lost=str(error).partition(" — ")[0])


def tested_rows(table: Table, result: ComparisonTable, setting: str, testable: Callable[[str], bool]) -> set[str]:
    """Rows that are tested, or tested against, in a figure whose key is ``testable``."""
    columns = [column for column in tested_columns(result, setting) if testable(column.key)]
    return {name for column in columns for pair in references(table, result, setting, column) for name in pair}


def tell_of_lost(lost: Mapping[str, Sequence[tuple[Cell, str]]], *, what: str) -> None:
    """Cells of each row and why they cannot be tested: a row without marks looks like one that differs from nothing."""
    for row, ((cell, reason), *others) in lost.items():
        more = f" (and {len(others)} more)" if others else ""
        message = f"row '{row}' gets no † or ‡, and no row does against it, where its {what} are lost: {reason}{more}"
        warnings.warn(f"{message} — to train the cell again, delete {cell.folder} and run the table", stacklevel=5)


def _tests(table: Table, result: ComparisonTable, runs: Sequence[_Run], setting: str) -> Iterator[_Test]:
    """One for each row and column that have a reference and per-query outcomes on both sides."""
    for column in tested_columns(result, setting):
        shown = result.shown_rows(setting)
        sides = {name: _averaged(result, runs, name, setting, column.key) for name in shown}
        for row, against in references(table, result, setting, column):
            ours, theirs = sides.get(row), sides.get(against)
            if ours is not None and theirs is not None and _same_queries(ours, theirs):
                parts = {direction: ours.parts[direction] - theirs.parts[direction] for direction in ours.parts}
                yield _Test(row, column.key, against, ours._replace(parts=parts))


def tested_columns(result: ComparisonTable, setting: str) -> list[Column]:
    """Figures of ours that have a better end."""
    return [column for column in result.columns_of(setting) if not column.published and column.best != "none"]


def references(table: Table, result: ComparisonTable, setting: str, column: Column) -> Iterator[tuple[str, str]]:
    """Each row that is tested, and against which: the one it names, else the column's best baseline."""
    shown = result.shown_rows(setting)
    best = result.best(setting, column, among=[name for name in result.baselines if name in shown])
    for row in table.rows:
        against = row.against or ("" if row.name in result.baselines else best or "")
        if against and row.name != against:
            yield row.name, against


def _averaged(result: ComparisonTable, runs: Sequence[_Run], row: str, setting: str, key: str) -> _Side | None:
    """What each query adds to the row's figure, averaged over seeds; None where some seed cannot say."""
    seeds: list[dict[str, Array]] = []
    queries: set[str] = set()
    owners: list[NDArray[np.int64]] = []
    for cell, outcomes, _ in runs:
        one = outcomes_of(outcomes, key) if cell.row == row else None
        added = None if one is None else contributions(one, key)
        if one is not None and added is not None:
            seeds.append(added)
            queries.add(one.queries)
            owners.append(one.caption_image.numpy())
    summary = result.summary(setting, row, key)
    if summary is None or len(seeds) != summary.seeds or len(queries) != 1:
        return None
    mean = {direction: np.mean([seed[direction] for seed in seeds], axis=0) for direction in seeds[0]}
    total = sum(float(np.nanmean(values)) for values in mean.values())
    return _Side(queries.pop(), mean, owners[0]) if abs(total - summary.mean) <= _AGREE * max(1.0, abs(total)) else None


def _same_queries(ours: _Side, theirs: _Side) -> bool:
    """The same data, the same directions, and the same queries asked in each."""
    return (ours.queries, ours.parts.keys()) == (theirs.queries, theirs.parts.keys()) and all(
        np.array_equal(np.isnan(asked), np.isnan(theirs.parts[direction])) for direction, asked in ours.parts.items()
    )


def _bootstrap(tests: Sequence[_Test], setting: str, *, draws: int) -> Iterator[Comparison]:
    """All tests over the same queries by the same draws; a direction that a figure does not have adds nothing."""
    parts: list[Part] = []
    for direction in ("i2t", "t2i"):
        known = [test.difference.parts[direction] for test in tests if direction in test.difference.parts]
        if known:
            none = np.zeros(len(known[0]))
            matrix = np.stack([test.difference.parts.get(direction, none) for test in tests], axis=1)
            asked = ~np.isnan(matrix).any(axis=1)
            image = np.arange(len(matrix)) if direction == "i2t" else tests[0].difference.caption_image
            parts.append(Part(matrix[asked], image[asked]))
    for test, found in zip(tests, paired_bootstrap(parts, draws=draws), strict=True):
        yield Comparison(setting, test.row, test.key, test.against, *found)
