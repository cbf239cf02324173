"""Tests rows against the best baseline, or the row that the table names, by a paired bootstrap.

Retrieval tables resample queries: seeds are averaged query by query first, so the test is about the choice of queries,
and the spread over seeds is reported beside it. Few-shot tables resample test photos: every run's accuracies are
computed over the same drawn photos, and from them each number as the table has it, also a harmonic mean or an average
over data sets; seeds are averaged draw by draw.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.compare.cells import Cell
from vacsr.compare.results import Column, ComparisonTable, Difference
from vacsr.compare.table import Table
from vacsr.errors import DataError
from vacsr.evaluate.fewshot import Metrics, averaged_metrics, joint_metrics
from vacsr.evaluate.significance import (
    Array,
    Outcomes,
    Part,
    contributions,
    drawn_means,
    interval,
    is_query_mean,
    outcomes_of,
    paired_bootstrap,
    read_outcomes,
)
from vacsr.fewshot.config import FewshotRecipe
from vacsr.fewshot.run import ANSWERS
from vacsr.files import read_tensors
from vacsr.pages.curves import follow
from vacsr.scoring.topk import DIRECTIONS, Direction

RunKey = tuple[str, str, int]  # setting, row and seed of a run
_AGREE = 1e-6  # a number that its queries or photos do not give is left untested
Lost = dict[str, list[tuple[Cell, str]]]  # by row: cells whose outcomes cannot be read, and why


def tested_columns(result: ComparisonTable, setting: str) -> list[Column]:
    """Our columns that have a better end."""
    return [column for column in result.columns_of(setting) if not column.published and column.best != "none"]


def references(table: Table, result: ComparisonTable, setting: str, column: Column) -> Iterator[tuple[str, str]]:
    """Each row that is tested, and against which: the one it names, else the column's best baseline."""
    shown = result.shown_rows(setting)
    best = result.best(setting, column, among=[name for name in result.baselines if name in shown])
    for row in table.rows:
        against = row.against or ("" if row.name in result.baselines else best or "")
        if against and row.name != against:
            yield row.name, against


def _rows_needed(table: Table, result: ComparisonTable, setting: str, is_tested: Callable[[str], bool]) -> set[str]:
    """Rows that are tested, or tested against, in a column whose key ``is_tested``."""
    columns = [column for column in tested_columns(result, setting) if is_tested(column.key)]
    return {name for column in columns for pair in references(table, result, setting, column) for name in pair}


def _warn_of_lost(lost: Lost, *, what: str) -> None:
    """A row without marks looks like one that does not differ from the baseline."""
    for row, ((cell, reason), *others) in lost.items():
        more = f" (and {len(others)} more)" if others else ""
        message = f"row '{row}' gets no † or ‡, and no row does against it, where its {what} are lost: {reason}{more}"
        warnings.warn(f"{message} — to train the cell again, delete {cell.folder} and run the table", stacklevel=5)


# ------------------------------------------------------------------------------------------------------------- queries


class _Side(NamedTuple):
    """A row's number, query by query."""

    queries: str  # a checksum of their ids
    parts: dict[Direction, Array]  # per direction, what each query adds, NaN where it is not evaluated. [Q] each
    caption_image: NDArray[np.int64]  # the image of each caption. [M]


class _Test(NamedTuple):
    row: str
    key: str
    against: str
    difference: _Side


def tested_queries(table: Table, result: ComparisonTable, done: Sequence[Cell]) -> tuple[Difference, ...]:
    """Every number that is a mean over queries, of every row that is no baseline or names another row."""
    differences: list[Difference] = []
    lost: Lost = {}
    for setting in result.settings:
        needed = _rows_needed(table, result, setting, is_query_mean)
        runs: dict[str, list[tuple[Outcomes, ...]]] = {}
        for cell in (cell for cell in done if cell.setting == setting):
            try:
                runs.setdefault(cell.row, []).append(read_outcomes(cell.folder / "outcomes.safetensors"))
            except DataError as error:
                if cell.row in needed:
                    lost.setdefault(cell.row, []).append((cell, str(error).partition(" — ")[0]))
        groups: dict[tuple[str, str], list[_Test]] = {}
        for test in _tests(table, result, runs, setting):
            groups.setdefault((test.key.partition(".")[0], test.difference.queries), []).append(test)
        for group in groups.values():
            differences += _bootstrap(group, setting, draws=table.draws)
    _warn_of_lost(lost, what="queries")
    return tuple(differences)


def _tests(
    table: Table, result: ComparisonTable, runs: Mapping[str, Sequence[tuple[Outcomes, ...]]], setting: str
) -> Iterator[_Test]:
    """One for each row and column that have a reference and per-query outcomes on both sides."""
    for column in tested_columns(result, setting):
        sides = {row: _averaged(result, seeds, row, setting, column.key) for row, seeds in runs.items()}
        for row, against in references(table, result, setting, column):
            ours, theirs = sides.get(row), sides.get(against)
            if ours is not None and theirs is not None and _same_queries(ours, theirs):
                parts = {direction: ours.parts[direction] - theirs.parts[direction] for direction in ours.parts}
                yield _Test(row, column.key, against, ours._replace(parts=parts))


def _averaged(
    result: ComparisonTable, runs: Sequence[tuple[Outcomes, ...]], row: str, setting: str, key: str
) -> _Side | None:
    """What each query adds to the row's number, averaged over seeds; None where some seed lacks it."""
    outcomes = [one for run in runs if (one := outcomes_of(run, key)) is not None]
    seeds = [added for one in outcomes if (added := contributions(one, key)) is not None]
    summary = result.summary(setting, row, key)
    if summary is None or len(seeds) != summary.seeds or len({one.queries for one in outcomes}) != 1:
        return None
    mean = {direction: np.mean([seed[direction] for seed in seeds], axis=0) for direction in seeds[0]}
    total = sum(float(np.nanmean(values)) for values in mean.values())
    if abs(total - summary.mean) > _AGREE * max(1.0, abs(total)):
        return None
    return _Side(outcomes[0].queries, mean, outcomes[0].caption_image.numpy())


def _same_queries(ours: _Side, theirs: _Side) -> bool:
    """The same data, the same directions, and the same queries evaluated in each."""
    return (ours.queries, ours.parts.keys()) == (theirs.queries, theirs.parts.keys()) and all(
        np.array_equal(np.isnan(values), np.isnan(theirs.parts[direction])) for direction, values in ours.parts.items()
    )


def _bootstrap(tests: Sequence[_Test], setting: str, *, draws: int) -> Iterator[Difference]:
    """All tests over the same queries by the same draws; a direction that a number does not have adds nothing."""
    parts: list[Part] = []
    for direction in DIRECTIONS:
        known = [test.difference.parts[direction] for test in tests if direction in test.difference.parts]
        if known:
            none = np.zeros(len(known[0]))
            matrix = np.stack([test.difference.parts.get(direction, none) for test in tests], axis=1)
            evaluated = ~np.isnan(matrix).any(axis=1)
            image = np.arange(len(matrix)) if direction == "i2t" else tests[0].difference.caption_image
            parts.append(Part(matrix[evaluated], image[evaluated]))
    for test, one in zip(tests, paired_bootstrap(parts, draws=draws), strict=True):
        yield Difference(setting, test.row, test.key, test.against, *one)


# -------------------------------------------------------------------------------------------------------------- photos


class _Answered(NamedTuple):
    """A run's answers to one test set."""

    photos: str  # a checksum of their source and labels: runs of the same may be paired
    right: Array  # 100 where the answer is right, else 0. [N]


class _Drawn(NamedTuple):
    photos: tuple[tuple[str, str], ...]  # test sets and their checksums
    metrics: Metrics  # [1 + D] in place of every number: over all photos, and over those of each draw


def tested_photos(table: Table, result: ComparisonTable, done: Sequence[Cell]) -> tuple[Difference, ...]:
    """Every accuracy and what is made of them, of every row that is no baseline or names another row."""
    names = [setting.name for setting in table.settings]
    runs: dict[RunKey, _Drawn] = {}
    lost: Lost = {}
    for_average = _rows_needed(table, result, table.average, _is_accuracy) if table.average else set()
    for number, setting in enumerate(names):
        needed = _rows_needed(table, result, setting, _is_accuracy) | for_average
        answered: dict[RunKey, dict[str, _Answered]] = {}
        for cell in (cell for cell in done if cell.setting == setting):
            try:
                answered[setting, cell.row, cell.seed] = _answers(cell)
            except DataError as error:
                if cell.row in needed:
                    lost.setdefault(cell.row, []).append((cell, str(error).partition(" — ")[0]))
        runs |= _draw(answered, draws=table.draws, seed=number)
    _warn_of_lost(lost, what="answers")
    if table.average:
        runs |= _averages(runs, names, name=table.average)
    return tuple(one for setting in result.settings for one in _compared(table, result, runs, setting))


def _is_accuracy(key: str) -> bool:
    return key.endswith(".accuracy") or key in ("hm", "mean_hm", "mean_target")


def _answers(cell: Cell) -> dict[str, _Answered]:
    assert isinstance(cell.recipe, FewshotRecipe), "other cells have no such answers"
    tensors, _ = read_tensors(cell.folder / ANSWERS)
    answers = {}
    for split in (name.removesuffix(".label") for name in tensors if name.endswith(".label")):
        label, predicted = (tensors[f"{split}.{name}"].numpy() for name in ("label", "predicted"))
        source = cell.recipe.data.targets.get(split, cell.recipe.data.spec)
        checksum = hashlib.sha256(f"{source}\0".encode(errors="surrogatepass") + label.tobytes())
        answers[split] = _Answered(checksum.hexdigest(), 100.0 * (label == predicted))
    return answers


def _draw(answered: Mapping[RunKey, Mapping[str, _Answered]], *, draws: int, seed: int) -> dict[RunKey, _Drawn]:
    """All runs over the same photos by the same draws; other data sets, and base and new, by different draws.

    A source and targets of as many photos share their draws: scenes shown in several domains come together.
    """
    groups: dict[tuple[str, str], list[tuple[RunKey, Array]]] = {}
    for key, sets in answered.items():
        for split, one in sets.items():
            groups.setdefault((split, one.photos), []).append((key, one.right))
    metrics: dict[RunKey, Metrics] = {key: {} for key in answered}
    for (split, _), members in groups.items():
        right = np.stack([right for _, right in members], axis=1)
        generator = np.random.default_rng([seed, split == "new"])
        drawn = drawn_means([Part(right, np.arange(len(right)))], draws=draws, generator=generator)
        for (key, _), accuracy in zip(members, np.vstack([right.mean(axis=0), drawn]).T, strict=True):
            metrics[key][split] = {"accuracy": accuracy}
    runs = {}
    for key, sets in answered.items():
        photos = tuple((split, one.photos) for split, one in sets.items())
        runs[key] = _Drawn(photos, metrics[key] | joint_metrics(metrics[key]))
    return runs


def _averages(runs: Mapping[RunKey, _Drawn], settings: Sequence[str], *, name: str) -> dict[RunKey, _Drawn]:
    """Over all settings, of rows and seeds that have them all."""
    averages = {}
    for row, seed in dict.fromkeys((row, seed) for _, row, seed in runs):
        known = [runs[setting, row, seed] for setting in settings if (setting, row, seed) in runs]
        if len(known) == len(settings):
            photos = tuple(one for run in known for one in run.photos)
            averages[name, row, seed] = _Drawn(photos, averaged_metrics([run.metrics for run in known]))
    return averages


def _compared(
    table: Table, result: ComparisonTable, runs: Mapping[RunKey, _Drawn], setting: str
) -> Iterator[Difference]:
    by_row: dict[str, list[_Drawn]] = {}
    for (name, row, _), run in runs.items():
        if name == setting:
            by_row.setdefault(row, []).append(run)
    for column in tested_columns(result, setting):
        means = {row: _mean_of(result, setting, row, seeds, column.key) for row, seeds in by_row.items()}
        for row, against in references(table, result, setting, column):
            ours, theirs = means.get(row), means.get(against)
            if ours is None or theirs is None or len({run.photos for run in by_row[row] + by_row[against]}) > 1:
                continue
            plain, *drawn = ours - theirs
            yield Difference(setting, row, column.key, against, *interval(float(plain), np.array(drawn)))


def _mean_of(result: ComparisonTable, setting: str, row: str, runs: Sequence[_Drawn], key: str) -> Array | None:
    """A number over a row's seeds: of all photos, and of each draw [1 + D]; None where some seed lacks it."""
    summary, seeds = result.summary(setting, row, key), [follow(run.metrics, *key.split(".")) for run in runs]
    if summary is None or len(runs) != summary.seeds or not all(isinstance(seed, np.ndarray) for seed in seeds):
        return None
    mean = np.mean(seeds, axis=0)
    return mean if abs(mean[0] - summary.mean) <= _AGREE * max(1.0, mean[0]) else None
