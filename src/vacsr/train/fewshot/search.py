"""Which blocks learn and for how long, chosen on the validation shots alone (paper, Appendix C.2).

The test split is not given to any function here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vacsr.config.fewshot import FewshotRecipe, ZeroshotConfig
from vacsr.data.fewshot import LabelledPhotos
from vacsr.errors import DataError, UsageError
from vacsr.files import write_json
from vacsr.methods.fewshot import ClassSet
from vacsr.train.fewshot.build import build
from vacsr.train.fewshot.examine import examine
from vacsr.train.fewshot.feed import ShotFeed
from vacsr.train.fewshot.loop import ShotTrainer

FILE = "search.json"
Choice = dict[str, Any]
"""``image_blocks``, ``text_blocks`` and ``epochs``, those that are searched."""


class ShotSets(NamedTuple):
    """What a search sees."""

    train: LabelledPhotos
    val: LabelledPhotos
    classes: ClassSet


class Searched(NamedTuple):
    """What a search found; None where it was interrupted."""

    recipe: FewshotRecipe | None
    choice: Choice


def candidates(recipe: FewshotRecipe) -> list[Choice]:
    """All combinations in the order written, the last list fastest; none where nothing is searched.

    >>> recipe = FewshotRecipe.model_validate({"search": {"image_blocks": [1, "last 2"], "epochs": [5]}})
    >>> candidates(recipe)
    [{'image_blocks': 'first 1', 'epochs': 5}, {'image_blocks': 'last 2', 'epochs': 5}]
    """
    lists = {
        name: [_blocks(value) for value in getattr(recipe.search, name)] for name in ("image_blocks", "text_blocks")
    }
    lists["epochs"] = list(recipe.search.epochs)
    given = {name: values for name, values in lists.items() if values}
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())] if given else []


def _blocks(value: Any) -> Any:
    return f"first {value}" if isinstance(value, int) else value


def with_choice(recipe: FewshotRecipe, choice: Mapping[str, Any]) -> FewshotRecipe:
    """The recipe with a candidate's fields in place."""
    fields = {name: value for name, value in choice.items() if name != "epochs"}
    train = recipe.train.model_copy(update={"epochs": choice.get("epochs", recipe.train.epochs)})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update=fields), "train": train})


def check_search(recipe: FewshotRecipe, val: LabelledPhotos) -> None:
    """Refuse a search that the method or the data have no place for."""
    check_searched(recipe)
    if candidates(recipe) and not len(val):
        raise UsageError("a search needs validation shots, the draw has none — lower data.shots or take search out")


def check_searched(recipe: FewshotRecipe) -> None:
    """Refuse a search that the method has no place for."""
    asked = [name for choice in candidates(recipe)[:1] for name in choice]
    unknown = [name for name in asked if name != "epochs" and name not in type(recipe.method).model_fields]
    if unknown:
        raise UsageError(f"method '{recipe.method.name}' has no {unknown[0]} to search — take search.{unknown[0]} out")
    if asked and isinstance(recipe.method, ZeroshotConfig):
        raise UsageError("method 'zeroshot' does not train, there is nothing to search — take search out")


def search(
    recipe: FewshotRecipe, sets: ShotSets, *, out: Path, fingerprint: str, device: torch.device, progress: bool
) -> Searched:
    """Train every candidate on the shots, score it on the validation shots, and keep the best, of equals the first.

    ``out/search.json`` has the table and grows with each, so that a run which was stopped does not begin again.
    """
    tried = _tried(out / FILE, fingerprint)
    table = candidates(recipe)
    for number, choice in enumerate(table):
        if number < len(tried):
            continue
        label = f"search {number + 1}/{len(table)}"
        scored = _score(with_choice(recipe, choice), sets, device=device, label=label if progress else "")
        if scored is None:
            return Searched(None, {})
        tried.append({**choice, "val_accuracy": scored})
        write_json(out / FILE, {"fingerprint": fingerprint, "candidates": tried, "samples": len(sets.val)})
    best = max(range(len(table)), key=lambda number: (tried[number]["val_accuracy"], -number))
    found = {"fingerprint": fingerprint, "candidates": tried, "samples": len(sets.val), "best": table[best]}
    write_json(out / FILE, found)
    return Searched(with_choice(recipe, table[best]), table[best])


def _tried(path: Path, fingerprint: str) -> list[dict[str, Any]]:
    """Candidates that an earlier, stopped search of the same run has scored."""
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = found["fingerprint"] == fingerprint
        return list(found["candidates"]) if same else []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}) — delete it, the search then begins again") from error


def _score(recipe: FewshotRecipe, sets: ShotSets, *, device: torch.device, label: str) -> float | None:
    """Accuracy on the validation shots in percent; None where Ctrl-C came first."""
    built = build(recipe.method, recipe.backbone, classes=sets.classes, seed=recipe.train.seed, device=device)
    feed = ShotFeed(sets.train, recipe.train, transform=built.transform, second=built.method.second_view)
    trainer = ShotTrainer(built.method, feed, recipe.train, sets.classes, built.transform, device)
    if trainer.run(progress=bool(label), label=label).interrupted:
        return None
    found = examine(
        built.method, sets.val, sets.classes,
        transform=built.transform, batch_size=recipe.evaluate.batch_size, workers=recipe.train.workers,
    )  # fmt: skip
    return 100.0 * float(found.correct.double().mean())
