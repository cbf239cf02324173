"""A recipe from data to report: load, add noise, train, save, evaluate. This is what `vacsr train` runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.config import DataConfig, Recipe
from vacsr.config.io import dump_yaml, recipe_from
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.noise import CaptionNoise, apply_noise, load_noise, make_noise
from vacsr.data.photos import check_photos, without
from vacsr.errors import DataError, NoSuchSplit
from vacsr.evaluate.exact import scene_truth
from vacsr.evaluate.judgments import Judgments, read_judgments
from vacsr.evaluate.outcomes import Outcomes, write_outcomes
from vacsr.evaluate.protocols import protocol_galleries
from vacsr.evaluate.retrieval import RetrievalReport, evaluate_retrieval
from vacsr.files import write_json, write_text
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.posthoc import (
    POSTHOC_FILE,
    CosineDistanceScorer,
    PostHocScorer,
    PostHocUncertainty,
    check_posthoc,
)
from vacsr.train.difference import check_same_training
from vacsr.train.distributed import barrier, leaving_world
from vacsr.train.folder import check_folder, run_lock
from vacsr.train.loop import Run, Trainer
from vacsr.train.plans import check_plan
from vacsr.train.precision import matmul_precision


class RecipeRun(NamedTuple):
    """A run and what it reported; the report is None where the run was interrupted, and on ranks after the first."""

    run: Run
    report: RetrievalReport | None


class TrainingData(NamedTuple):
    """What training sees: labels possibly noisy, dev always clean."""

    train: PairSet | PhotoSet
    dev: PairSet | PhotoSet | None
    noise: CaptionNoise | None = None
    """What was done to the labels."""


class ReportData(NamedTuple):
    """What the report is made from."""

    sets: tuple[PairSet | PhotoSet, ...]
    judgments: tuple[Judgments, ...]
    protocols: tuple[tuple[str, ...], ...]
    """For each set, the recipe's protocols that fit it."""


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> RecipeRun:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and, last of all, report.json.

    Just before the report, outcomes.safetensors keeps how each query fared, for paired tests.

    Everything that can be refused is refused before the first file is written, but for photos of the report's splits,
    which are decoded when they are scored: `--resume` then reports without training again. Of several ranks the first
    writes, and a process group that the run joined is left again. A folder that another process fills is refused.
    """
    with run_lock(out), leaving_world():
        check_folder(out, resume=resume)
        if resume:
            check_same_training(recipe, out, read=recipe_from, command="vacsr train")
        check_plan(recipe)
        return _run(recipe, out, resume=resume, progress=progress)


def _run(recipe: Recipe, out: Path, *, resume: bool, progress: bool) -> RecipeRun:
    data = training_data(recipe.data)
    to_report = report_data(recipe, held_out=data.dev if recipe.data.dev_share > 0 else None)
    trainer = Trainer.create(
        recipe.method, data.train, recipe.train,
        backbone=recipe.backbone, dev=data.dev, out=out, reading=recipe.data, progress=progress,
    )  # fmt: skip
    if recipe.evaluate.posthoc != "none":
        check_posthoc(trainer.model, recipe.evaluate.posthoc)
    if resume:
        trainer.resume()
    barrier(trainer.world)  # every rank has looked at the folder before the first changes it
    if trainer.world.is_main:
        _warn_of_overlap(recipe.data, data, to_report)
        _open_folder(out, recipe, data, to_report)
    run = trainer.run(progress=progress)
    if run.interrupted or not trainer.world.is_main:
        return RecipeRun(run, None)
    run.model.save_pretrained(out / "model")
    with matmul_precision("fp32"):  # figures are compared across runs, however these were trained
        report = _report(_scorer(run.model, data.train, recipe, out=out), to_report, recipe)
    write_outcomes(out / "outcomes.safetensors", report.outcomes)
    write_json(out / "report.json", report.to_json())
    return RecipeRun(run, report)


def _open_folder(out: Path, recipe: Recipe, data: TrainingData, to_report: ReportData) -> None:
    """Report, noise and list of what was left out stand for the config.yaml beside them, so older ones go first."""
    for name in ("report.json", "outcomes.safetensors", POSTHOC_FILE, "noise.safetensors", "skipped.json"):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    if data.noise is not None:
        data.noise.save(out / "noise.safetensors")
    sets = [pairs for pairs in (data.train, data.dev, *to_report.sets) if isinstance(pairs, PhotoSet)]
    skipped = {pairs.split: list(pairs.skipped) for pairs in sets if pairs.skipped}
    if skipped:
        write_json(out / "skipped.json", skipped)


def _scorer(model: MatchingModel, train: PairSet | PhotoSet, recipe: Recipe, *, out: Path) -> PairScorer:
    """What the report is made with; a post-hoc uncertainty that needs a fit is kept in the run folder."""
    kind, plan = recipe.evaluate.posthoc, recipe.train
    if kind == "none":
        return PairScorer(model, device=plan.device)
    if kind == "cosine":
        return CosineDistanceScorer(model, device=plan.device)
    found = PostHocUncertainty.fit(model, train, batch_size=plan.batch_size, seed=plan.seed, device=plan.device)
    found.save(out / POSTHOC_FILE)
    return PostHocScorer(model, found, device=plan.device)


def training_data(config: DataConfig) -> TrainingData:
    """The training split with its noise, and a dev split where there is one."""
    train = read_split(config, config.train)
    dev: PairSet | PhotoSet | None = None
    if config.dev_share > 0:
        train, dev = train.split_images(config.dev_share, seed=config.noise.seed)
    elif config.dev:
        dev = _dev_split(config)
    noise = _noise(train, config)
    return TrainingData(train, dev) if noise is None else TrainingData(apply_noise(train, noise), dev, noise)


def _noise(train: PairSet | PhotoSet, config: DataConfig) -> CaptionNoise | None:
    """What others published, or our own draw; None where the labels stay as they are."""
    plan = config.noise
    if plan.file:
        return load_noise(Path(plan.file).expanduser(), caption_image=train.caption_image)
    if plan.ratio == 0:
        return None
    return make_noise(plan.protocol, train.caption_image, ratio=plan.ratio, seed=plan.seed)


def read_split(config: DataConfig, split: str) -> PairSet | PhotoSet:
    """One split of the data. Under `skip` every photo is decoded once, so that none fails in the middle of training."""
    pairs = load_pairs(config.pairs, split=split, on_error=config.on_error)
    if isinstance(pairs, PairSet) or config.on_error == "fail":
        return pairs
    return without(pairs, check_photos(pairs, workers=config.workers))


def _dev_split(config: DataConfig) -> PairSet | PhotoSet:
    try:
        return read_split(config, config.dev)
    except NoSuchSplit as error:
        raise DataError(f"{error}; to do without it, set data.dev= (none) or data.dev_share=0.1") from error


def report_data(recipe: Recipe, *, held_out: PairSet | PhotoSet | None = None) -> ReportData:
    """Load what a report needs: the recipe's splits that the data has, and as `dev` the images held out, if any."""
    judgments = [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments]
    sets: list[PairSet | PhotoSet] = []
    for split in recipe.evaluate.splits:
        if split == "dev" and held_out is not None:
            sets.append(held_out)
            continue
        try:
            sets.append(read_split(recipe.data, split))
        except NoSuchSplit:
            continue  # what is broken is refused, so that no split goes missing unnoticed
    return ReportData(tuple(sets), tuple(judgments), _fitting(recipe.evaluate.protocols, sets))


def _fitting(protocols: Sequence[str], sets: Sequence[PairSet | PhotoSet]) -> tuple[tuple[str, ...], ...]:
    """Each set's protocols. COCO's are about its test images: other splits do without, but one split has to fit."""
    found: list[tuple[str, ...]] = [()] * len(sets)
    for name in protocols:
        refused: DataError | None = None
        for place, pairs in enumerate(sets):
            try:
                protocol_galleries([name], pairs)
                found[place] += (name,)
            except DataError as error:
                refused = error
        if refused is not None and not any(name in fitting for fitting in found):
            raise refused
    return tuple(found)


def _warn_of_overlap(config: DataConfig, data: TrainingData, to_report: ReportData) -> None:
    """Say which of the splits that choose or judge the model hold images it was trained on, each split once.

    Whoever reports `all` or the training split itself asked for that. Images held out are in neither.
    """
    trained = set(data.train.image_ids)
    judging = {pairs.split: pairs for pairs in to_report.sets if pairs.split not in ("all", config.train)}
    if data.dev is not None and config.dev_share == 0:
        judging[config.dev] = data.dev
    for split, pairs in judging.items():
        seen = len(trained.intersection(pairs.image_ids))
        if seen:
            message = f"{seen:,} of the {len(pairs.image_ids):,} images of {split!r} were trained on"
            other = "data.dev_share=0.1" if split in ("all", config.train) else "data.train=train"
            warnings.warn(f"{message} — its figures flatter; set {other}", stacklevel=2)


def _report(scorer: PairScorer, data: ReportData, recipe: Recipe) -> RetrievalReport:
    results: list[dict[str, Any]] = []
    outcomes: list[Outcomes] = []
    for pairs, protocols in zip(data.sets, data.protocols, strict=True):
        if not protocols:
            continue
        part = evaluate_retrieval(
            scorer, pairs,
            protocols=protocols, judgments=data.judgments, ties=recipe.evaluate.ties, bins=recipe.evaluate.bins,
            truth=scene_truth(recipe.data.pairs, pairs),
        )  # fmt: skip
        results.extend(part.results)
        outcomes.extend(part.outcomes)
    return RetrievalReport(tuple(results), tuple(outcomes))
