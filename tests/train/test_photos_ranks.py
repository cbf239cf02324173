"""Two ranks on photos do what one process does: augmentation and GPO on, towers that rest and wake.

Sums are taken in another order, so figures agree to float32 rounding: loss terms of the first step within 1e-5
relative, gradients within 1e-5 of the largest entry of their tensor; after 16 steps loss terms within 2e-5 relative and
weights within 5e-6 (lr is 5e-4: one Adam step with a wrong sign would show as 1e-3; found were 2e-7 and 4e-7).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PHOTOS: dict[str, Any] = {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "data.dev": "",  # a choice by RSUM could flip on rounding
    "data.workers": 1,
    "evaluate.splits": ["test"],
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "vacsr": {"method.name": "vacsr"},
    "streamed": {"method.name": "vacsr", "data.cache_gb": 0.0, "train.optimizer": "adamp"},
    "infonce": {"method.name": "infonce", "train.accumulate": 2},
}


def close(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return bool((found - expected).abs().max() <= share * expected.abs().max().clamp_min(1e-3))


def compare_runs(found: Any, expected: Any) -> None:
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=5e-6, msg=name)
    assert [row.keys() for row in found.rows] == [row.keys() for row in expected.rows]
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        assert row == pytest.approx(wanted, rel=2e-5, abs=1e-6)


def test_two_ranks_have_the_loss_terms_and_gradients_of_one(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file = recipes.file(PHOTOS | CASES["vacsr"])
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    done = [launch(task="gradients", recipe=str(file), result=str(folders[0]))]
    done += launch.ranks([[], []], task="gradients", recipe=str(file), result=str(folders[1]))
    assert [part.code for part in done] == [0, 0, 0], done
    whole = torch.load(folders[0] / "rank-0.pt", weights_only=True)
    assert any(name.startswith("backbone.image") for name in whole["grad"])
    assert any(name.startswith("image_pool") for name in whole["grad"])
    for rank in (0, 1):
        found = torch.load(folders[1] / f"rank-{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["values"], whole["values"], rtol=1e-5, atol=1e-7)
        assert found["grad"].keys() == whole["grad"].keys()
        for name, expected in whole["grad"].items():
            assert close(found["grad"][name], expected, 1e-5), name


@pytest.mark.parametrize("case", ["vacsr", pytest.param("streamed"), pytest.param("infonce", marks=pytest.mark.slow)])
def test_a_run_of_two_ranks(launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str) -> None:
    file, expected = reference(PHOTOS | CASES[case])
    outs = [tmp_path / "rank-0", tmp_path / "rank-1"]
    first, second = launch.ranks([["train", file, "--out", out] for out in outs])
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "| flickr | test |" in first.out
    assert second.out == ""
    assert not outs[1].exists(), "only rank 0 writes"
    compare_runs(outcome.of(outs[0]), expected)


@pytest.mark.slow
def test_ranks_stop_in_the_ramp_and_resume(launch: Any, recipes: Any, outcome: Any, tmp_path: Path) -> None:
    file = recipes.file(PHOTOS | CASES["streamed"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = ["train", file, "--out", broken]
    assert [part.code for part in launch.ranks([["train", file, "--out", whole]] * 2)] == [0, 0]
    stopped = launch.ranks([command, command], each=[{"kill": ("ctrl-c", 10)}, {}])
    assert [part.code for part in stopped] == [130, 130], stopped
    assert [part.code for part in launch.ranks([[*command, "--resume"]] * 2)] == [0, 0]
    assert outcome.of(broken).same(outcome.of(whole))


@pytest.mark.slow
def test_torchrun(reference: Any, recipes: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(PHOTOS | CASES["vacsr"])
    script = tmp_path / "vacsr_main.py"
    script.write_text("from vacsr.cli import main; main()", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    command += ["train", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| flickr | test |") == 1
    compare_runs(outcome.of(tmp_path / "run"), expected)
