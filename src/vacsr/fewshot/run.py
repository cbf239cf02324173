"""A few-shot recipe from data to report. This is what `vacsr fewshot` runs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vacsr.config.io import dump_yaml
from vacsr.data.fewshot import save_shots
from vacsr.errors import UsageError
from vacsr.evaluate.fewshot import fewshot_result, harmonic_mean
from vacsr.fewshot.config import FewshotRecipe
from vacsr.fewshot.data import FewshotSets, load_sets
from vacsr.fewshot.methods.clip import check_matched
from vacsr.fewshot.model import FewshotModel, FewshotTask
from vacsr.files import read_json, write_json, write_tensors, write_text
from vacsr.model import choose_device
from vacsr.progress import PhotoProgress
from vacsr.train.checkpoint import (
    TrainState,
    check_checkpoint,
    check_folder,
    describe_recipe,
    run_lock,
)
from vacsr.train.distributed import take_device
from vacsr.train.trainer import Run, Trainer

ANSWERS = "answers.safetensors"
SEARCH = "search.json"
Choice = dict[str, Any]
"""A candidate of a search: ``image_blocks``, ``text_blocks`` and ``epochs``, those that are searched."""


def run_fewshot(recipe: FewshotRecipe, out: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Fill the run folder ``out``: config.yaml, shots.json, metrics.jsonl, checkpoint/, model/ and, last, report.json.

    Also answers.safetensors, the prediction for each test photo, and search.json where something was searched. Errors
    are found before the first file is written, except in photos, which are decoded when they are used. The run's
    ``report`` is None where it was interrupted.
    """
    with run_lock(out):
        check_folder(out, resume=resume)
        device, sets = take_device(recipe.train.device), load_sets(recipe.data)
        if recipe.search.candidates() and not len(sets.val):
            raise UsageError("a search needs validation shots, the draw has none — lower data.shots or take search out")
        model = _build(recipe, sets, device=device)
        description = describe_recipe(method=recipe.method, backbone=recipe.backbone, train=recipe.train) | {
            "origin": vars(model.origin),
            "shots": [sets.shots.hash, sets.train.digest()],
            "classes": sets.classes,
            "search": recipe.search.model_dump(mode="json"),
        }
        check_checkpoint(out / "checkpoint", description)
        trainer = _trainer(recipe, sets, model, out=out, description=description)
        for name in ("report.json", ANSWERS, *(() if resume else (SEARCH,))):
            (out / name).unlink(missing_ok=True)  # of an earlier run, with another config.yaml
        write_text(out / "config.yaml", dump_yaml(recipe))
        save_shots(out / "shots.json", sets.shots, source=sets.source)
        run, choice = Run(model.method.eval(), TrainState(), [], out), {}
        if recipe.search.candidates():
            best = search(recipe, sets, out=out, description=description, device=device, progress=progress)
            if best is None:
                return replace(run, state=TrainState(stopped=True))
            choice, recipe = best, with_choice(recipe, best)
            model = _build(recipe, sets, device=device)
            trainer = _trainer(recipe, sets, model, out=out, description=description)
        if trainer is None:
            write_text(out / "metrics.jsonl", "")
        else:
            if resume:
                trainer.resume()
            run = trainer.run(progress=progress)
        if run.interrupted:
            return run
        model.save(out / "model", recipe)
        return replace(run, report=_report(recipe, sets, model, out=out, choice=choice, progress=progress))


def check_fewshot(recipe: FewshotRecipe) -> None:
    """Refuse a recipe that would be refused later, as far as it alone shows that."""
    choose_device(recipe.train.device)
    check_matched(recipe.backbone)


def _build(recipe: FewshotRecipe, sets: FewshotSets, *, device: torch.device) -> FewshotModel:
    seed = recipe.train.seed
    return FewshotModel.build(recipe.method, recipe.backbone, classes=sets.classes, seed=seed, device=device)


def _trainer(
    recipe: FewshotRecipe, sets: FewshotSets, model: FewshotModel, *, out: Path, description: dict[str, Any]
) -> Trainer | None:
    """None where there is nothing to train."""
    if not model.method.trains:
        return None
    task = FewshotTask(model, sets.train, recipe.train, label=recipe.method.name, description=description)
    return Trainer(task, recipe.train, out)


def with_choice(recipe: FewshotRecipe, choice: Choice) -> FewshotRecipe:
    """The recipe with a candidate's fields."""
    fields = {name: value for name, value in choice.items() if name != "epochs"}
    train = recipe.train.model_copy(update={"epochs": choice.get("epochs", recipe.train.epochs)})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update=fields), "train": train})


def search(
    recipe: FewshotRecipe, sets: FewshotSets, *, out: Path, description: Mapping[str, Any], device: torch.device,
    progress: bool,
) -> Choice | None:  # fmt: skip
    """Train every candidate on the shots, score it on the validation shots, return the best; among equals the first.

    The test sets are not read (paper, Appendix C.2). ``out/search.json`` is written after each candidate, so that an
    interrupted search, which returns None, can continue.
    """
    table = recipe.search.candidates()
    before = read_json(out / SEARCH, lists=("candidates",)) if (out / SEARCH).is_file() else {}
    fingerprint = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    scored = before["candidates"] if before.get("fingerprint") == fingerprint else []
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


def validation_accuracy(recipe: FewshotRecipe, sets: FewshotSets, *, device: torch.device, label: str) -> float | None:
    """Train a candidate and test it on the validation shots, in percent; None where it was interrupted."""
    model = _build(recipe, sets, device=device)
    task = FewshotTask(model, sets.train, recipe.train, label=label)
    if Trainer(task, recipe.train).run(progress=bool(label)).interrupted:
        return None
    size, workers = recipe.evaluate.batch_size, recipe.train.workers
    predicted = model.evaluate(sets.val, sets.classes, batch_size=size, workers=workers)
    return 100.0 * float(predicted.correct.double().mean())


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
        "trainable": model.method.trainable_count(),
        "results": [],
    }
    tensors: dict[str, Tensor] = {}
    for split, photos, classes in sets.tests:
        size, workers, count = config.batch_size, recipe.train.workers, len(classes.names)
        with PhotoProgress(f"testing {split}", show=progress) as bar:
            predicted = model.evaluate(photos, classes, batch_size=size, workers=workers, progress=bar)
        result = fewshot_result(split, predicted, classes=count, bins=config.bins, coverages=config.coverages)
        report["results"].append(result)
        columns = {**predicted._asdict(), "correct": None, "label": photos.labels}
        tensors |= {f"{split}.{name}": column for name, column in columns.items() if column is not None}
    accuracy = {result["split"]: result["accuracy"] for result in report["results"]}
    if {"base", "new"} <= accuracy.keys():
        report["hm"] = harmonic_mean(accuracy["base"], accuracy["new"])
    if choice:
        report["search"] = choice
    write_tensors(out / ANSWERS, tensors)
    write_json(out / "report.json", report)
    return report
