"""A few-shot recipe from data to report. This is what `vacsr fewshot` runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.config.fewshot import FewshotDataConfig, FewshotRecipe
from vacsr.config.io import dump_yaml
from vacsr.data.fewshot import save_shots
from vacsr.evaluate.fewshot import Answers, fewshot_result, harmonic_mean
from vacsr.files import write_json, write_tensors, write_text
from vacsr.train.checkpoint import NO_EFFECT, READING, TrainState
from vacsr.train.difference import check_same_training
from vacsr.train.distributed import take_device
from vacsr.train.fewshot.again import check_recipe, check_shots, chosen
from vacsr.train.fewshot.build import Built, build
from vacsr.train.fewshot.examine import examine
from vacsr.train.fewshot.feed import ShotFeed
from vacsr.train.fewshot.learned import check_checkpoint
from vacsr.train.fewshot.loop import ShotRun, ShotTrainer
from vacsr.train.fewshot.reading import fewshot_from
from vacsr.train.fewshot.saved import load_fewshot, save_fewshot
from vacsr.train.fewshot.search import FILE as SEARCH_FILE
from vacsr.train.fewshot.search import Choice, Searched, ShotSets, candidates, check_search, search
from vacsr.train.fewshot.task import FewshotTask, load_task
from vacsr.train.folder import check_folder, run_lock
from vacsr.train.progress import PhotoProgress
from vacsr.train.trackers import check_trackers

ANSWERS = "answers.safetensors"


class FewshotRecipeRun(NamedTuple):
    """What a run left; the report is None where it was interrupted."""

    steps: int
    """Done in the training proper."""
    report: dict[str, Any] | None

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C."""
        return self.report is None


def run_fewshot(recipe: FewshotRecipe, out: Path, *, resume: bool = False, progress: bool = True) -> FewshotRecipeRun:
    """Fill the run folder ``out``: config.yaml, shots.json, metrics.jsonl, checkpoint/, model/ and, last, report.json.

    Also answers.safetensors, how each test photo was answered, and search.json where something was searched. All that
    can be refused is refused before the first file is written, but for photos, which are decoded when they are used.
    A folder that another process fills is refused.
    """
    with run_lock(out):
        return _run(recipe, out, resume=resume, progress=progress)


def _run(recipe: FewshotRecipe, out: Path, *, resume: bool, progress: bool) -> FewshotRecipeRun:
    check_folder(out, resume=resume)
    if resume:
        check_same_training(recipe, out, read=fewshot_from, command="vacsr fewshot")
    check_trackers(recipe.train.trackers)
    device = take_device(recipe.train.device)
    task = load_task(recipe.data)
    check_search(recipe, task.val)
    built = _built(recipe, task, device)
    mark = fingerprint(recipe, task, origin=built.origin)
    check_checkpoint(out / "checkpoint", fingerprint=mark)
    _open_folder(out, recipe, task, resume=resume)
    found = Searched(recipe, {})
    if candidates(recipe):
        sets = ShotSets(task.train, task.val, task.classes)
        found = search(recipe, sets, out=out, fingerprint=mark, device=device, progress=progress)
        if found.recipe is None:
            return FewshotRecipeRun(0, None)
        built = _built(found.recipe, task, device)
    assert found.recipe is not None, "only a search can be interrupted here"
    trainer = _trainer(found.recipe, task, built, out=out, fingerprint=mark)
    if resume and trainer is not None:
        trainer.resume()
    run = _nothing(built, out) if trainer is None else trainer.run(progress=progress, label=recipe.method.name)
    if run.interrupted:
        return FewshotRecipeRun(run.state.step, None)
    save_fewshot(out / "model", built, recipe=found.recipe, classes=task.classes)
    report = _report(found.recipe, task, built, out=out, choice=found.choice, progress=progress)
    return FewshotRecipeRun(run.state.step, report)


def evaluate_fewshot(recipe: FewshotRecipe, out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Test a finished run again and write its report; nothing is trained.

    The recipe may have other ``data.targets`` and another ``evaluate`` than the run; other data is refused.
    """
    with run_lock(out):
        check_recipe(recipe, out)
        task = load_task(recipe.data)
        check_shots(task.shots, out)
        loaded = load_fewshot(out, device=recipe.train.device)
        built = Built(loaded.method, loaded.transform, {})
        return _report(recipe, task, built, out=out, choice=chosen(out), progress=progress)


def fingerprint(recipe: FewshotRecipe, task: FewshotTask, *, origin: Mapping[str, str]) -> str:
    """What must be equal for a checkpoint to fit: method, backbone and its weights, plan, shots, classes and search."""
    whole = {
        "method": recipe.method.model_dump(mode="json"),
        "backbone": recipe.backbone.model_dump(mode="json"),
        "origin": dict(origin),
        "train": recipe.train.model_dump(mode="json", exclude={*NO_EFFECT, *READING}),
        "shots": [task.shots.hash, task.train.digest()],
        "classes": task.classes,
        "search": recipe.search.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _open_folder(out: Path, recipe: FewshotRecipe, task: FewshotTask, *, resume: bool) -> None:
    """Report and answers stand for the config.yaml beside them, so older ones go first; so does another search."""
    for name in ("report.json", ANSWERS, *(() if resume else (SEARCH_FILE,))):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    save_shots(out / "shots.json", task.shots, source=task.source)


def _built(recipe: FewshotRecipe, task: FewshotTask, device: torch.device) -> Built:
    return build(recipe.method, recipe.backbone, classes=task.classes, seed=recipe.train.seed, device=device)


def _trainer(
    recipe: FewshotRecipe, task: FewshotTask, built: Built, *, out: Path, fingerprint: str
) -> ShotTrainer | None:
    """None for a method that has nothing to learn."""
    if not built.method.trains:
        return None
    feed = ShotFeed(task.train, recipe.train, transform=built.transform, second=built.method.second_view)
    device = next(built.method.parameters()).device
    return ShotTrainer(
        built.method, feed, recipe.train, task.classes, built.transform, device, out=out, fingerprint=fingerprint
    )


def _nothing(built: Built, out: Path) -> ShotRun:
    """What a training without steps leaves."""
    write_text(out / "metrics.jsonl", "")
    built.method.eval()
    return ShotRun(built.method, TrainState(), [])


def _report(
    recipe: FewshotRecipe, task: FewshotTask, built: Built, *, out: Path, choice: Choice, progress: bool
) -> dict[str, Any]:
    """Test every set, then write answers and report."""
    config = recipe.evaluate
    results: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for one in task.tests:
        with PhotoProgress(f"testing {one.split}", show=progress) as told:
            found = examine(
                built.method, one.photos, one.classes,
                transform=built.transform, batch_size=config.batch_size, workers=recipe.train.workers, progress=told,
            )  # fmt: skip
        result = fewshot_result(
            one.split, found, classes=len(one.classes.names), bins=config.bins, coverages=config.coverages
        )
        results.append(result)
        tensors |= _kept(one.split, found, one.photos.labels)
    report = _described(recipe, task, built) | {"results": results} | _harmonic(results)
    if choice:
        report["search"] = choice
    write_tensors(out / ANSWERS, tensors)
    write_json(out / "report.json", report)
    return report


def _described(recipe: FewshotRecipe, task: FewshotTask, built: Built) -> dict[str, Any]:
    return {
        "schema": 1,
        "task": "fewshot",
        "method": recipe.method.name,
        "dataset": task.source.name,
        "protocol": recipe.data.protocol,
        **_drawn(recipe.data),
        "shots_hash": task.shots.hash,
        "trainable": built.method.trainable() if built.method.trains else 0,
    }


def _drawn(config: FewshotDataConfig) -> dict[str, Any]:
    """Shots and seed of the draw, or the file that was taken instead of one."""
    return {"shots_file": config.shots_file} if config.shots_file else {"shots": config.shots, "seed": config.seed}


def _harmonic(results: list[dict[str, Any]]) -> dict[str, float]:
    """Of base and new, where the protocol has both."""
    found = {result["split"]: result["accuracy"] for result in results}
    return {"hm": harmonic_mean(found["base"], found["new"])} if {"base", "new"} <= found.keys() else {}


def _kept(split: str, found: Answers, labels: Tensor) -> dict[str, Tensor]:
    """What paired tests and reliability figures need."""
    columns = {name: column for name, column in found._asdict().items() if column is not None and name != "correct"}
    return {f"{split}.label": labels, **{f"{split}.{name}": column for name, column in columns.items()}}
