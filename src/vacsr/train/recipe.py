"""A recipe from data to report: load, add noise, train, save, evaluate. This is what `vacsr train` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vacsr.config import DataConfig, EvaluateConfig, Recipe
from vacsr.data import PairSet, load_pairs
from vacsr.data.noise import CaptionNoise, apply_noise, permute_captions
from vacsr.errors import DataError
from vacsr.evaluate.judgments import Judgments, read_judgments
from vacsr.evaluate.retrieval import RetrievalReport, check_protocols, evaluate_retrieval
from vacsr.files import write_json, write_text
from vacsr.recipes import dump_yaml
from vacsr.scoring import PairScorer
from vacsr.train.distributed import barrier, leaving_world
from vacsr.train.folder import check_folder
from vacsr.train.loop import Run, Trainer
from vacsr.train.precision import matmul_precision


class RecipeRun(NamedTuple):
    """A run and what it reported; the report is None where the run was interrupted, and on ranks after the first."""

    run: Run
    report: RetrievalReport | None


class TrainingData(NamedTuple):
    """What training sees: labels possibly noisy, dev always clean."""

    train: PairSet
    dev: PairSet | None
    noise: CaptionNoise | None = None
    """What was done to the labels."""


class ReportData(NamedTuple):
    """What the report is made from."""

    sets: tuple[PairSet, ...]
    judgments: tuple[Judgments, ...]


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> RecipeRun:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and, last of all, report.json.

    Everything that can be refused is refused before the first file is written. Of several ranks the first writes, and
    a process group that the run joined is left again.
    """
    check_folder(out, resume=resume)
    check_protocols(recipe.evaluate.protocols)
    with leaving_world():
        return _run(recipe, out, resume=resume, progress=progress)


def _run(recipe: Recipe, out: Path, *, resume: bool, progress: bool) -> RecipeRun:
    data = training_data(recipe.data)
    to_report = report_data(recipe, held_out=data.dev if recipe.data.dev_share > 0 else None)
    trainer = Trainer.create(recipe.method, data.train, recipe.train, backbone=recipe.backbone, dev=data.dev, out=out)
    if resume:
        trainer.resume()
    barrier(trainer.world)  # every rank has looked at the folder before the first changes it
    if trainer.world.is_main:
        _open_folder(out, recipe, data.noise)
    run = trainer.run(progress=progress)
    if run.interrupted or not trainer.world.is_main:
        return RecipeRun(run, None)
    run.model.save_pretrained(out / "model")
    with matmul_precision("fp32"):  # figures are compared across runs, however these were trained
        report = _report(PairScorer(run.model, device=recipe.train.device), to_report, recipe.evaluate)
    write_json(out / "report.json", report.to_json())
    return RecipeRun(run, report)


def _open_folder(out: Path, recipe: Recipe, noise: CaptionNoise | None) -> None:
    """Report and noise stand for the config.yaml beside them, so older ones go first."""
    for name in ("report.json", "noise.safetensors"):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    if noise is not None:
        noise.save(out / "noise.safetensors")


def training_data(config: DataConfig) -> TrainingData:
    """The training split with its noise, and a dev split where there is one."""
    train = load_pairs(config.pairs, split=config.train)
    dev: PairSet | None = None
    if config.dev_share > 0:
        train, dev = train.split_images(config.dev_share, seed=config.noise.seed)
    elif config.dev:
        dev = _dev_split(config)
    if config.noise.ratio == 0:
        return TrainingData(train, dev)
    noise = permute_captions(train.caption_image, ratio=config.noise.ratio, seed=config.noise.seed)
    return TrainingData(apply_noise(train, noise), dev, noise)


def _dev_split(config: DataConfig) -> PairSet:
    try:
        return load_pairs(config.pairs, split=config.dev)
    except DataError as error:
        load_pairs(config.pairs)  # raises where the data are broken and not just without this split
        raise DataError(f"{error}; to do without it, set data.dev= (none) or data.dev_share=0.1") from error


def report_data(recipe: Recipe, *, held_out: PairSet | None = None) -> ReportData:
    """Load what a report needs: the recipe's splits that the data has, and as `dev` the images held out, if any."""
    judgments = [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments]
    sets = []
    for split in recipe.evaluate.splits:
        if split == "dev" and held_out is not None:
            sets.append(held_out)
            continue
        try:
            sets.append(load_pairs(recipe.data.pairs, split=split))
        except DataError:
            load_pairs(recipe.data.pairs)  # raises where the data are broken and not just without this split
    return ReportData(tuple(sets), tuple(judgments))


def _report(scorer: PairScorer, data: ReportData, config: EvaluateConfig) -> RetrievalReport:
    results: list[dict[str, Any]] = []
    for pairs in data.sets:
        part = evaluate_retrieval(
            scorer, pairs,
            protocols=config.protocols, judgments=data.judgments, ties=config.ties, bins=config.bins,
        )  # fmt: skip
        results.extend(part.results)
    return RetrievalReport(tuple(results))
