"""What a run folder says of itself, for commands that take one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vacsr.errors import UsageError


def run_section(run: Path, name: str) -> dict[str, Any]:
    """A section of the run folder's config.yaml, unchecked: an older run may have other fields. Empty if not there."""
    from vacsr.config.io import read_yaml

    config = run / "config.yaml"
    section = read_yaml(config).get(name) if config.is_file() else None
    return section if isinstance(section, dict) else {}


def run_files(run: Path) -> list[Path]:
    """What commands read of a run folder or a model folder, and of the data it names; not what others keep in it."""
    data, judged = run_section(run, "data"), run_section(run, "evaluate").get("judgments") or ()
    model = run / "model" if (run / "model").is_dir() else run
    named = [model / name for name in ("config.json", "model.safetensors", "search.json", "backbone")]
    named += [run / name for name in ("config.yaml", "posthoc.safetensors")]
    return [*named, *(Path(str(path)).expanduser() for path in judged), *spec_files(data.get("pairs"))]


def spec_files(spec: str | None) -> list[Path]:
    """The files that a SPEC names itself; of a folder nobody knows which files are data."""
    from vacsr.data import parse_spec

    if spec is None:
        return []
    parsed = parse_spec(str(spec))
    named = [Path(text).expanduser() for text in (parsed.path, *parsed.options.values()) if text]
    return [path for path in named if path.is_file()]


def run_pairs(run: Path) -> str:
    """The data that a run folder was trained on."""
    data = run_section(run, "data")
    if "pairs" not in data:
        raise UsageError(f"{run} is a model folder, so it does not say on which data — add --pairs SPEC")
    return str(data["pairs"])
