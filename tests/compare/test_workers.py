"""Workers: they end with their parent, the longest cells go first, and one that dies takes only its cell with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from vacsr.compare import Cell, compare, read_table
from vacsr.compare.workers import _Pool, run_cells
from vacsr.config.io import recipe_from
from vacsr.errors import EnvironmentProblem
from vacsr.files import write_text

TABLE: dict[str, Any] = {
    "title": "Small world",
    "base": {
        "data": {"pairs": "synthetic:images=20,held_out=10,per_image=2"},
        "backbone": {"head": {"dim": 4}},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu", "log_every": 1},
    },
    "rows": [
        {"name": "infonce", "set": {"method": {"name": "infonce"}}},
        {"name": "ours", "set": {"method": {"name": "vacsr", "preset": "paper"}}},
    ],
    "seeds": [0, 1, 2, 3],
    "columns": [{"key": "test.rsum", "name": "RSUM"}],
}
FILES = ("table.md", "table.csv", "table.tex", "results.json")


def running(pid: int) -> bool:
    """Neither gone nor a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(reached: Any, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def cell(row: str, method: str = "infonce", *, epochs: int = 1, folder: Path = Path("nowhere")) -> Cell:
    recipe = recipe_from({"method": {"name": method}, "train": {"epochs": epochs}})
    return Cell(row, "clean", 0, recipe, folder)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks Linux for a process's children")
def test_two_jobs_killed_half_way(tmp_path: Path) -> None:
    """SIGKILL of the parent alone: its workers end too, and the next run goes on to the same table."""
    file, out = tmp_path / "table.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(TABLE), encoding="utf-8")
    command = [sys.executable, "-c", "from vacsr.cli import main; main()", "compare", str(file)]
    process = subprocess.Popen([*command, "--out", str(out), "--jobs", "2"], stdout=subprocess.DEVNULL)
    until(lambda: len(list(out.rglob("report.json"))) >= 2)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
    children = [int(pid) for pid in listed.split()]
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(children) >= 2
    until(lambda: not any(running(pid) for pid in children))
    done = {path: path.stat().st_mtime_ns for path in out.rglob("report.json")}
    assert 2 <= len(done) < 8
    compare(read_table(file), out)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    compare(read_table(file), tmp_path / "whole")  # by one job, never killed
    for name in FILES:
        assert (out / name).read_text(encoding="utf-8") == (tmp_path / "whole" / name).read_text(encoding="utf-8")


LONG = {"epochs": 100_000, "batch_size": 8, "device": "cpu", "log_every": 1, "checkpoint_epochs": 0}
"""Training that saves only when it is asked to stop."""
MAIN = "from vacsr.cli import main; main()"


@contextmanager
def started(folder: Path, *options: str, code: str = MAIN) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs TABLE with one seed, for longer than anybody waits."""
    table = {**TABLE, "base": {**TABLE["base"], "train": LONG}, "seeds": [0]}
    (folder / "table.yaml").write_text(yaml.safe_dump(table), encoding="utf-8")
    command = [sys.executable, "-c", code, "compare", str(folder / "table.yaml"), "--out", str(folder / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()  # its workers end with it
        process.wait()


def rows_of(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return len(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the parent", "all processes"])
def test_sigterm_saves_the_cells_in_progress(to: str, tmp_path: Path) -> None:
    """Some send it to the parent, some to every process; in both cases one step is finished and saved."""
    folders = [tmp_path / "out" / "clean" / row / "seed-0" for row in ("infonce", "ours")]
    with started(tmp_path, "--jobs", "2") as process:
        until(lambda: all(rows_of(folder) >= 3 for folder in folders))
        (os.kill if to == "the parent" else os.killpg)(process.pid, signal.SIGTERM)
        assert process.wait(60) == 130
    for folder in folders:
        assert (folder / "checkpoint" / "state.safetensors").is_file()
        assert not (folder / "report.json").exists()
    now = [rows_of(folder) for folder in folders]
    time.sleep(0.3)
    assert [rows_of(folder) for folder in folders] == now, "nobody trains on"


DEAF = """
import signal, time

def deaf(cell, *, progress, fresh):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cell.folder.mkdir(parents=True)
    (cell.folder / "deaf").touch()
    time.sleep(600)
"""
CALL = """
import sys
sys.path.insert(0, {folder!r})
import deaf_worker, functools, vacsr.compare.run as run
if __name__ == "__main__":
    run.run_cells = functools.partial(run.run_cells, run=deaf_worker.deaf, patience=500.0)
    from vacsr.cli import main
    main()
"""


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """Though no worker listens, and there would be patience with them."""
    (tmp_path / "deaf_worker.py").write_text(DEAF, encoding="utf-8")
    with started(tmp_path, "--jobs", "2", code=CALL.format(folder=str(tmp_path))) as process:
        until(lambda: len(list((tmp_path / "out").rglob("deaf"))) == 2)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_cell_that_another_process_trains_is_left_to_it(jobs: int, vacsr: Any, tmp_path: Path) -> None:
    cell = tmp_path / "out" / "clean" / "infonce" / "seed-0"
    with started(tmp_path, "--row", "infonce") as process:
        until(lambda: rows_of(cell) >= 3)
        before = rows_of(cell)
        table = yaml.safe_load((tmp_path / "table.yaml").read_text(encoding="utf-8"))
        table["rows"][1]["set"]["train"] = {"epochs": 1}
        (tmp_path / "table.yaml").write_text(yaml.safe_dump(table), encoding="utf-8")
        answer = vacsr("compare", tmp_path / "table.yaml", "--out", tmp_path / "out", "--jobs", jobs)
        assert (answer.code, answer.out) == (3, "")
        held = f"clean / infonce / seed 0: another process (pid {process.pid}) is using {cell} — wait until it is done"
        assert f"FolderInUse: {held}" in answer.err
        assert ("left: clean" if jobs == 1 else "seed 0, left: another process is training it") in answer.err
        assert "Traceback" not in answer.err
        assert (tmp_path / "out" / "clean" / "ours" / "seed-0" / "report.json").is_file(), "the others go on"
        until(lambda: rows_of(cell) > before)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    steps = [json.loads(line)["step"] for line in (cell / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == sorted(steps), "one run's log"


def dies(given: Cell, *, progress: bool, fresh: bool) -> None:
    """In place of run_cell: one cell ends its worker, one is broken, the others are run."""
    if given.row == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if given.row == "broken":
        raise ZeroDivisionError("not one of ours")
    write_text(given.folder / "ran", str(os.getpid()))


@pytest.mark.slow
def test_a_dead_worker_takes_only_its_cell_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [cell(name, folder=tmp_path / name) for name in ("dies", "a", "broken", "b", "c")]
    errors = list(
        run_cells(given, jobs=2, console=Console(stderr=True), fresh=False, run=_importable(tmp_path, monkeypatch))
    )
    assert {type(error) for error in errors} == {EnvironmentProblem, RuntimeError}
    told = "\n".join(map(str, errors))
    assert "clean / dies / seed 0: its worker process ended unexpectedly" in told
    assert "clean / broken / seed 0 failed in its worker process" in told
    assert "ZeroDivisionError: not one of ours" in told
    ran = {name: (tmp_path / name / "ran").read_text(encoding="utf-8") for name in ("a", "b", "c")}
    assert str(os.getpid()) not in ran.values()
    shown = capsys.readouterr().err
    assert "5 of 5" in shown
    assert "clean / dies / seed 0, failed" in shown


def _importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This file's functions as a module that a fresh process can import."""
    name = "cells_that_die"
    (folder / f"{name}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return __import__(name).dies


def order(pool: _Pool) -> list[str]:
    """The rows of the waiting cells as they would be given out."""
    left, rows = list(pool.waiting), []
    while left:
        longest = max(left, key=pool._expected)
        left.remove(longest)
        rows.append(longest.row)
    return rows


def test_the_longest_cells_go_first() -> None:
    given = [cell("quick"), cell("ours", "vacsr"), cell("long", epochs=20), cell("ours", "vacsr")]
    pool = _Pool(given, jobs=2, console=Console(stderr=True), fresh=False, run=dies)
    assert order(pool) == ["long", "quick", "ours", "ours"]
    pool.seconds = {"quick": [100.0, 140.0], "long": [60.0]}
    assert order(pool) == ["quick", "ours", "ours", "long"], "by time; what was not timed takes the mean"
