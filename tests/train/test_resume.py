"""A run that is killed and resumed ends where the uninterrupted run ends, bit for bit.

A run on photos has 4 epochs of 4 steps. The text tower is frozen in the first, the image tower in the first two, and
the loss warms up in the epochs that unfreeze them. Augmentation is on. Photos that are decoded again for every batch
("streamed") must end where those that were decoded once end.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .conftest import NPC_ON_PHOTOS, Outcome

SLOW = pytest.mark.slow
LONG = (pytest.mark.slow, pytest.mark.long)
PHOTOS: dict[str, Any] = {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1},
    "train.checkpoint_every": 0,
}
NOISY: dict[str, Any] = {"method.warmup": 0.35, "data.noise.ratio": 0.5, "train.checkpoint_every": 2}
CASES: dict[str, dict[str, Any]] = {
    "vacsr": {"method.name": "vacsr"},
    "infonce": {"method.name": "infonce"},
    "vacsr-adamp": {"method.name": "vacsr", "train.optimizer": "adamp"},
    "infonce-adamp": {"method.name": "infonce", "train.optimizer": "adamp"},
    "accumulate": {"method.name": "vacsr", "train.accumulate": 2},
    "cosine": {"method.name": "vacsr", "train.schedule": "cosine", "train.warmup_steps": 5},
    "noise": {"method.name": "vacsr", "data.noise.ratio": 0.5},
    "epoch-ends": {"method.name": "sigmoid", "train.checkpoint_every": 0, "train.select": "last"},
    "average": {"method": {"name": "vacsr", "preset": "ensemble", "members": 2, "trust": 0.3}, "train.ema": 0.9},
    "never": {"method.name": "sigmoid", "train.checkpoint_every": 0, "train.checkpoint_epochs": 0},
}
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"method.name": name} for name in ("vse", "pcme", "pcmepp", "daa")},
    **{name: {"method.name": name, **NOISY} for name in ("ncr", "bicro", "npc")},
    "npc-photos": NPC_ON_PHOTOS,
    "photos": PHOTOS | {"method.name": "vacsr"},
    "photos-adamp": PHOTOS | {"method.name": "vacsr", "train.optimizer": "adamp", "data.photo_size": 40},
    "photos-accumulate": PHOTOS | {"method.name": "sigmoid", "train.accumulate": 2, "backbone.checkpointing": True},
    "photos-mean": PHOTOS | {"method.name": "infonce", "backbone.pooling": "mean", "train.schedule": "cosine"},
}
STREAMED = ("--set", "data.cache_gb=0", "--set", "data.workers=2")
EACH_EPOCH = "ctrl-c 2, ctrl-c 4, ctrl-c 4, ctrl-c 4"
"""Of photos: while both towers are frozen, as the text tower and then the image tower unfreezes, and after that."""


def assert_resumes_exactly(
    launch: Any, reference: Any, out: Path, case: str, moments: str, options: Sequence[str] = ()
) -> None:
    """Stop the run at each of the moments, such as "after step 5, ctrl-c 2"; counts start again when it resumes."""
    file, expected = reference((CASES | OTHERS)[case])
    command = ("train", file, "--out", out, "--resume", *options)
    for moment in moments.split(", "):
        name, _, number = moment.rpartition(" ")
        done = launch(*command, kill=(name, int(number)))
        assert done.code == (130 if name == "ctrl-c" else -signal.SIGKILL), done
        assert not (out / "report.json").exists()
    done = launch(*command)
    assert done.code == 0, done.err
    assert Outcome.of(out).same(expected)
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    ("case", "moments"),
    [
        ("vacsr", "after step 12"),
        ("vacsr", "before checkpoint 3"),
        ("vacsr", "in checkpoint 1"),  # before there is any: the run starts again
        ("vacsr", "after step 5, in checkpoint 2, in log 4, after checkpoint 1"),
        ("vacsr", "ctrl-c 7"),  # its epoch's last, whose evaluation must not be lost
        ("vacsr", "ctrl-c 11"),
        ("infonce", "in checkpoint 5"),
        ("vacsr-adamp", "after step 17"),
        ("infonce-adamp", "after checkpoint 4"),
        ("accumulate", "after step 10"),
        ("accumulate", "ctrl-c 6"),  # an epoch's last
        ("accumulate", "ctrl-c 11"),  # half an optimiser step
        ("cosine", "after step 5"),
        ("noise", "in checkpoint 3"),
        ("epoch-ends", "after step 13"),
        ("never", "ctrl-c 7, ctrl-c 2"),
        *((method, "after step 10") for method in ("vse", "pcme", "pcmepp", "daa")),
        *((method, "after step 12") for method in ("ncr", "bicro", "npc")),
        pytest.param("photos", EACH_EPOCH, marks=SLOW),
    ],
)
def test_a_stopped_run_resumes_exactly(launch: Any, reference: Any, tmp_path: Path, case: str, moments: str) -> None:
    assert_resumes_exactly(launch, reference, tmp_path / "run", case, moments)


@pytest.mark.parametrize(
    ("case", "moments"),
    [
        ("photos", "ctrl-c 4"),  # the next process begins with a tower unfrozen
        pytest.param("photos", EACH_EPOCH, marks=LONG),  # in memory, the same stops are above
        ("npc-photos", "after step 6"),  # in the middle of an epoch, with the bank of its beginning
        pytest.param("npc-photos", "ctrl-c 11", marks=LONG),
        pytest.param("photos-adamp", "ctrl-c 2, ctrl-c 4", marks=SLOW),
        *(pytest.param(f"photos-{case}", "ctrl-c 5, ctrl-c 6", marks=SLOW) for case in ("accumulate", "mean")),
    ],
)
def test_a_streamed_run_resumes_exactly(launch: Any, reference: Any, tmp_path: Path, case: str, moments: str) -> None:
    """The reference has its photos in memory."""
    options = (*STREAMED, "--set", "train.checkpoint_every=3")
    assert_resumes_exactly(launch, reference, tmp_path / "run", case, moments, options)


RANDOM = [(case, seed) for seed in (0, 1) for case in CASES if case != "never"]
QUICK = [("vacsr", 0), ("accumulate", 0), ("average", 0)]


@SLOW
@pytest.mark.parametrize(
    ("case", "seed"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in RANDOM if one not in QUICK)]
)
def test_random_moments(launch: Any, reference: Any, tmp_path: Path, case: str, seed: int) -> None:
    """Other cases stop at moments of their own above."""
    draw = random.Random(f"{case}/{seed}")
    highest = {"after step": 3, "in log": 3, "before checkpoint": 1, "in checkpoint": 1, "after checkpoint": 1}
    moments = [f"{name} {draw.randint(1, highest[name])}" for name in draw.choices(list(highest), k=3)]
    moments.insert(0, f"after step {draw.randint(1, 8)}")
    assert_resumes_exactly(launch, reference, tmp_path / "run", case, ", ".join(moments))


@SLOW
@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.long)])
def test_killed_from_outside(launch: Any, reference: Any, tmp_path: Path, seed: int) -> None:
    file, expected = reference({"method.name": "vacsr", "train.epochs": 20})
    out, draw = tmp_path / "run", random.Random(seed)
    for _ in range(2):
        started = launch.start("train", file, "--out", out, "--resume")
        time.sleep(draw.uniform(0.05, 0.9))
        started.process.kill()
        started.wait()
    assert launch("train", file, "--out", out, "--resume").code == 0
    assert Outcome.of(out).same(expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(
    launch: Any, reference: Any, tmp_path: Path, number: signal.Signals
) -> None:
    file, expected = reference({"method.name": "vacsr", "train.epochs": 30, "train.checkpoint_every": 0})
    out = tmp_path / "run"
    started = launch.until_rows(out / "metrics.jsonl", 20, "train", file, "--out", out)
    os.kill(started.process.pid, number)
    done = started.wait()
    assert (done.code, done.out) == (130, "")
    assert "--resume" in done.err
    assert launch("train", out / "config.yaml", "--out", out, "--resume").code == 0
    assert Outcome.of(out).same(expected)


def test_after_the_last_step_nothing_is_trained(launch: Any, reference: Any, tmp_path: Path) -> None:
    """Ctrl-C in the last step does not stop the run, and a finished run has nothing to resume."""
    file, expected = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path / "run", kill=("ctrl-c", 21)).code == 0
    assert Outcome.of(tmp_path / "run").same(expected)
    assert launch("train", file, "--out", tmp_path / "run", "--resume", kill=("after step", 1)).code == 0
    assert Outcome.of(tmp_path / "run").same(expected)


def test_what_may_change_when_a_run_is_resumed(launch: Any, reference: Any, tmp_path: Path) -> None:
    """How often to log may; what would change the result is refused, and nothing is touched."""
    file, expected = reference(CASES["vacsr"])
    assert launch("train", file, "--out", tmp_path, kill=("after step", 8)).code == -signal.SIGKILL

    def snapshot() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = snapshot()
    for change in ("train.lr=0.01", "method.name=sigmoid", "data.noise.ratio=0.3"):
        done = launch("train", file, "--out", tmp_path, "--resume", "--set", change)
        assert (done.code, done.out) == (4, "")
        assert "another configuration or data" in done.err
        field, _, value = change.partition("=")
        assert field.startswith("data") or (f"{field} was" in done.err and value in done.err)
    done = launch("train", file, "--out", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "already holds a run" in done.err
    assert snapshot() == before
    more = ["--set", "train.log_every=5", "--set", "train.checkpoint_every=0"]
    assert launch("train", file, "--out", tmp_path, "--resume", *more).code == 0
    resumed = Outcome.of(tmp_path)
    assert all((resumed.weights[name] == tensor).all() for name, tensor in expected.weights.items())
    assert [row["step"] for row in resumed.rows if "loss" in row] == [0, 1, 2, 3, 4, 5, 6, 10, 15, 20]
