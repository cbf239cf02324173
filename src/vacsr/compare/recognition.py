"""Figures of few-shot cells that several test sets make together, in one setting and over all of them.

Figures are numbers, or arrays of what each draw of a bootstrap makes of them: the rules are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vacsr.evaluate.fewshot import harmonic_mean
from vacsr.report.tables import CellValues

Figures = dict[str, Any]
"""By split, as in a report, and by name where several splits make one."""
_AVERAGED = ("accuracy", "ece")
_SOURCE = "source"
_each_hm = np.vectorize(harmonic_mean, otypes=[float])


def joint_figures(splits: Mapping[str, Mapping[str, Any]]) -> Figures:
    """What the accuracies of one report make together: ``hm`` of base and new, ``mean_target`` of all but the source.

    >>> joint_figures({"base": {"accuracy": 80.0}, "new": {"accuracy": 60.0}})
    {'hm': 68.57142857142857}
    >>> joint_figures({"source": {"accuracy": 70.0}, "sketch": {"accuracy": 50.0}, "blur": {"accuracy": 30.0}})
    {'mean_target': 40.0}
    """
    accuracy = {split: result["accuracy"] for split, result in splits.items()}
    found: Figures = {}
    if {"base", "new"} <= accuracy.keys():
        found["hm"] = _plain(_each_hm(accuracy["base"], accuracy["new"]))
    targets = [value for split, value in accuracy.items() if split != _SOURCE]
    if _SOURCE in accuracy and targets:
        found["mean_target"] = _mean(targets)
    return found


def averaged_figures(reports: Sequence[Figures]) -> Figures:
    """Over data sets: the mean of each split's figures, what these make together, and the mean of every one's HM.

    ``hm`` is that of the averages, ``mean_hm`` the mean of the HMs: papers have printed either as the average.
    """
    shared = [name for name, result in reports[0].items() if _is_split(result) and all(name in r for r in reports)]
    found: Figures = {}
    for split in shared:
        known = [name for name in _AVERAGED if all(name in report[split] for report in reports)]
        found[split] = {name: _mean([report[split][name] for report in reports]) for name in known}
    found |= joint_figures(found)
    if all("hm" in report for report in reports):
        found["mean_hm"] = _mean([report["hm"] for report in reports])
    return found


def averaged_cells(values: Sequence[CellValues], settings: Sequence[str], *, name: str) -> Iterator[CellValues]:
    """One more cell for every row and seed that has a report in all settings."""
    known = {(value.row, value.seed, value.setting): value.report for value in values}
    for row, seed in dict.fromkeys((value.row, value.seed) for value in values):
        reports = [known.get((row, seed, setting)) for setting in settings]
        whole = [report for report in reports if report is not None]
        if len(whole) == len(settings):
            yield CellValues(row, name, seed, averaged_figures(whole))


def _is_split(result: Any) -> bool:
    return isinstance(result, Mapping) and "accuracy" in result


def _mean(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def _plain(value: Any) -> Any:
    """A number for a number, an array for arrays."""
    return float(value) if np.ndim(value) == 0 else value
