"""One writer at a time: a lock that the system lets go of when its holder ends, however it ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vacsr.errors import EnvironmentProblem

_PAUSE_S = 0.02
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""How a file system without locks answers."""


class FolderInUse(EnvironmentProblem):
    """Another process writes to this folder now."""


class Purpose(NamedTuple):
    """What a lock is for, in the words of its messages."""

    doing: str
    """What the holder does to the folder: "written to"."""
    wait: str
    """What to do when another has it."""
    elsewhere: str
    """What to do where the folder cannot be written to."""
    without: str = ""
    """What to do where there are no locks; empty: go on without."""


@contextmanager
def file_lock(path: Path, purpose: Purpose, *, patience: float = 0.0, stays: bool = True) -> Iterator[None]:
    """Hold the lock of this file; wait up to ``patience`` seconds for another holder, a thread or a process.

    Its lock counts, not its being there, so a killed writer leaves nothing to clear. The file says whose the lock was
    last; at the end it stays, or goes while it is still locked.
    """
    until = time.monotonic() + patience
    descriptor = _open(path, purpose)
    try:
        _wait(descriptor, path, purpose, until=until)
        while not _is_named(descriptor, path):  # the holder before took the file away with its lock
            os.close(descriptor)
            descriptor = _open(path, purpose)
            _wait(descriptor, path, purpose, until=until)
        with suppress(OSError):  # a full disk: the lock holds without the note
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        try:
            yield
        finally:
            if not stays and _is_named(descriptor, path):  # the folder may be another one by now
                path.unlink(missing_ok=True)
            _let_go(descriptor)
    finally:
        os.close(descriptor)  # which unlocks too, unless a forked child has it open


def _let_go(descriptor: int) -> None:
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open(path: Path, purpose: Purpose) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        message = f"cannot write in {path.parent} ({error.strerror})"
        raise EnvironmentProblem(f"{message} — {purpose.elsewhere}") from error


def _is_named(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _wait(descriptor: int, path: Path, purpose: Purpose, *, until: float) -> None:
    while not _taken(descriptor, path, purpose):
        if time.monotonic() >= until:
            message = f"{path.parent} is being {purpose.doing} by {_holder(descriptor)}"
            raise FolderInUse(f"{message} — {purpose.wait}")
        time.sleep(_PAUSE_S)


def _taken(descriptor: int, path: Path, purpose: Purpose) -> bool:
    """Take the lock, unless another has it. Where there are no locks: refuse, or take nothing for it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        if purpose.without:
            message = f"there are no file locks in {path.parent}, which writing to it needs"
            raise EnvironmentProblem(f"{message} — {purpose.without}") from error
    return True


def _holder(descriptor: int) -> str:
    """Process and, if it is another, the machine."""
    note = os.pread(descriptor, 300, 0).decode(errors="replace").partition("\n")[0]
    number, _, machine = note.strip().partition(" ")
    where = f" on {machine}" if machine not in ("", socket.gethostname()) else ""
    return f"process {number or 'unknown'}{where}"
