"""What a run folder says of itself, for commands that take one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vacsr.errors import UsageError


def run_section(run: Path, name: str) -> dict[str, Any]:
    """A section of the run folder's config.yaml, unchecked: an older run may have other fields. Empty if not there."""
    from vacsr.recipes import read_yaml

    config = run / "config.yaml"
    section = read_yaml(config).get(name) if config.is_file() else None
    return section if isinstance(section, dict) else {}


def run_pairs(run: Path) -> str:
    """The data that a run folder was trained on."""
    data = run_section(run, "data")
    if "pairs" not in data:
        raise UsageError(f"{run} is a model folder, so it does not say on which data — add --pairs SPEC")
    return str(data["pairs"])
