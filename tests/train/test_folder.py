"""A run folder is one process's while it is trained, and nobody's when it is read."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vacsr import TrainConfig, fit, load_pairs
from vacsr.errors import FolderInUse, UsageError
from vacsr.train.run import LOCK, clear_folder, run_lock

LONG = {"method.name": "infonce", "train.epochs": 100_000, "train.checkpoint_every": 5}


def wait_for_rows(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) < count:
        assert time.monotonic() < deadline, "no rows come"
        time.sleep(0.01)


def test_a_second_run_of_a_folder_is_refused_and_the_first_goes_on(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file, out = recipes.file(LONG), tmp_path / "run"
    first = launch.start("train", file, "--out", out)
    wait_for_rows(out / "metrics.jsonl", 8)
    for options in ((), ("--resume",), ("--resume", "--set", "train.lr=0.1")):
        second = launch("train", file, "--out", out, *options)
        assert (second.code, second.out) == (3, "")
        assert f"another process (pid {first.process.pid}) is using {out} — wait until it is done" in second.err
        assert "Traceback" not in second.err
    with pytest.raises(FolderInUse):
        fit("infonce", load_pairs("synthetic:images=20", split="train"), TrainConfig(epochs=1), out=out, resume=True)
    wait_for_rows(out / "metrics.jsonl", len((out / "metrics.jsonl").read_text().splitlines()) + 8)
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait().code == 130
    steps = [line.split(",")[0] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [f'{{"step": {number}' for number in range(len(steps))], "one run's log"
    assert not (out / LOCK).exists()


def test_the_lock_of_a_killed_run_blocks_nobody(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file, out = recipes.file({"method.name": "infonce"}), tmp_path / "run"
    assert launch("train", file, "--out", out, kill=("after step", 9)).code == -signal.SIGKILL
    assert (out / LOCK).exists()
    assert launch("train", file, "--out", out, "--resume").code == 0
    assert not (out / LOCK).exists()
    with run_lock(out):  # reading needs none, and does not mind one
        assert launch("evaluate", out, "--split", "dev").code == 0


def test_who_holds_it_may_ask_again_but_no_other_thread(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def ask() -> None:
        try:
            with run_lock(tmp_path / "run"):
                pass
        except FolderInUse as error:
            found.append(error)

    with run_lock(tmp_path / "run"):
        with run_lock(tmp_path / "." / "run"):
            pass
        assert (tmp_path / "run" / LOCK).exists(), "the inner one lets nothing go"
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert f"(pid {os.getpid()})" in str(found[0])
    ask()
    assert len(found) == 1


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    for there in (False, True):
        (tmp_path / "deep").mkdir(exist_ok=True) if there else None
        with pytest.raises(UsageError), run_lock(tmp_path / "deep" / "er" / "run"):
            raise UsageError("no")
        assert [path.name for path in tmp_path.rglob("*")] == ["deep"] * there


def test_other_ranks_leave_the_lock_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with run_lock(tmp_path / "run"):
        assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()


def test_clearing_keeps_the_lock_and_what_a_link_points_to(tmp_path: Path) -> None:
    out, far = tmp_path / "run", tmp_path / "far"
    far.mkdir()
    (far / "kept").touch()
    with run_lock(out):
        (out / "checkpoint").mkdir()
        (out / "checkpoint" / "state").touch()
        (out / "report.json").touch()
        (out / "link").symlink_to(far)
        clear_folder(out)
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert (far / "kept").exists()
