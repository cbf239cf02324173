"""Runs as they are read back, and their curves averaged over seeds against plain numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.errors import DataError
from vacsr.report.records import RunRecord, entry, mean_curve, read_run, runs_from_json, runs_of, runs_to_json

VALUES = st.one_of(st.none(), st.floats(-1e3, 1e3))


@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_mean_curve_is_that_of_the_known_points(curves: list[list[float | None]]) -> None:
    found = mean_curve(curves)
    assert found is not None
    assert found.seeds == len(curves)
    for place in range(3):
        known = [curve[place] for curve in curves if curve[place] is not None]
        if known:
            assert found.mean[place] == pytest.approx(np.mean(known))
            assert found.std[place] == pytest.approx(np.std(known, ddof=1) if len(known) > 1 else 0, abs=1e-6)
        else:
            assert np.isnan(found.mean[place])


def test_curves_of_other_lengths_or_none_are_left_out() -> None:
    found = mean_curve([None, [1.0, 2.0], [5.0], [3.0, 4.0]])
    assert found is not None
    assert (found.mean.tolist(), found.seeds) == ([2.0, 3.0], 2)
    assert mean_curve([None, []]) is None


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    results = [
        {"split": "test", "protocol": "coco-5k", "rsum": 1.0},
        {"split": "test", "protocol": "eccv", "rsum": 2.0},
    ]
    (tmp_path / "report.json").write_text(json.dumps({"schema": 1, "results": results}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n{"step": 9, "epoch": 1, "dev_rsum": 100.0}\n')
    run = read_run(tmp_path, row="a", setting="clean", seed=3)
    assert (run.row, run.setting, run.seed, run.folder) == ("a", "clean", 3, tmp_path)
    assert (entry(run, "test", "rsum"), entry(run, "test/eccv", "rsum"), entry(run, "dev", "rsum")) == (1.0, 2.0, None)
    assert [row.get("dev_rsum") for row in run.history] == [None, 100.0]
    (tmp_path / "metrics.jsonl").unlink()
    assert read_run(tmp_path, row="a", setting="clean", seed=3).history == ()


@pytest.mark.parametrize("content", ["{", '{"results": [{}]}', "[]"])
def test_a_broken_report_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(DataError, match=r"not a finished run.*vacsr compare"):
        read_run(tmp_path, row="a", setting="clean", seed=0)
    with pytest.raises(DataError, match="not a finished run"):
        read_run(tmp_path / "absent", row="a", setting="clean", seed=0)


def test_the_seeds_of_a_cell_come_in_order() -> None:
    runs = [RunRecord("a", "x", seed, {}) for seed in (2, 0, 1)] + [RunRecord("a", "y", 5, {})]
    assert [run.seed for run in runs_of(runs, row="a", setting="x")] == [0, 1, 2]


def test_stored_runs_come_back_without_their_folders() -> None:
    run = RunRecord("a", "x", 1, {"test": {"rsum": 1.0}}, ({"step": 1, "loss": 2.0},), Path("gone"))
    stored = json.loads(json.dumps(runs_to_json([run])))
    (back,) = runs_from_json(stored)
    assert back == run._replace(history=[{"step": 1, "loss": 2.0}], folder=None)
    with pytest.raises(DataError, match="store them again"):
        runs_from_json({"schema": 1, "runs": [{"row": "a"}]})
    with pytest.raises(DataError, match="no stored runs of schema 1"):
        runs_from_json({"cells": []})
