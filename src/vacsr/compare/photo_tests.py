"""Tests few-shot rows against the best baseline: a paired bootstrap over test photos.

Every run's accuracies are worked out over the same photos drawn anew, and from them each figure as the table has it, a
harmonic mean or an average over data sets too. Seeds are averaged draw by draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vacsr.compare.cell import Cell
from vacsr.compare.recognition import Figures, averaged_figures, joint_figures
from vacsr.compare.significance import references, tell_of_lost, tested_columns, tested_rows
from vacsr.compare.table import Table
from vacsr.errors import DataError
from vacsr.fewshot.config import FewshotRecipe
from vacsr.fewshot.run import ANSWERS
from vacsr.files import read_tensors
from vacsr.report.bootstrap import Array, Part, drawn_figures, interval
from vacsr.report.tables import Comparison, ComparisonTable

Place = tuple[str, str, int]
"""Setting, row and seed of a run."""
_AGREE = 1e-6  # a figure is what its photos say, or it is left untested


class _Answered(NamedTuple):
    """A run's answers to one test set."""

    photos: str
    """A digest of where they come from and of their labels: runs of the same may be paired."""
    right: Array
    """100 where the answer is right, else 0. [N]"""


class _Drawn(NamedTuple):
    """A run's figures as the photos have them, and as each draw has them."""

    photos: tuple[tuple[str, str], ...]
    """Test sets and their digests."""
    plain: Figures
    each: Figures
    """[D] in place of every number."""


def tested_photos(table: Table, result: ComparisonTable, done: Sequence[Cell]) -> tuple[Comparison, ...]:
    """Every accuracy and what is made of them, of every row that is no baseline or names another row."""
    names = [setting.name for setting in table.settings]
    runs: dict[Place, _Drawn] = {}
    lost: dict[str, list[tuple[Cell, str]]] = {}
    of_average = tested_rows(table, result, table.average, _counted) if table.average else set()
    for number, setting in enumerate(names):
        needed = tested_rows(table, result, setting, _counted) | of_average
        answered: dict[Place, dict[str, _Answered]] = {}
        for cell in (cell for cell in done if cell.setting == setting):
            try:
                answered[setting, cell.row, cell.seed] = _answers(cell)
            except DataError as error:
                if cell.row in needed:
                    lost.setdefault(cell.row, []).append((cell, str(error).partition(" — ")[0]))
        runs |= _draw(answered, draws=table.draws, seed=number)
    tell_of_lost(lost, what="answers")
    if table.average:
        runs |= _averaged(runs, names, name=table.average)
    return tuple(one for setting in result.settings for one in _compared(table, result, runs, setting))


def _counted(key: str) -> bool:
    """Whether a figure is an accuracy or made of these."""
    return key.endswith(".accuracy") or key in ("hm", "mean_hm", "mean_target")


def _answers(cell: Cell) -> dict[str, _Answered]:
    """By test set."""
    tensors, _ = read_tensors(cell.folder / ANSWERS)
    found = {}
    for split in (name.removesuffix(".label") for name in tensors if name.endswith(".label")):
        label, predicted = (tensors[f"{split}.{name}"].numpy() for name in ("label", "predicted"))
        digest = hashlib.sha256(f"{_origin(cell, split)}\0".encode(errors="surrogatepass") + label.tobytes())
        found[split] = _Answered(digest.hexdigest(), 100.0 * (label == predicted))
    return found


def _origin(cell: Cell, split: str) -> str:
    assert isinstance(cell.recipe, FewshotRecipe), "other cells have no such answers"
    return cell.recipe.data.targets.get(split, cell.recipe.data.spec)


def _draw(answered: Mapping[Place, Mapping[str, _Answered]], *, draws: int, seed: int) -> dict[Place, _Drawn]:
    """All runs over the same photos by the same draws; other data sets, and base and new, by draws of their own.

    A source and targets of as many photos are drawn alike: scenes that are shown in several domains come together.
    """
    groups: dict[tuple[str, str], list[tuple[Place, Array]]] = {}
    for place, sets in answered.items():
        for split, one in sets.items():
            groups.setdefault((split, one.photos), []).append((place, one.right))
    each: dict[Place, Figures] = {place: {} for place in answered}
    for (split, _), members in groups.items():
        part = Part(np.stack([right for _, right in members], axis=1), np.arange(len(members[0][1])))
        drawn = drawn_figures([part], draws=draws, generator=np.random.default_rng([seed, split == "new"]))
        for (place, _), accuracy in zip(members, drawn.T, strict=True):
            each[place][split] = {"accuracy": accuracy}
    return {place: _figures(sets, each[place]) for place, sets in answered.items()}


def _figures(sets: Mapping[str, _Answered], each: Figures) -> _Drawn:
    plain: Figures = {split: {"accuracy": float(one.right.mean())} for split, one in sets.items()}
    photos = tuple((split, one.photos) for split, one in sets.items())
    return _Drawn(photos, plain | joint_figures(plain), each | joint_figures(each))


def _averaged(runs: Mapping[Place, _Drawn], settings: Sequence[str], *, name: str) -> dict[Place, _Drawn]:
    """Over all settings, of rows and seeds that have them all."""
    found = {}
    for row, seed in dict.fromkeys((row, seed) for _, row, seed in runs):
        whole = [runs[setting, row, seed] for setting in settings if (setting, row, seed) in runs]
        if len(whole) == len(settings):
            photos = tuple(one for run in whole for one in run.photos)
            plain, each = (averaged_figures([getattr(run, kind) for run in whole]) for kind in ("plain", "each"))
            found[name, row, seed] = _Drawn(photos, plain, each)
    return found


def _compared(
    table: Table, result: ComparisonTable, runs: Mapping[Place, _Drawn], setting: str
) -> Iterator[Comparison]:
    by_row: dict[str, list[_Drawn]] = {}
    for (place, row, _), run in runs.items():
        if place == setting:
            by_row.setdefault(row, []).append(run)
    for column in tested_columns(result, setting):
        means = {row: _mean_of(result, setting, row, own, column.key) for row, own in by_row.items()}
        for row, against in references(table, result, setting, column):
            ours, theirs = means.get(row), means.get(against)
            if ours is None or theirs is None or len({run.photos for run in by_row[row] + by_row[against]}) > 1:
                continue
            tested = interval(ours.plain - theirs.plain, ours.each - theirs.each)
            yield Comparison(setting, row, column.key, against, *tested)


class _Mean(NamedTuple):
    """A figure over a row's seeds."""

    plain: float
    each: Array
    """[D]"""


def _mean_of(result: ComparisonTable, setting: str, row: str, runs: Sequence[_Drawn], key: str) -> _Mean | None:
    """None where some seed cannot say."""
    summary = result.summary(setting, row, key)
    plain, each = [_at(run.plain, key) for run in runs], [_at(run.each, key) for run in runs]
    if summary is None or len(runs) != summary.seeds or any(value is None for value in plain):
        return None
    mean = float(np.mean(plain))
    return _Mean(mean, np.mean(each, axis=0)) if abs(mean - summary.mean) <= _AGREE * max(1.0, mean) else None


def _at(figures: Figures, key: str) -> Any:
    value: Any = figures
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if isinstance(value, Mapping) else value
