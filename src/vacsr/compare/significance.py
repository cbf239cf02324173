"""Tests rows against the best baseline, or against the row that the table names: a paired bootstrap over queries.

Seeds are averaged query by query first: the test is about the choice of queries, the spread over seeds stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vacsr.compare.cell import Cell
from vacsr.compare.table import Table
from vacsr.evaluate.outcomes import Outcomes, read_outcomes
from vacsr.report.bootstrap import Array, paired_bootstrap
from vacsr.report.queries import contributions, outcomes_of
from vacsr.report.tables import Comparison, ComparisonTable

_AGREE = 1e-6  # a figure is what its queries say, or it is left untested


class _Test(NamedTuple):
    row: str
    key: str
    against: str
    parts: dict[str, Array]
    """Per direction, what each query adds to the difference. [Q] each"""


def tested(table: Table, result: ComparisonTable, done: Sequence[Cell]) -> tuple[Comparison, ...]:
    """Every figure that is a mean over queries, of every row that is no baseline or names another row."""
    found: list[Comparison] = []
    for setting in result.settings:
        runs = [(cell, _outcomes(cell)) for cell in done if cell.setting == setting]
        groups: dict[str, list[_Test]] = {}
        for test in _tests(table, result, runs, setting):
            groups.setdefault(test.key.partition(".")[0], []).append(test)
        for group in groups.values():
            found += _bootstrap(group, setting, draws=table.draws)
    return tuple(found)


def _outcomes(cell: Cell) -> tuple[Outcomes, ...]:
    path = cell.folder / "outcomes.safetensors"
    return read_outcomes(path) if path.is_file() else ()


def _tests(
    table: Table, result: ComparisonTable, runs: Sequence[tuple[Cell, tuple[Outcomes, ...]]], setting: str
) -> Iterator[_Test]:
    """One for each row and column that have a reference and per-query outcomes on both sides."""
    shown = result.shown_rows(setting)
    columns = [column for column in result.columns if not column.published and column.best != "none"]
    for column in columns:
        baselines = [name for name in result.baselines if name in shown]
        best = result.best(setting, column, among=baselines)
        sides = {name: _averaged(result, runs, name, setting, column.key) for name in shown}
        for row in table.rows:
            against = row.against or ("" if row.name in result.baselines else best or "")
            ours, theirs = sides.get(row.name), sides.get(against)
            if ours is not None and theirs is not None and row.name != against and _same_queries(ours, theirs):
                parts = {direction: ours[direction] - theirs[direction] for direction in ours}
                yield _Test(row.name, column.key, against, parts)


def _averaged(
    result: ComparisonTable, runs: Sequence[tuple[Cell, tuple[Outcomes, ...]]], row: str, setting: str, key: str
) -> dict[str, Array] | None:
    """What each query adds to the row's figure, averaged over seeds; None where some seed cannot say. [Q] each"""
    seeds: list[dict[str, Array]] = []
    queries: set[str] = set()
    for cell, outcomes in runs:
        one = outcomes_of(outcomes, key) if cell.row == row else None
        added = None if one is None else contributions(one, key)
        if one is not None and added is not None:
            seeds.append(added)
            queries.add(one.queries)
    summary = result.summary(setting, row, key)
    if summary is None or len(seeds) != summary.seeds or len(queries) != 1:
        return None
    mean = {direction: np.mean([seed[direction] for seed in seeds], axis=0) for direction in seeds[0]}
    total = sum(float(np.nanmean(values)) for values in mean.values())
    return mean if abs(total - summary.mean) <= _AGREE * max(1.0, abs(total)) else None


def _same_queries(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> bool:
    """The same directions, and the same queries asked in each."""
    return ours.keys() == theirs.keys() and all(
        np.array_equal(np.isnan(ours[direction]), np.isnan(theirs[direction])) for direction in ours
    )


def _bootstrap(tests: Sequence[_Test], setting: str, *, draws: int) -> Iterator[Comparison]:
    """All tests of one split and protocol by the same draws; a direction that a figure does not have adds nothing."""
    parts: list[Array] = []
    for direction in ("i2t", "t2i"):
        sizes = {len(test.parts[direction]) for test in tests if direction in test.parts}
        if sizes:
            (size,) = sizes
            matrix = np.stack([test.parts.get(direction, np.zeros(size)) for test in tests], axis=1)
            parts.append(matrix[~np.isnan(matrix).any(axis=1)])
    for test, found in zip(tests, paired_bootstrap(parts, draws=draws), strict=True):
        yield Comparison(setting, test.row, test.key, test.against, *found)
