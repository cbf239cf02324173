"""What a run left behind, and its curves averaged over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vacsr.errors import DataError
from vacsr.report.figures import Array

SCHEMA = 1
"""Of stored runs."""


class RunRecord(NamedTuple):
    """One cell of a comparison. Whatever is missing is left out of the page."""

    row: str
    setting: str
    seed: int
    report: Mapping[str, Any]
    """The results of its report by split, with the keys of the evaluation JSON."""
    history: Sequence[Mapping[str, Any]] = ()
    """The rows of metrics.jsonl: loss terms with their step, and `dev_rsum` at the end of an epoch."""
    folder: Path | None = None
    """The run folder, where the model is still there."""


class SweepPoint(NamedTuple):
    """One value of a parameter, all others at their defaults."""

    name: str
    """Of the parameter."""
    value: float
    default: bool
    mean: float
    std: float | None
    """None of a single seed."""
    alike: tuple[float, float | None] | None = None
    """Mean and deviation of the figure of ours that is of the paper's kind."""
    paper: float | None = None
    """The paper's own figure at this value, where it gives one, on its data."""


class Curve(NamedTuple):
    """A curve averaged over seeds."""

    mean: Array
    """[P]"""
    std: Array
    """[P], 0 of a single seed."""
    seeds: int


def read_run(folder: Path, *, row: str, setting: str, seed: int) -> RunRecord:
    """A finished run folder: report.json and, where it is there, metrics.jsonl.

    Of several protocols the first stands for its split, and each has a place of its own, such as `test/eccv`.
    """
    by_split: dict[str, Any] = {}
    try:
        for result in json.loads((folder / "report.json").read_text(encoding="utf-8"))["results"]:
            by_split.setdefault(result["split"], result)
            if "protocol" in result:  # recognition has none
                by_split[f"{result['split']}/{result['protocol']}"] = result
        log = folder / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        history = tuple(json.loads(line) for line in lines if line.strip())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is not a finished run ({error}) — run it again: vacsr compare TABLE.yaml") from error
    return RunRecord(row, setting, seed, by_split, history, folder)


def runs_to_json(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Reports and histories without the folders, so that a page is made again where the runs are gone."""
    kept = [{key: value for key, value in run._asdict().items() if key != "folder"} for run in runs]
    return {"schema": SCHEMA, "runs": kept}


def runs_from_json(raw: Mapping[str, Any]) -> list[RunRecord]:
    """What :func:`runs_to_json` wrote."""
    if raw.get("schema") != SCHEMA or not isinstance(raw.get("runs"), Sequence):
        raise DataError(f"no stored runs of schema {SCHEMA} are there — store them again: vacsr compare TABLE.yaml")
    try:
        return [RunRecord(**run) for run in raw["runs"]]
    except TypeError as error:
        raise DataError(f"the stored runs are not whole ({error}) — store them again") from error


def entry(run: RunRecord, split: str, *keys: str) -> Any:
    """A part of a run's report; None where it has no such part.

    >>> run = RunRecord("vacsr", "clean", 0, {"test": {"uncertainty": {"bins_i2t": {"r1": [0.9, 0.1]}}}})
    >>> entry(run, "test", "uncertainty", "bins_i2t", "r1"), entry(run, "dev", "uncertainty")
    ([0.9, 0.1], None)
    """
    found: Any = run.report.get(split)
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def mean_curve(curves: Sequence[Sequence[float | None] | None]) -> Curve | None:
    """Mean and sample deviation over seeds, point by point; None where no seed has the curve.

    Missing points are NaN. Curves shorter or longer than the first are left out: their points are not the same.

    >>> mean_curve([[1.0, None], [3.0, 5.0]]).mean
    array([2., 5.])
    """
    known = [np.array([np.nan if v is None else v for v in curve], dtype=np.float64) for curve in curves if curve]
    known = [curve for curve in known if len(curve) == len(known[0])]
    if not known:
        return None
    stacked = np.stack(known)
    count = (~np.isnan(stacked)).sum(axis=0)
    total = np.nansum(stacked, axis=0)
    mean = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    squares = np.nansum((stacked - mean) ** 2, axis=0)
    std = np.sqrt(np.divide(squares, count - 1, out=np.zeros_like(squares), where=count > 1))
    return Curve(mean, std, len(known))


def runs_of(runs: Sequence[RunRecord], *, row: str, setting: str) -> list[RunRecord]:
    """The seeds of one cell, in order."""
    return sorted((run for run in runs if (run.row, run.setting) == (row, setting)), key=lambda run: run.seed)
