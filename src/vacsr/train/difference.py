"""In what two recipes differ, said so that one can act on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vacsr.config import Config
from vacsr.config.io import read_yaml
from vacsr.errors import ConfigError, DataError
from vacsr.train.checkpoint import NO_EFFECT, READING, has_checkpoint


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> str | None:
    """The first dotted field in which two configurations differ, with both values.

    >>> first_difference({"train": {"epochs": 20, "lr": 0.1}}, {"train": {"epochs": 1, "lr": 0.2}})
    'train.epochs was 20 and is now 1'
    """
    for key in dict.fromkeys((*now, *before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found = first_difference(old, new, f"{place}{key}.")
            if found is not None:
                return found
        elif old != new:
            return f"{place}{key} was {old!r} and is now {new!r}"
    return None


def check_same_training(recipe: Config, out: Path, *, read: Callable[[dict[str, Any]], Config], command: str) -> None:
    """Before a run goes on: refuse a recipe that trains otherwise than ``out/config.yaml``, and name the field.

    Other data are seen later, by their contents.
    """
    file = out / "config.yaml"
    if not has_checkpoint(out / "checkpoint") or not file.is_file():
        return
    try:
        before = read(read_yaml(file))
    except ConfigError:
        return  # the checkpoint's own mark decides
    reason = first_difference(_training(before), _training(recipe))
    if reason is not None:
        raise DataError(
            f"{out} belongs to a run with another configuration or data: {reason} — go on with its own recipe: "
            f"{command} {file} --out {out} --resume, or choose a new --out"
        )


def _training(recipe: Config) -> dict[str, Any]:
    """What a checkpoint stands for, but for the data."""
    parts = {"method", "backbone", "train", "search"}
    return recipe.model_dump(mode="json", include=parts, exclude={"train": {*NO_EFFECT, *READING}})
