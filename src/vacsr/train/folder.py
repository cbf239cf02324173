"""What a run folder holds, whether another run may have it, and who fills it now."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.files import lock_file, make_folder
from vacsr.train.checkpoint import has_checkpoint
from vacsr.train.distributed import is_first_rank

LOCK = ".lock"
_WAIT = "wait until it is done or stop it, then run the same again, or choose another --out"
_ELSEWHERE = "choose another --out, or change its permissions"
_HELD: ContextVar[frozenset[Path]] = ContextVar("run folders held", default=frozenset())


def holds_run(out: Path) -> bool:
    """Is there work to lose, a checkpoint or a report? Without either, what lies there never got far."""
    return has_checkpoint(out / "checkpoint") or (out / "report.json").is_file()


def check_place(out: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work and without making it."""
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{out} cannot be a folder: {place} is a file — choose another --out")
    if not os.access(place, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{place} may not be written to — choose another --out, or change its permissions")


def check_folder(out: Path, *, resume: bool) -> None:
    """A folder that already holds a run is touched only with ``resume``."""
    check_place(out)
    if not resume and holds_run(out):
        raise UsageError(f"{out} already holds a run — continue it with --resume, or choose another --out")


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Have the run folder to oneself, or refuse: two runs in one folder would mix their logs and checkpoints.

    Who holds it may ask again, and of several ranks the first holds it for all. A folder that was made for it and got
    nothing goes again. To read a run nobody needs it.
    """
    check_place(out)
    place = out.resolve()
    if place in _HELD.get() or not is_first_rank():
        yield
        return
    with _made(place), lock_file(place / LOCK, wait=_WAIT, elsewhere=_ELSEWHERE, remove=True):
        before = _HELD.set(_HELD.get() | {place})
        try:
            yield
        finally:
            _HELD.reset(before)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder, made if need be; what was made and is still empty is removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):
                path.rmdir()


def clear_folder(out: Path) -> None:
    """Remove all that a run left; only for who holds its lock, which stays."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
