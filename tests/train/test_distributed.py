"""Two ranks do what one process does.

Sums are taken in another order, so figures agree to float32 rounding: 1e-5 relative for loss terms, gradients within
1e-6 of the largest entry of their tensor, weights after 21 steps within 1e-5 (lr is 5e-4, a wrong sign of one Adam step
would show as 1e-3).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.train.distributed import (
    World,
    barrier,
    gather_rows,
    join_world,
    leaving_world,
    sum_gradients,
    sum_over_ranks,
    take_device,
)

# Dropout is on (0.2 by default): its draws go by the global row. No dev set: a choice by RSUM could flip on rounding.
PLAIN = {"data.dev": "", "evaluate.splits": ["test"], "train.checkpoint_every": 3}
METHODS: dict[str, dict[str, Any]] = {
    "vacsr": {"method.name": "vacsr"},
    "vacsr-columns": {"method.name": "vacsr", "method.objective": {"negative_direction": "both"}},
    "sigmoid": {"method.name": "sigmoid"},
    "infonce": {"method.name": "infonce"},
    "accumulate": {"method.name": "vacsr", "train.accumulate": 2},
}


def close(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return bool((found - expected).abs().max() <= share * expected.abs().max().clamp_min(1e-3))


def both(launch: Any, task: str, recipe: Path, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of one process and of two ranks."""
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    done = [launch(task=task, recipe=str(recipe), result=str(one))]
    done += launch.ranks([[], []], task=task, recipe=str(recipe), result=str(two))
    assert [part.code for part in done] == [0, 0, 0], done
    return torch.load(one / "rank-0.pt", weights_only=True), [
        torch.load(two / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)
    ]


@pytest.mark.parametrize("method", ["vacsr", "vacsr-columns", "sigmoid", "infonce"])
def test_two_ranks_have_the_loss_terms_and_gradients_of_one(
    launch: Any, recipes: Any, tmp_path: Path, method: str
) -> None:
    whole, ranks = both(launch, "gradients", recipes.file(PLAIN | METHODS[method]), tmp_path)
    for rank in ranks:
        torch.testing.assert_close(rank["values"], whole["values"], rtol=1e-5, atol=1e-7)
        assert rank["grad"].keys() == whole["grad"].keys()
        for name, expected in whole["grad"].items():
            assert close(rank["grad"][name], expected, 1e-6), name
            assert torch.equal(rank["grad"][name], ranks[0]["grad"][name]), name


def test_two_ranks_and_one_process_draw_the_same_noise(launch: Any, recipes: Any, tmp_path: Path) -> None:
    whole, (first, second) = both(launch, "noise", recipes.file(PLAIN), tmp_path)
    for name, expected in whole.items():
        assert len(first[name]) == len(second[name]) == 4
        assert torch.equal(torch.cat((first[name], second[name])), expected), name
        assert not torch.equal(first[name], second[name]), name


def test_a_run_of_two_ranks(launch: Any, recipes: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    check_two_ranks(launch, reference, outcome, tmp_path, method="vacsr")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vacsr-columns", "sigmoid", "infonce", "accumulate"])
def test_a_run_of_two_ranks_with_other_methods(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, method: str
) -> None:
    check_two_ranks(launch, reference, outcome, tmp_path, method=method)


def check_two_ranks(launch: Any, reference: Any, outcome: Any, folder: Path, *, method: str) -> None:
    """Each rank is given a folder of its own, so that what it writes can be seen."""
    file, expected = reference(PLAIN | METHODS[method])
    outs = [folder / "rank-0", folder / "rank-1"]
    first, second = launch.ranks([["train", file, "--out", out] for out in outs])
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "| flickr | test |" in first.out
    assert second.out == ""
    assert not outs[1].exists(), "only rank 0 writes"
    found = outcome.of(outs[0])
    compare_runs(found, expected)


def compare_runs(found: Any, expected: Any) -> None:
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert [row.keys() for row in found.rows] == [row.keys() for row in expected.rows]
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_ranks_stop_together_and_resume(launch: Any, recipes: Any, outcome: Any, tmp_path: Path) -> None:
    """Ctrl-C reaches one rank only; both must stop after the same step."""
    file = recipes.file(PLAIN | METHODS["sigmoid"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = ["train", file, "--out", broken]
    assert [part.code for part in launch.ranks([["train", file, "--out", whole]] * 2)] == [0, 0]
    stopped = launch.ranks([command, command], each=[{}, {"kill": ("ctrl-c", 5)}])
    assert [part.code for part in stopped] == [130, 130], stopped
    assert all("stopped after step 5" in part.err for part in stopped)
    assert [part.code for part in launch.ranks([[*command, "--resume"]] * 2)] == [0, 0]
    assert outcome.of(broken).same(outcome.of(whole))


def test_a_recipe_leaves_the_group_it_joined_and_may_join_another(
    launch: Any, recipes: Any, outcome: Any, tmp_path: Path
) -> None:
    file = recipes.file(PLAIN | METHODS["sigmoid"])
    done = launch.ranks([[], []], task="twice", recipe=str(file), result=str(tmp_path))
    assert [(part.code, part.out.split()) for part in done] == [(0, ["left", "left"])] * 2, done
    assert outcome.of(tmp_path / "run-0").same(outcome.of(tmp_path / "run-1"))


def test_a_group_that_was_there_before_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with leaving_world():
            assert join_world(torch.device("cpu")) == World(0, 1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert take_device("cuda:1") == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert [take_device(name).type for name in ("cpu", "cuda", "auto")] == ["cpu", "cuda", "cuda"]
    assert len(chosen) == 1, "the current one is taken as it is"
    with pytest.raises(EnvironmentProblem, match="cuda:2"):
        take_device("cuda:2")


def test_a_batch_that_does_not_divide(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file = recipes.file({"train.batch_size": 9})
    for done in launch.ranks([["train", file, "--out", tmp_path / "run"]] * 2):
        assert (done.code, done.out) == (2, "")
        assert "a batch of 9 does not divide over 2 ranks — set train.batch_size" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torchrun(recipes: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(PLAIN | METHODS["vacsr"])
    code = "from vacsr.cli import main; main()"
    script = tmp_path / "vacsr_main.py"
    script.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    command += ["train", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| flickr | test |") == 1
    compare_runs(outcome.of(tmp_path / "run"), expected)


def test_a_world_owns_its_rows() -> None:
    assert [World(rank, 3).rows(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert World(0, 3).is_main
    assert not World(1, 3).is_main
    with pytest.raises(UsageError, match="does not divide over 3 ranks"):
        World(0, 3).rows(10)


def test_a_world_of_one_needs_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = join_world(torch.device("cpu"))
    assert world == World(0, 1)
    x = torch.ones(2, 3)
    assert gather_rows(x, world) is x
    assert sum_over_ranks(x, world) is x
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    sum_gradients([parameter], world)
    barrier(world)
    assert parameter.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("change", [{"data.pairs": "synthetic:images=29,per_image=2,seed=1"}, {"train.lr": 0.001}])
def test_ranks_that_read_something_else(launch: Any, recipes: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    """Both stop, with the same message; neither waits for the other."""
    files = [recipes.file(PLAIN), recipes.file(PLAIN | change)]
    for done in launch.ranks([["train", file, "--out", tmp_path / "run"] for file in files]):
        assert (done.code, done.out) == (4, "")
        assert "the 2 ranks read different data or settings" in done.err
        assert "data.on_error=skip" in done.err
    assert not (tmp_path / "run").exists()
