"""A few-shot recipe from data to report. This is what `vacsr fewshot` runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.config.base import method_entry
from vacsr.config.io import dump_yaml
from vacsr.data.fewshot import LabelledPhotos, save_shots
from vacsr.data.fewshot.specs import parse_class_spec
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.fewshot import fewshot_result, harmonic_mean
from vacsr.fewshot.config import FewshotRecipe, fewshot_from, read_fewshot
from vacsr.fewshot.methods.clip import check_matched
from vacsr.fewshot.model import FewshotModel, load_fewshot
from vacsr.fewshot.task import FewshotSets, FewshotTask, check_targets, load_sets
from vacsr.files import write_json, write_tensors, write_text
from vacsr.progress import PhotoProgress
from vacsr.scoring import choose_device
from vacsr.train.callbacks import check_trackers
from vacsr.train.checkpoint import (
    NO_EFFECT,
    READING,
    check_checkpoint,
    check_same_training,
    fingerprint,
    first_difference,
)
from vacsr.train.distributed import take_device
from vacsr.train.run import check_folder, run_lock
from vacsr.train.trainer import Trainer

ANSWERS = "answers.safetensors"
SEARCH = "search.json"
Choice = dict[str, Any]
"""A candidate of a search: ``image_blocks``, ``text_blocks`` and ``epochs``, those that are searched."""


class FewshotRun(NamedTuple):
    """The result of a run; the report is None where it was interrupted."""

    steps: int
    """Done in the final training."""
    report: dict[str, Any] | None

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C."""
        return self.report is None


def run_fewshot(recipe: FewshotRecipe, out: Path, *, resume: bool = False, progress: bool = True) -> FewshotRun:
    """Fill the run folder ``out``: config.yaml, shots.json, metrics.jsonl, checkpoint/, model/ and, last, report.json.

    Also answers.safetensors, the prediction for each test photo, and search.json where something was searched. Errors
    are found before the first file is written, except in photos, which are decoded when they are used. A folder that
    another process is filling is refused.
    """
    with run_lock(out):
        check_folder(out, resume=resume)
        if resume:
            check_same_training(recipe, out, read=fewshot_from, command="vacsr fewshot")
        check_trackers(recipe.train.trackers)
        device = take_device(recipe.train.device)
        sets = load_sets(recipe.data)
        check_search(recipe, sets.val)
        task = _task(recipe, sets, device=device, label=recipe.method.name)
        task.described = describe(recipe, sets, origin=task.fewshot.origin)
        digest = fingerprint(task.described)
        check_checkpoint(out / "checkpoint", fingerprint=digest)
        for name in ("report.json", ANSWERS, *(() if resume else (SEARCH,))):
            (out / name).unlink(missing_ok=True)  # of an earlier run, with another config.yaml
        write_text(out / "config.yaml", dump_yaml(recipe))
        save_shots(out / "shots.json", sets.shots, source=sets.source)
        choice: Choice = {}
        if candidates(recipe):
            best = search(recipe, sets, out=out, fingerprint=digest, device=device, progress=progress)
            if best is None:
                return FewshotRun(0, None)
            choice, recipe, described = best, with_choice(recipe, best), task.described
            task = _task(recipe, sets, device=device, label=recipe.method.name)
            task.described = described
        steps = 0
        if task.method.trains:
            trainer = Trainer(task, recipe.train, out)
            if resume:
                trainer.resume()
            run = trainer.run(progress=progress)
            if run.interrupted:
                return FewshotRun(run.state.step, None)
            steps = run.state.step
        else:
            write_text(out / "metrics.jsonl", "")
            task.method.eval()
        task.fewshot.save(out / "model", recipe)
        return FewshotRun(steps, _report(recipe, sets, task.fewshot, out=out, choice=choice, progress=progress))


def evaluate_fewshot(recipe: FewshotRecipe, out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Test a finished run again and write its report; nothing is trained.

    The recipe may have other ``data.targets`` and another ``evaluate`` than the run; other data is refused.
    """
    with run_lock(out):
        _check_same_data(recipe, out)
        sets = load_sets(recipe.data)
        trained_on = read_json(out / "shots.json", keys=("train",)).get("hash")
        if trained_on != sets.shots.hash:
            message = f"the data gives shots {sets.shots.hash[:12]}…, {out / 'shots.json'} has {str(trained_on)[:12]}…"
            raise UsageError(f"{message}: photos were added, removed or renamed — restore them, or train again")
        model = load_fewshot(out, device=recipe.train.device)
        searched = read_json(out / SEARCH, keys=("candidates",)) if (out / SEARCH).is_file() else {}
        return _report(recipe, sets, model, out=out, choice=searched.get("best", {}), progress=progress)


def check_fewshot(recipe: FewshotRecipe) -> None:
    """Refuse a recipe that would be refused later, as far as it alone shows that."""
    choose_device(recipe.train.device)
    check_targets(recipe.data)
    for spec in (recipe.data.spec, *recipe.data.targets.values()):
        parse_class_spec(spec)
    check_search(recipe)
    check_matched(recipe.backbone)


def _check_same_data(recipe: FewshotRecipe, out: Path) -> None:
    """Refuse a recipe whose method or data, except ``targets``, differ from ``out/config.yaml``."""
    file = out / "config.yaml"
    if not file.is_file():
        raise DataError(
            f"no few-shot model in {out}, no {file.name} — train one: vacsr fewshot RECIPE.yaml --out {out}"
        )
    before, now = (
        {"method": {"name": each.method.name}, "data": each.data.model_dump(exclude={"targets"})}
        for each in (read_fewshot(file), recipe)
    )
    difference = first_difference(before, now)
    if difference is not None:
        message = f"the run in {out} was trained otherwise: {difference}"
        raise UsageError(f"{message} — give its own recipe: vacsr fewshot {file} --out {out} --evaluate-only")


def describe(recipe: FewshotRecipe, sets: FewshotSets, *, origin: Mapping[str, str]) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit: method, backbone and its weights, plan, shots, classes and search."""
    return {
        "method": recipe.method.model_dump(mode="json"),
        "backbone": recipe.backbone.model_dump(mode="json"),
        "origin": dict(origin),
        "train": recipe.train.model_dump(mode="json", exclude={*NO_EFFECT, *READING}),
        "shots": [sets.shots.hash, sets.train.digest()],
        "classes": sets.classes,
        "search": recipe.search.model_dump(mode="json"),
    }


def _task(recipe: FewshotRecipe, sets: FewshotSets, *, device: torch.device, label: str) -> FewshotTask:
    model = FewshotModel.build(
        recipe.method, recipe.backbone, classes=sets.classes, seed=recipe.train.seed, device=device
    )
    return FewshotTask(model, sets.train, recipe.train, label=label)


# ------------------------------------------------------------------------------------------------------------ search


def candidates(recipe: FewshotRecipe) -> list[Choice]:
    """All combinations in the order written, the last list fastest; none where nothing is searched.

    >>> recipe = FewshotRecipe.model_validate({"search": {"image_blocks": [1, "last 2"], "epochs": [5]}})
    >>> candidates(recipe)
    [{'image_blocks': 'first 1', 'epochs': 5}, {'image_blocks': 'last 2', 'epochs': 5}]
    """
    lists: dict[str, list[Any]] = {
        name: [f"first {value}" if isinstance(value, int) else value for value in getattr(recipe.search, name)]
        for name in ("image_blocks", "text_blocks")
    }
    lists["epochs"] = list(recipe.search.epochs)
    searched = {name: values for name, values in lists.items() if values}
    return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []


def with_choice(recipe: FewshotRecipe, choice: Mapping[str, Any]) -> FewshotRecipe:
    """The recipe with a candidate's fields."""
    fields = {name: value for name, value in choice.items() if name != "epochs"}
    train = recipe.train.model_copy(update={"epochs": choice.get("epochs", recipe.train.epochs)})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update=fields), "train": train})


def check_search(recipe: FewshotRecipe, val: LabelledPhotos | None = None) -> None:
    """Refuse a search over fields that the method does not have, or without validation shots."""
    names = [name for choice in candidates(recipe)[:1] for name in choice]
    unknown = [name for name in names if name != "epochs" and name not in type(recipe.method).model_fields]
    if unknown:
        raise UsageError(f"method '{recipe.method.name}' has no {unknown[0]} to search — take search.{unknown[0]} out")
    if names and not method_entry(recipe.method.name, task="fewshot").method.trains:
        raise UsageError(f"method '{recipe.method.name}' does not train, there is nothing to search — take search out")
    if names and val is not None and not len(val):
        raise UsageError("a search needs validation shots, the draw has none — lower data.shots or take search out")


def search(
    recipe: FewshotRecipe, sets: FewshotSets, *, out: Path, fingerprint: str, device: torch.device, progress: bool
) -> Choice | None:
    """Train every candidate on the shots, score it on the validation shots, return the best; among equals the first.

    The test sets are not read (paper, Appendix C.2). ``out/search.json`` is written after each candidate, so that an
    interrupted search, which returns None, can continue.
    """
    table = candidates(recipe)
    scored = _scored_before(out / SEARCH, fingerprint)
    record = {"fingerprint": fingerprint, "candidates": scored, "samples": len(sets.val)}
    for number, choice in enumerate(table[len(scored) :], start=len(scored)):
        label = f"search {number + 1}/{len(table)}" if progress else ""
        accuracy = validation_accuracy(with_choice(recipe, choice), sets, device=device, label=label)
        if accuracy is None:
            return None
        scored.append({**choice, "val_accuracy": accuracy})
        write_json(out / SEARCH, record)
    best = table[max(range(len(table)), key=lambda number: scored[number]["val_accuracy"])]
    write_json(out / SEARCH, {**record, "best": best})
    return best


def _scored_before(path: Path, fingerprint: str) -> list[dict[str, Any]]:
    """Candidates that an earlier, interrupted search of the same run has scored."""
    if not path.is_file():
        return []
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        return list(before["candidates"]) if before["fingerprint"] == fingerprint else []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}) — delete it, the search then starts again") from error


def validation_accuracy(recipe: FewshotRecipe, sets: FewshotSets, *, device: torch.device, label: str) -> float | None:
    """Train a candidate and test it on the validation shots, in percent; None where it was interrupted."""
    task = _task(recipe, sets, device=device, label=label)
    if Trainer(task, recipe.train).run(progress=bool(label)).interrupted:
        return None
    predicted = task.fewshot.evaluate(
        sets.val, sets.classes, batch_size=recipe.evaluate.batch_size, workers=recipe.train.workers
    )
    return 100.0 * float(predicted.correct.double().mean())


# ------------------------------------------------------------------------------------------------------------ report


def _report(
    recipe: FewshotRecipe, sets: FewshotSets, model: FewshotModel, *, out: Path, choice: Choice, progress: bool
) -> dict[str, Any]:
    """Test every set, then write answers and report."""
    config, draw = recipe.evaluate, recipe.data
    report: dict[str, Any] = {
        "schema": 1,
        "task": "fewshot",
        "method": recipe.method.name,
        "dataset": sets.source.name,
        "protocol": draw.protocol,
        **({"shots_file": draw.shots_file} if draw.shots_file else {"shots": draw.shots, "seed": draw.seed}),
        "shots_hash": sets.shots.hash,
        "trainable": model.method.trainable_count() if model.method.trains else 0,
        "results": [],
    }
    tensors: dict[str, Tensor] = {}
    for test in sets.tests:
        with PhotoProgress(f"testing {test.split}", show=progress) as bar:
            predicted = model.evaluate(
                test.photos, test.classes, batch_size=config.batch_size, workers=recipe.train.workers, progress=bar
            )
        report["results"].append(
            fewshot_result(
                test.split, predicted, classes=len(test.classes.names), bins=config.bins, coverages=config.coverages
            )
        )
        tensors[f"{test.split}.label"] = test.photos.labels
        columns = {name: column for name, column in predicted._asdict().items() if name != "correct"}
        tensors |= {f"{test.split}.{name}": column for name, column in columns.items() if column is not None}
    accuracy = {result["split"]: result["accuracy"] for result in report["results"]}
    if {"base", "new"} <= accuracy.keys():
        report["hm"] = harmonic_mean(accuracy["base"], accuracy["new"])
    if choice:
        report["search"] = choice
    write_tensors(out / ANSWERS, tensors)
    write_json(out / "report.json", report)
    return report
