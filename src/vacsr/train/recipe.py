"""A recipe from data to report: load, add noise, train, save, evaluate. This is what `vacsr train` runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.config import DataConfig, Recipe, dump_yaml
from vacsr.data import PairSet, load_pairs
from vacsr.data.noise import apply_noise, permute_captions
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.judgments import read_judgments
from vacsr.evaluate.retrieval import RetrievalReport, evaluate_retrieval
from vacsr.files import write_json, write_text
from vacsr.scoring import PairScorer
from vacsr.train.loop import Run, fit


class RecipeRun(NamedTuple):
    """A run and what it reported; the report is None where the run was interrupted."""

    run: Run
    report: RetrievalReport | None


class TrainingData(NamedTuple):
    """What training sees: labels possibly noisy, dev always clean."""

    train: PairSet
    dev: PairSet | None


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> RecipeRun:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and report.json."""
    check_folder(out, resume=resume)
    data = training_data(recipe.data, out)
    write_text(out / "config.yaml", dump_yaml(recipe))
    run = fit(
        recipe.method, data.train, recipe.train,
        dev=data.dev, backbone=recipe.backbone, out=out, resume=resume, progress=progress,
    )  # fmt: skip
    if run.interrupted:
        return RecipeRun(run, None)
    run.model.save_pretrained(out / "model")
    report = report_splits(PairScorer(run.model, device=recipe.train.device), recipe)
    write_json(out / "report.json", report.to_json())
    return RecipeRun(run, report)


def check_folder(out: Path, *, resume: bool) -> None:
    """A folder that already holds a run is touched only with ``resume``."""
    if not resume and (out / "config.yaml").exists():
        raise UsageError(f"{out} already holds a run — continue it with --resume, or choose another --out")


def training_data(config: DataConfig, out: Path | None = None) -> TrainingData:
    """The training split with its noise (saved beside the run), and a dev split where there is one."""
    train = load_pairs(config.pairs, split=config.train)
    dev: PairSet | None = None
    if config.dev_share > 0:
        train, dev = train.split_images(config.dev_share, seed=config.noise.seed)
    elif config.dev:
        dev = load_pairs(config.pairs, split=config.dev)
    if config.noise.ratio > 0:
        noise = permute_captions(train.caption_image, ratio=config.noise.ratio, seed=config.noise.seed)
        if out is not None:
            noise.save(out / "noise.safetensors")
        train = apply_noise(train, noise)
    return TrainingData(train, dev)


def report_splits(scorer: PairScorer, recipe: Recipe, splits: Sequence[str] | None = None) -> RetrievalReport:
    """Evaluate the recipe's splits; one that the data lacks is left out unless it was asked for by name."""
    judgments = [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments]
    results: list[dict[str, Any]] = []
    for split in splits or recipe.evaluate.splits:
        try:
            pairs = load_pairs(recipe.data.pairs, split=split)
        except DataError:
            if splits:
                raise
            continue
        part = evaluate_retrieval(scorer, pairs, protocols=recipe.evaluate.protocols, judgments=judgments)
        results.extend(part.results)
    return RetrievalReport(tuple(results))
