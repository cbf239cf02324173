"""The folder in which the demo leaves its results."""

from __future__ import annotations

import json
from pathlib import Path

from vacsr.demo.settings import METHODS
from vacsr.errors import EnvironmentProblem, UsageError

KIND = "vacsr demo"
"""Marks a results.json as ours, to be overwritten."""
RESULTS, TABLE, PAGE, PICTURE = "results.json", "table.md", "index.html", "scene.png"


def claim_folder(out: Path) -> None:
    """Make the folder. One that holds other people's results under the demo's names is refused before any work."""
    names = [name for name in (RESULTS, TABLE, PAGE, PICTURE, *METHODS) if (out / name).exists()]
    if names and not _is_demo(out / RESULTS):
        raise UsageError(f"{out} already holds {names[0]}, which is not the demo's — choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the folder {out} ({error.strerror}) — choose another --out") from error


def _is_demo(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == KIND
