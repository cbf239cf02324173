"""One writer at a time: a lock that the system lets go of when its holder ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vacsr.errors import EnvironmentProblem

_PAUSE_S = 0.02


@contextmanager
def writer_lock(path: Path, *, patience: float) -> Iterator[None]:
    """Hold the lock of this file; wait up to ``patience`` seconds for another holder, a thread or a process.

    The file stays: its lock counts, not its being there, so a killed writer leaves nothing to clear. It says whose
    the lock was last.
    """
    descriptor = _open(path)
    try:
        _wait(descriptor, path, patience=patience)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # which unlocks


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        message = f"cannot write in {path.parent} ({error.strerror})"
        raise EnvironmentProblem(f"{message} — check the folder's rights, or fill an index elsewhere") from error


def _wait(descriptor: int, path: Path, *, patience: float) -> None:
    try:
        import fcntl
    except ImportError as error:
        message = "this system has no file locks as an exact index needs for writing"
        raise EnvironmentProblem(f"{message} — use Linux or macOS, or a Milvus server: milvus:URI") from error
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                message = f"{path.parent} is being written to by process {holder}"
                raise EnvironmentProblem(f"{message} — wait until it is done, then run the same again") from None
            time.sleep(_PAUSE_S)
        else:
            return
