"""What a run folder says of itself, for testing it again: other data would be reported as if trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vacsr.config.fewshot import FewshotDataConfig, FewshotRecipe
from vacsr.data.fewshot import Shots
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError, UsageError
from vacsr.train.fewshot.reading import read_fewshot
from vacsr.train.fewshot.search import FILE as SEARCH_FILE
from vacsr.train.fewshot.search import Choice


def check_recipe(recipe: FewshotRecipe, out: Path) -> None:
    """Refuse a recipe whose method or data, but for ``targets``, are not those of ``out/config.yaml``."""
    file = out / "config.yaml"
    if not file.is_file():
        raise DataError(
            f"no few-shot model in {out}, no {file.name} — train one: vacsr fewshot RECIPE.yaml --out {out}"
        )
    kept = read_fewshot(file)
    ours, theirs = _told(recipe), _told(kept)
    for name, value in ours.items():
        if value != theirs[name]:
            message = f"the recipe has {name}={value!r}, the run in {out} was trained with {theirs[name]!r}"
            raise UsageError(f"{message} — give its own: vacsr fewshot {file} --out {out} --evaluate-only")


def _told(recipe: FewshotRecipe) -> dict[str, Any]:
    fields = {name: getattr(recipe.data, name) for name in FewshotDataConfig.model_fields if name != "targets"}
    return {"method.name": recipe.method.name, **{f"data.{name}": value for name, value in fields.items()}}


def check_shots(shots: Shots, out: Path) -> None:
    """Refuse data in which the draw is no longer that of ``out/shots.json``."""
    file = out / "shots.json"
    found = read_json(file, keys=("train",)).get("hash")
    if found != shots.hash:
        message = f"the data gives shots {shots.hash[:12]}…, {file} has {str(found)[:12]}…"
        raise UsageError(f"{message}: photos were added, removed or renamed — put them back, or train again")


def chosen(out: Path) -> Choice:
    """What the run's search chose; nothing where it had none."""
    file = out / SEARCH_FILE
    return dict(read_json(file, keys=("candidates",)).get("best", {})) if file.is_file() else {}
