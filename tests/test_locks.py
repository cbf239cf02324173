"""One writer at a time, whatever becomes of the one before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vacsr.errors import EnvironmentProblem
from vacsr.locks import FolderInUse, Purpose, file_lock

NEEDED = Purpose("filled", "wait for it", "go elsewhere", without="use another disk")
GOES_ON = NEEDED._replace(without="")
HOLD = """
import sys, time
from pathlib import Path
from vacsr.locks import Purpose, file_lock
with file_lock(Path(sys.argv[1]), Purpose("filled", "", ""), stays=sys.argv[2] == "stays"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path, end: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


@pytest.mark.parametrize("stays", [True, False])
def test_a_second_process_is_told_who_has_it(stays: bool, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "stays" if stays else "goes") as process:
        with pytest.raises(FolderInUse) as caught, file_lock(path, NEEDED):
            pass
        assert str(caught.value) == f"{tmp_path} is being filled by process {process.pid} — wait for it"
        assert caught.value.exit_code == 3
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert path.exists() == stays
    with file_lock(path, NEEDED, stays=stays):
        assert path.read_text().split()[0] == str(os.getpid())
    assert path.exists() == stays


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "goes") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    with file_lock(path, NEEDED, stays=False):
        pass
    assert not path.exists()


def test_an_ending_holder_leaves_the_lock_of_a_new_folder_alone(tmp_path: Path) -> None:
    """Somebody removed the folder meanwhile and another holder began there."""
    place = tmp_path / "run"
    place.mkdir()
    first = file_lock(place / "lock", NEEDED, stays=False)
    first.__enter__()
    shutil.rmtree(place)
    place.mkdir()
    with file_lock(place / "lock", NEEDED, stays=False):
        first.__exit__(None, None, None)
        assert (place / "lock").exists()
        with pytest.raises(FolderInUse), file_lock(place / "lock", NEEDED):
            raise AssertionError
    assert not (place / "lock").exists()


def test_the_machine_is_named_if_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("77 elsewhere\n")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match="by process 77 on elsewhere"), file_lock(path, NEEDED):
            pass


def test_threads_take_turns_though_the_file_goes_each_time(tmp_path: Path) -> None:
    """Who waited for a file that its holder removed must not believe in the lock of a file without a name."""
    inside, most, turns = [0], [0], [0]

    def work() -> None:
        for _ in range(40):
            with file_lock(tmp_path / "lock", NEEDED, patience=60.0, stays=False):
                inside[0] += 1
                most[0], turns[0] = max(most[0], inside[0]), turns[0] + 1
                (tmp_path / "seen").write_text("x")  # lets the others run
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], turns[0], sorted(os.listdir(tmp_path))) == (1, 160, ["seen"])


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(EnvironmentProblem, match=r"no file locks in .* — use another disk"):
        file_lock(tmp_path / "lock", NEEDED).__enter__()
    with file_lock(tmp_path / "lock", GOES_ON, stays=False):
        pass
    assert os.listdir(tmp_path) == []


def test_a_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(EnvironmentProblem, match="use another disk"):
        file_lock(tmp_path / "lock", NEEDED).__enter__()
    with file_lock(tmp_path / "lock", GOES_ON):
        pass


def test_a_disk_that_fails_is_not_one_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="broken"):
        file_lock(tmp_path / "lock", GOES_ON).__enter__()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"cannot write in .*absent.* — go elsewhere"):
        file_lock(tmp_path / "absent" / "lock", NEEDED).__enter__()
