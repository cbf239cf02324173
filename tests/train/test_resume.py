"""A run that is killed and resumed ends where the uninterrupted run ends, bit for bit.

A run on photos has 4 epochs of 4 steps. The text tower is frozen in the first, the image tower in the first two, and
the loss warms up in the epochs that unfreeze them. Augmentation is on. Photos that are decoded again for every batch
("streamed") must end where those that were decoded once end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

CASES: dict[str, dict[str, Any]] = {
    "vacsr": {"method.name": "vacsr"},
    "infonce": {"method.name": "infonce"},
    "vacsr-adamp": {"method.name": "vacsr", "train.optimizer": "adamp"},
    "infonce-adamp": {"method.name": "infonce", "train.optimizer": "adamp"},
    "accumulate": {"method.name": "vacsr", "train.accumulate": 2},
    "cosine": {"method.name": "vacsr", "train.schedule": "cosine", "train.warmup_steps": 5},
    "noise": {"method.name": "vacsr", "data.noise.ratio": 0.5},
    "epoch-ends": {"method.name": "sigmoid", "train.checkpoint_every": 0, "train.select": "last"},
}
PHOTOS: dict[str, Any] = {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1},
    "train.checkpoint_every": 0,
}
ON_PHOTOS: dict[str, dict[str, Any]] = {
    "photos": PHOTOS | {"method.name": "vacsr"},
    "photos-adamp": PHOTOS | {"method.name": "vacsr", "train.optimizer": "adamp", "data.photo_size": 40},
    "photos-accumulate": PHOTOS | {"method.name": "sigmoid", "train.accumulate": 2, "backbone.checkpointing": True},
    "photos-mean": PHOTOS | {"method.name": "infonce", "backbone.pooling": "mean", "train.schedule": "cosine"},
}
STREAMED = ("--set", "data.cache_gb=0", "--set", "data.workers=2")
MOMENTS = ["after step", "after checkpoint", "before checkpoint", "in checkpoint", "in log"]


def assert_resumes_exactly(
    launch: Any, reference: Any, outcome: Any, out: Path, *, case: str, kills: list[tuple[str, int]]
) -> None:
    file, expected = reference(CASES[case])
    for kill in kills:
        done = launch("train", file, "--out", out, "--resume", kill=kill)
        assert done.code == -signal.SIGKILL, done
        assert not (out / "report.json").exists()
    done = launch("train", file, "--out", out, "--resume")
    assert done.code == 0, done.err
    assert outcome.of(out).same(expected)
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    ("case", "moment", "number"),
    [
        ("vacsr", "after step", 12),
        ("vacsr", "after checkpoint", 2),
        ("vacsr", "before checkpoint", 3),
        ("vacsr", "in checkpoint", 1),  # before there is any: the run starts again
        ("vacsr", "in checkpoint", 4),
        ("vacsr", "in log", 9),
        ("infonce", "in checkpoint", 5),
        ("vacsr-adamp", "after step", 17),
        ("infonce-adamp", "after checkpoint", 4),
        ("accumulate", "after step", 10),
        ("accumulate", "after checkpoint", 3),
        ("cosine", "after step", 5),
        ("noise", "in checkpoint", 3),
        ("epoch-ends", "after step", 13),
    ],
)
def test_a_killed_run_resumes_exactly(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, moment: str, number: int
) -> None:
    assert_resumes_exactly(launch, reference, outcome, tmp_path / "run", case=case, kills=[(moment, number)])


def test_a_run_killed_again_and_again(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    kills = [("after step", 5), ("in checkpoint", 2), ("in log", 4), ("after checkpoint", 1)]
    assert_resumes_exactly(launch, reference, outcome, tmp_path / "run", case="vacsr", kills=kills)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_random_moments(launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, seed: int) -> None:
    draw = random.Random(f"{case}/{seed}")
    highest = {"after step": 3, "after checkpoint": 1, "before checkpoint": 1, "in checkpoint": 1, "in log": 3}
    kills = [(moment, draw.randint(1, highest[moment])) for moment in draw.choices(MOMENTS, k=3)]
    kills.insert(0, ("after step", draw.randint(1, 8)))
    assert_resumes_exactly(launch, reference, outcome, tmp_path / "run", case=case, kills=kills)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_from_outside(launch: Any, reference: Any, outcome: Any, tmp_path: Path, seed: int) -> None:
    changes = {"method.name": "vacsr", "train.epochs": 20}
    file, expected = reference(changes)
    out, draw = tmp_path / "run", random.Random(seed)
    for _ in range(2):
        started = launch.start("train", file, "--out", out, "--resume")
        time.sleep(draw.uniform(0.05, 0.9))
        started.process.kill()
        started.wait()
    assert launch("train", file, "--out", out, "--resume").code == 0
    assert outcome.of(out).same(expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_resumes(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, number: signal.Signals
) -> None:
    file, expected = reference({"method.name": "vacsr", "train.epochs": 30, "train.checkpoint_every": 0})
    out = tmp_path / "run"
    started = launch.until_rows(out / "metrics.jsonl", 20, "train", file, "--out", out)
    os.kill(started.process.pid, number)
    done = started.wait()
    assert done.code == 130, done
    assert done.out == ""
    assert "--resume" in done.err
    assert not (out / "report.json").exists()
    assert launch("train", out / "config.yaml", "--out", out, "--resume").code == 0
    assert outcome.of(out).same(expected)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("vacsr", 7),  # its epoch's last, whose evaluation must not be lost
        ("vacsr", 11),
        ("accumulate", 6),  # likewise
        ("accumulate", 11),  # half an optimiser step
        ("photos", 4),  # the next process begins with a tower unfrozen
        ("photos", 8),
        *(pytest.param(case, step, marks=pytest.mark.slow) for case in ON_PHOTOS for step in (5, 11)),
    ],
)
def test_ctrl_c_in_any_step_resumes_exactly(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, step: int
) -> None:
    """Photos that were in memory are streamed after resuming."""
    file, expected = reference((CASES | ON_PHOTOS)[case])
    out = tmp_path / "run"
    done = launch("train", file, "--out", out, kill=("ctrl-c", step))
    assert done.code == 130, done
    assert launch("train", file, "--out", out, "--resume", *(STREAMED if case in ON_PHOTOS else ())).code == 0
    assert outcome.of(out).same(expected)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("photos", STREAMED),
        pytest.param("photos", (), marks=pytest.mark.slow),
        pytest.param("photos-adamp", (), marks=pytest.mark.slow),
        pytest.param("photos-adamp", STREAMED, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_every_epoch_of_freezing(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, options: tuple[str, ...]
) -> None:
    """Steps done at each stop: 2 (both towers frozen), 6 (the text tower unfreezes), 10 (the image tower), 14."""
    file, expected = reference(ON_PHOTOS[case])
    command = ["train", file, "--out", tmp_path / "run", "--resume", *options]
    for number, step in enumerate((2, 6, 10, 14)):
        done = launch(*command, kill=("ctrl-c", 2 if number == 0 else 4))
        assert done.code == 130, done
        assert f"stopped after step {step};" in done.err
    done = launch(*command)
    assert done.code == 0, done.err
    assert outcome.of(tmp_path / "run").same(expected)


def test_a_kill_while_photos_are_read_ahead(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(ON_PHOTOS["photos-adamp"])
    command = ["train", file, "--out", tmp_path / "run", "--resume", *STREAMED]
    done = launch(*command, "--set", "train.checkpoint_every=3", kill=("after step", 11))
    assert done.code == -signal.SIGKILL
    assert launch(*command).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


def test_photos_that_changed_are_another_run(launch: Any, recipes: Any, tmp_path: Path) -> None:
    """Same captions and ids, another picture world: its checkpoint is refused."""
    file = recipes.file(PHOTOS | {"method.name": "sigmoid"})
    command = ["train", file, "--out", tmp_path / "run", "--resume"]
    assert launch(*command, kill=("ctrl-c", 5)).code == 130
    for change in ("data.pairs=scenes:images=16,held_out=6,per_image=2,size=48", "data.photo_size=40"):
        done = launch(*command, "--set", change)
        assert (done.code, done.out) == (4, "")
        assert "another configuration or data" in done.err


def test_ctrl_c_in_the_last_step_changes_nothing(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path / "run", kill=("ctrl-c", 21)).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files but the lock that a killed run leaves, and that the next one takes away."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_folder_with_a_run_is_not_touched_without_resume(launch: Any, reference: Any, tmp_path: Path) -> None:
    file, _ = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path, kill=("after step", 5)).code == -signal.SIGKILL
    before = snapshot(tmp_path)
    done = launch("train", file, "--out", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "already holds a run" in done.err
    assert "--resume" in done.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("change", ["train.lr=0.01", "method.name=sigmoid", "data.noise.ratio=0.3", "train.seed=1"])
def test_another_recipe_is_refused_and_changes_nothing(
    launch: Any, reference: Any, tmp_path: Path, change: str
) -> None:
    file, _ = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path, kill=("after step", 5)).code == -signal.SIGKILL
    before = snapshot(tmp_path)
    done = launch("train", file, "--out", tmp_path, "--resume", "--set", change)
    assert (done.code, done.out) == (4, "")
    assert "another configuration or data" in done.err
    field, _, value = change.partition("=")
    assert field.startswith("data") or (f"{field} was" in done.err and value in done.err)
    assert snapshot(tmp_path) == before


def test_how_often_to_log_may_change_on_resume(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path, kill=("after step", 8)).code == -signal.SIGKILL
    more = ["--set", "train.log_every=5", "--set", "train.checkpoint_every=0"]
    assert launch("train", file, "--out", tmp_path, "--resume", *more).code == 0
    found = outcome.of(tmp_path)
    assert all((found.weights[name] == tensor).all() for name, tensor in expected.weights.items())
    assert [row["step"] for row in found.rows if "loss" in row] == [0, 1, 2, 3, 4, 5, 6, 10, 15, 20]


def test_resuming_a_finished_run_trains_no_more(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path).code == 0
    assert launch("train", file, "--out", tmp_path, "--resume", kill=("after step", 1)).code == 0
    assert outcome.of(tmp_path).same(expected)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [result["split"] for result in report["results"]] == ["dev", "test"]
