"""What a run folder holds, and whether another run may have it."""

from __future__ import annotations

import os
from pathlib import Path

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.train.checkpoint import has_checkpoint


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
