"""A recipe from data to report: check, load, add noise, train, save, evaluate. This is what `vacsr train` runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vacsr.backbones import load_backbone, scheme_of
from vacsr.config import BackboneConfig, DataConfig, MethodConfig, Recipe, TrainConfig
from vacsr.config.io import dump_yaml, method_config
from vacsr.data import PairSet, PhotoSet, check_captioned, parse_spec
from vacsr.errors import NoSuchSplit, UsageError
from vacsr.evaluate.protocols import check_protocols, fitting_protocols, protocol_galleries
from vacsr.evaluate.report import RetrievalReport, config_judgments
from vacsr.evaluate.significance import write_outcomes
from vacsr.files import write_json, write_text
from vacsr.methods import build_method
from vacsr.methods.base import Method
from vacsr.model import MatchingModel
from vacsr.scoring import choose_device
from vacsr.scoring.posthoc import POSTHOC_FILE, PostHocUncertainty, check_posthoc
from vacsr.strips import strip_rows
from vacsr.train.callbacks import Callback
from vacsr.train.checkpoint import check_checkpoint, describe_recipe
from vacsr.train.data import TrainingData, read_split, training_data
from vacsr.train.distributed import barrier
from vacsr.train.retrieval import is_graphed, retrieval_task
from vacsr.train.runs import check_folder, evaluate_pairs, run_lock, run_scorer
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Run, Trainer

_FEATURES = ("features", "synthetic")  # schemes of cached features; the others are photos
_NOT_COCO = ("flickr8k", "scenes", "synthetic")  # other schemes may hold COCO's images

ReportSets = list[tuple[PairSet | PhotoSet, tuple[str, ...]]]
"""The splits of a report, each with those of the recipe's protocols that fit it."""


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and, last of all, report.json.

    Just before the report, outcomes.safetensors gets the rank of each query, for paired tests. The run's ``report`` is
    None where the run was interrupted, and on ranks after the first, which writes all files.

    What can be refused is refused before the first file is written, except for photos of the report's splits, which
    are decoded when they are scored: `--resume` then reports without training again. A folder that another process
    fills is refused.
    """
    with run_lock(out):
        check_folder(out, resume=resume)
        check_checkpoint(
            out / "checkpoint", describe_recipe(method=recipe.method, backbone=recipe.backbone, train=recipe.train)
        )
        check_recipe(recipe)
        data = training_data(recipe.data)
        sets = report_sets(recipe, held_out=data.dev if recipe.data.dev_share > 0 else None)
        task = retrieval_task(
            recipe.method, data.train, recipe.train,
            backbone=recipe.backbone, dev=data.dev, reading=recipe.data, progress=progress,
        )  # fmt: skip
        trainer = Trainer(task, recipe.train, out)
        if resume:
            trainer.resume()
        barrier(task.world)  # every rank has looked at the folder before the first changes it
        if task.world.is_main:
            _warn_of_overlap(recipe.data, data, sets)
            _open_folder(out, recipe, data, sets)
        run = trainer.run(progress=progress)
        if run.interrupted or not task.world.is_main:
            return run
        task.model.save_pretrained(out / "model")
        with matmul_precision("fp32"):  # metrics are compared across runs, however these were trained
            report = _report(task.model, data.train, sets, recipe, out=out)
        write_outcomes(out / "outcomes.safetensors", report.outcomes)
        write_json(out / "report.json", report.to_dict())
        return replace(run, report=report)


def fit(
    method: str | Mapping[str, Any] | MethodConfig | Method,
    pairs: PairSet | PhotoSet,
    config: TrainConfig | None = None,
    *,
    dev: PairSet | PhotoSet | None = None,
    backbone: BackboneConfig | None = None,
    data: DataConfig | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train ``method`` (a name such as "vacsr" or "vacsr-paper", a config, or a Method object) on ``pairs``.

    ``dev`` chooses the best weights by RSUM; ``data`` says how photos are read; ``out`` is where log and checkpoint
    go; ``resume`` continues from it. Without ``resume``, a folder that already holds a run is refused; a folder that
    another process fills is always refused. ``callbacks`` are called around steps and epochs.
    """
    folder, config = None if out is None else Path(out), config or TrainConfig()
    chosen = method if isinstance(method, nn.Module) else method_config(method)
    with nullcontext() if folder is None else run_lock(folder):
        if folder is not None:
            check_folder(folder, resume=resume)
        task = retrieval_task(
            chosen, pairs, config, backbone=backbone or BackboneConfig(), dev=dev, reading=data, progress=progress
        )
        trainer = Trainer(task, config, folder, list(callbacks))
        if resume:
            trainer.resume()
        return trainer.run(progress=progress)


def check_recipe(recipe: Recipe, *, timed: bool = False) -> None:
    """Refuse a recipe that can never finish, by building what can be built without reading data or weights.

    ``timed``: only its steps are measured. Nothing is reported then, and towers read photos made for the purpose.
    """
    is_graphed(recipe.train, choose_device(recipe.train.device))
    scheme, spec = scheme_of(recipe.backbone.spec), parse_spec(recipe.data.pairs)
    if not scheme.pretrained:  # reads no files, so all of it can be built, without memory
        with torch.device("meta"):
            load_backbone(recipe.backbone)
    if scheme.cached or not timed:
        check_captioned(recipe.data.pairs)
        if scheme.cached != (spec.scheme in _FEATURES):
            reads, are = ("cached features", "photos") if scheme.cached else ("photos", "cached features")
            message = f"backbone '{recipe.backbone.spec}' reads {reads}, {recipe.data.pairs} are {are}"
            raise UsageError(
                f"{message} — set backbone.spec=features: for features, which vacsr embed makes of photos; for photos "
                "clip:…, towers:… or tiny:"
            )
    with torch.random.fork_rng(devices=[]):  # cheap beside towers, which are only looked at
        method = build_method(recipe.method, dim=recipe.backbone.head.dim)
    strip_rows(method, recipe.train.tile, rows=recipe.train.batch_size, columns=recipe.train.batch_size)
    if scheme.cached and spec.scheme == "features" and "captions" not in spec.options:
        method.fit(None, torch.zeros(1, dtype=torch.int64))  # refuses data without words, where it needs them
    if not timed:
        _check_report(recipe, method, scheme=spec.scheme)


def _check_report(recipe: Recipe, method: Method, *, scheme: str) -> None:
    """Refuse a report that can never be made, before training."""
    check_protocols(recipe.evaluate.protocols)
    coco = [name for name in recipe.evaluate.protocols if name != "flickr"]
    if coco and scheme in _NOT_COCO:
        message = f"protocol '{coco[0]}' is about COCO's test images, {recipe.data.pairs} has others"
        raise UsageError(f"{message} — set evaluate.protocols=[flickr]")
    if recipe.evaluate.posthoc != "none":
        check_posthoc(method, recipe.backbone, kind=recipe.evaluate.posthoc)


def report_sets(recipe: Recipe, *, held_out: PairSet | PhotoSet | None = None) -> ReportSets:
    """Load those of the recipe's splits that the data have; ``held_out`` stands for `dev`.

    COCO's protocols are about its test images: other splits skip them, but one split has to fit.
    """
    config_judgments(recipe.evaluate)  # refuses files that cannot be read
    sets: list[PairSet | PhotoSet] = []
    for split in recipe.evaluate.splits:
        if split == "dev" and held_out is not None:
            sets.append(held_out)
            continue
        with suppress(NoSuchSplit):  # a split that is there but broken is refused
            sets.append(read_split(recipe.data, split))
    names = recipe.evaluate.protocols
    fitting = [tuple(name for name in names if name in fitting_protocols([name], pairs)) for pairs in sets]
    unfit = [name for name in names if sets and not any(name in fits for fits in fitting)]
    if unfit:
        protocol_galleries(unfit, sets[-1])  # raises what is wrong with the data
    return list(zip(sets, fitting, strict=True))


def _open_folder(out: Path, recipe: Recipe, data: TrainingData, sets: ReportSets) -> None:
    """Write config.yaml and what belongs to it; the report of an earlier run is removed first."""
    for name in ("report.json", "outcomes.safetensors", POSTHOC_FILE, "noise.safetensors", "skipped.json"):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    if data.noise is not None:
        data.noise.save(out / "noise.safetensors")
    photos = [pairs for pairs in (data.train, data.dev, *(pairs for pairs, _ in sets)) if isinstance(pairs, PhotoSet)]
    skipped = {pairs.split: list(pairs.skipped) for pairs in photos if pairs.skipped}
    if skipped:
        write_json(out / "skipped.json", skipped)


def _warn_of_overlap(config: DataConfig, data: TrainingData, sets: ReportSets) -> None:
    """Warn of splits that choose or judge the model and hold images it was trained on, once per split.

    To report `all` or the training split itself is a choice. Images held out are in neither.
    """
    trained = set(data.train.image_ids)
    judging = {pairs.split: pairs for pairs, _ in sets if pairs.split not in ("all", config.train)}
    if data.dev is not None and config.dev_share == 0:
        judging[config.dev] = data.dev
    for split, pairs in judging.items():
        seen = len(trained.intersection(pairs.image_ids))
        if seen:
            message = f"the model is trained on {seen:,} of the {len(pairs.image_ids):,} images of {split!r}"
            other = "data.dev_share=0.1" if split in ("all", config.train) else "data.train=train"
            warnings.warn(f"{message}, so its scores are optimistic — set {other}", stacklevel=2)


def _report(
    model: MatchingModel, train: PairSet | PhotoSet, sets: ReportSets, recipe: Recipe, *, out: Path
) -> RetrievalReport:
    """Evaluate the splits; post-hoc uncertainty is fitted to ``train`` and saved first."""
    config, posthoc = recipe.train, recipe.evaluate.posthoc
    if posthoc == "laplace":
        size, seed, device = config.batch_size, config.seed, config.device
        PostHocUncertainty.fit(model, train, batch_size=size, seed=seed, device=device).save(out / POSTHOC_FILE)
    scorer = run_scorer(out, model, posthoc=posthoc, device=config.device)
    parts = [
        evaluate_pairs(scorer, pairs, recipe.evaluate, protocols=protocols, spec=recipe.data.pairs)
        for pairs, protocols in sets
        if protocols
    ]
    results, outcomes = ([one for part in parts for one in getattr(part, name)] for name in ("results", "outcomes"))
    return RetrievalReport(tuple(results), tuple(outcomes))
