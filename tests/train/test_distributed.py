"""Two ranks do what one process does, on features and on photos, with augmentation, GPO and towers that unfreeze.

Sums are taken in another order, so numbers agree to float32 rounding only. The learning rate is 5e-4: one Adam step
with a wrong sign would move a weight by 1e-3, a hundred times the tolerance.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vacsr.errors import EnvironmentProblem
from vacsr.train.distributed import World, join_world, take_device

from .conftest import NPC_ON_PHOTOS, Outcome

# Dropout is on (0.2 by default): its draws go by the global row. No dev set: a choice by RSUM could flip on rounding.
PLAIN = {"data.dev": "", "evaluate.splits": ["test"], "train.checkpoint_every": 3}
NOISY = PLAIN | {"method.warmup": 0.35, "data.noise.ratio": 0.5}
PHOTOS: dict[str, Any] = PLAIN | {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "data.workers": 1,
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "vacsr": PLAIN | {"method.name": "vacsr"},
    "vacsr-columns": PLAIN | {"method.name": "vacsr", "method.objective": {"negative_direction": "both"}},
    "vacsr-strips": PLAIN | {"method.name": "vacsr", "method.objective": {"hard_negatives": 2}, "train.tile": 3},
    "sigmoid": PLAIN | {"method.name": "sigmoid"},
    "sigmoid-strips": PLAIN | {"method.name": "sigmoid", "train.tile": 3},
    "infonce": PLAIN | {"method.name": "infonce"},
    "pcme": PLAIN | {"method.name": "pcme"},
    "pcmepp": PLAIN | {"method.name": "pcmepp", "method.mix": {"share": 0.6}},
    "daa": PLAIN | {"method.name": "daa"},
    "ncr": NOISY | {"method.name": "ncr"},
    "npc": NOISY | {"method.name": "npc"},
    "accumulate": PLAIN | {"method.name": "vacsr", "train.accumulate": 2},
    "photos": PHOTOS | {"method.name": "vacsr"},
    "streamed": PHOTOS | {"method.name": "vacsr", "data.cache_gb": 0.0, "train.optimizer": "adamp"},
    "npc-streamed": NPC_ON_PHOTOS | {"data.cache_gb": 0.0, "data.workers": 2},
    "photos-accumulate": PHOTOS | {"method.name": "infonce", "train.accumulate": 2},
}


def within(case: str) -> dict[str, float]:
    """Tolerances: Adam turns the rounding of a gradient near zero into a visible share of a step."""
    weighed = case.startswith(("ncr", "npc"))  # by losses, which round differently too
    return {"weights": 1e-4 if weighed else 5e-5, "rows": 2e-5 if case in ("photos", "streamed") else 1e-4}


@pytest.mark.parametrize("case", [*list(CASES)[:9], "photos"])
def test_two_ranks_have_the_loss_terms_and_gradients_of_one(
    launch: Any, recipes: Any, tmp_path: Path, case: str
) -> None:
    """In strips, those of one process that computes the loss whole."""
    one, two = recipes.file(CASES[case] | {"train.tile": 0}), recipes.file(CASES[case])
    whole, *_ = launch.assert_same_gradients(one, two, tmp_path, within=2e-6 if "strips" in case else 1e-5)
    if case == "photos":
        assert {"backbone.image", "image_pool"} <= {part for name in whole["grad"] for part in (name[:14], name[:10])}


QUICK = ("vacsr", "photos", "streamed", "ncr", "npc")
LATER = ("npc-streamed", "vacsr-columns", "sigmoid", "infonce", "accumulate", "photos-accumulate")


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=[pytest.mark.slow, pytest.mark.long]) for case in LATER)]
)
def test_a_run_of_two_ranks(launch: Any, reference: Any, tmp_path: Path, case: str) -> None:
    """Each rank is given a folder of its own, so that what it writes can be seen."""
    file, expected = reference(CASES[case])
    outs = [tmp_path / "rank-0", tmp_path / "rank-1"]
    first, second = launch.ranks([["train", file, "--out", out] for out in outs])
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "| flickr | test |" in first.out
    assert second.out == ""
    assert not outs[1].exists(), "only rank 0 writes"
    assert Outcome.of(outs[0]).close(expected, **within(case))


@pytest.mark.parametrize(
    ("case", "rank", "step"),
    [("sigmoid", 1, 5), pytest.param("streamed", 0, 10, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_ranks_stop_together_and_resume(
    launch: Any, recipes: Any, tmp_path: Path, case: str, rank: int, step: int
) -> None:
    """Ctrl-C reaches one rank only; both must stop after the same step, also in the epoch that unfreezes a tower."""
    file = recipes.file(CASES[case])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = ["train", file, "--out", broken]
    assert [part.code for part in launch.ranks([["train", file, "--out", whole]] * 2)] == [0, 0]
    stopped = launch.ranks([command, command], each=[{"kill": ("ctrl-c", step)} if n == rank else {} for n in (0, 1)])
    assert [part.code for part in stopped] == [130, 130], stopped
    assert all(f"stopped after step {step}" in part.err for part in stopped)
    assert [part.code for part in launch.ranks([[*command, "--resume"]] * 2)] == [0, 0]
    assert Outcome.of(broken).same(Outcome.of(whole))


def test_one_process_may_train_twice(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file = recipes.file(CASES["sigmoid"])
    done = launch.ranks([[], []], task="twice", recipe=str(file), result=str(tmp_path))
    assert [part.code for part in done] == [0, 0], done
    assert Outcome.of(tmp_path / "run-0").same(Outcome.of(tmp_path / "run-1"))


def test_a_group_that_was_there_before_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_world(torch.device("cpu")) == World(0, 1)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert join_world(torch.device("cpu")) == World(0, 1)
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


@pytest.mark.slow
def test_torchrun(reference: Any, tmp_path: Path) -> None:
    file, expected = reference(CASES["vacsr"])
    script = tmp_path / "vacsr_main.py"
    script.write_text("from vacsr.cli import main; main()", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    command += ["train", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| flickr | test |") == 1
    assert Outcome.of(tmp_path / "run").close(expected, **within("vacsr"))


@pytest.mark.parametrize(
    ("first", "second", "code", "words"),
    [
        ({}, {"data.pairs": "synthetic:images=29,per_image=2,seed=1"}, 4, "data.on_error=skip"),
        ({}, {"train.lr": 0.001}, 4, "the 2 ranks read different data or settings"),
        ({"train.batch_size": 9}, {"train.batch_size": 9}, 2, "9 does not divide over 2 ranks — set train.batch_size"),
    ],
)
def test_ranks_that_cannot_train_together(
    launch: Any, recipes: Any, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], code: int, words: str
) -> None:
    """Both stop, with the same message; neither waits for the other."""
    files = [recipes.file(PLAIN | change) for change in (first, second)]
    for done in launch.ranks([["train", file, "--out", tmp_path / "run"] for file in files]):
        assert (done.code, done.out) == (code, "")
        assert words in done.err
    assert not (tmp_path / "run").exists()
