"""A recipe from data to report: check, load, add noise, train, save, evaluate. This is what `vacsr train` runs."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vacsr.backbones import scheme_of
from vacsr.config import BackboneConfig, DataConfig, MethodConfig, Recipe, TrainConfig
from vacsr.config.io import dump_yaml, method_config, parse, read_yaml, recipe_from
from vacsr.data import PairSet, PhotoSet, check_captioned, parse_spec
from vacsr.errors import DataError, EnvironmentProblem, NoSuchSplit, UsageError
from vacsr.evaluate.exact import scene_truth
from vacsr.evaluate.judgments import Judgments, read_judgments
from vacsr.evaluate.outcomes import Outcomes, write_outcomes
from vacsr.evaluate.protocols import check_protocols, protocol_galleries
from vacsr.evaluate.retrieval import RetrievalReport, evaluate_retrieval
from vacsr.files import lock_file, make_folder, write_json, write_text
from vacsr.methods import build_method
from vacsr.methods.base import Method
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, choose_device
from vacsr.scoring.posthoc import (
    POSTHOC_FILE,
    CosineDistanceScorer,
    PostHoc,
    PostHocScorer,
    PostHocUncertainty,
    check_posthoc_plan,
)
from vacsr.strips import strip_rows
from vacsr.train.callbacks import Callback, check_trackers
from vacsr.train.checkpoint import check_same_training, has_checkpoint
from vacsr.train.data import TrainingData, read_split, training_data
from vacsr.train.distributed import barrier, is_first_rank, leaving_world
from vacsr.train.retrieval import is_graphed, retrieval_task
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Run, Trainer

LOCK = ".lock"
_LOCKED: ContextVar[frozenset[Path]] = ContextVar("run folders locked by this context", default=frozenset())
_FEATURES = ("features", "synthetic")  # schemes of cached features; the others are photos
_NOT_COCO = ("flickr8k", "scenes", "synthetic")  # other schemes may hold COCO's images


class RecipeRun(NamedTuple):
    """A run and its report; the report is None where the run was interrupted, and on ranks after the first."""

    run: Run
    report: RetrievalReport | None


class ReportData(NamedTuple):
    """What the report is made from."""

    sets: tuple[PairSet | PhotoSet, ...]
    judgments: tuple[Judgments, ...]
    protocols: tuple[tuple[str, ...], ...]
    """For each set, the recipe's protocols that fit it."""


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> RecipeRun:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and, last of all, report.json.

    Just before the report, outcomes.safetensors gets the rank of each query, for paired tests.

    What can be refused is refused before the first file is written, except for photos of the report's splits, which
    are decoded when they are scored: `--resume` then reports without training again. The first of several ranks
    writes. A process group that the run joined is left again. A folder that another process fills is refused.
    """
    with run_lock(out), leaving_world():
        check_folder(out, resume=resume)
        if resume:
            check_same_training(recipe, out, read=recipe_from, command="vacsr train")
        check_recipe(recipe)
        check_trackers(recipe.train.trackers)
        data = training_data(recipe.data)
        to_report = report_data(recipe, held_out=data.dev if recipe.data.dev_share > 0 else None)
        task = retrieval_task(
            recipe.method, data.train, recipe.train,
            backbone=recipe.backbone, dev=data.dev, reading=recipe.data, progress=progress,
        )  # fmt: skip
        trainer = Trainer(task, recipe.train, out)
        if resume:
            trainer.resume()
        barrier(task.world)  # every rank has looked at the folder before the first changes it
        if task.world.is_main:
            _warn_of_overlap(recipe.data, data, to_report)
            _open_folder(out, recipe, data, to_report)
        run = trainer.run(progress=progress)
        if run.interrupted or not task.world.is_main:
            return RecipeRun(run, None)
        task.model.save_pretrained(out / "model")
        with matmul_precision("fp32"):  # metrics are compared across runs, however these were trained
            report = _report(task.model, data.train, to_report, recipe, out=out)
        write_outcomes(out / "outcomes.safetensors", report.outcomes)
        write_json(out / "report.json", report.to_json())
        return RecipeRun(run, report)


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
    folder = None if out is None else Path(out)
    if folder is not None and not resume and holds_run(folder):
        raise UsageError(f"{out} already holds a run — continue it with resume=True, or choose another out")
    config = config or TrainConfig()
    chosen = method if isinstance(method, nn.Module) else method_config(method)
    with nullcontext() if folder is None else run_lock(folder):
        if folder is not None:
            check_trackers(config.trackers)
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
    scheme = scheme_of(recipe.backbone.spec)
    scheme.check(recipe.backbone)
    if scheme.cached or not timed:
        _check_data(recipe, features=scheme.cached)
    if not timed:
        check_protocols(recipe.evaluate.protocols)
        coco = [name for name in recipe.evaluate.protocols if name != "flickr"]
        if coco and parse_spec(recipe.data.pairs).scheme in _NOT_COCO:
            message = f"protocol '{coco[0]}' is about COCO's test images, {recipe.data.pairs} has others"
            raise UsageError(f"{message} — set evaluate.protocols=[flickr]")
    with torch.random.fork_rng(devices=[]):  # cheap beside towers, which are only looked at
        method = build_method(recipe.method, dim=recipe.backbone.head.dim)
    strip_rows(method, recipe.train.tile, rows=recipe.train.batch_size, columns=recipe.train.batch_size)
    spec = parse_spec(recipe.data.pairs)
    if scheme.cached and spec.scheme == "features" and "captions" not in spec.options:
        method.fit(None, torch.zeros(1, dtype=torch.int64))  # refuses data without words, where it needs them
    if not timed and recipe.evaluate.posthoc != "none":
        check_posthoc_plan(method, recipe.backbone, kind=recipe.evaluate.posthoc)


def _check_data(recipe: Recipe, *, features: bool) -> None:
    """Photos for towers, cached features without them."""
    spec, backbone = recipe.data.pairs, recipe.backbone.spec
    check_captioned(spec)
    cached = parse_spec(spec).scheme in _FEATURES
    if cached and not features:
        message = f"backbone '{backbone}' reads photos, {spec} are cached features"
        raise UsageError(f"{message} — set backbone.spec=features:, or give photos such as data.pairs=folder:DIR")
    if features and not cached:
        message = f"backbone 'features:' takes cached embeddings, {spec} are photos"
        raise UsageError(f"{message} — set backbone.spec to clip:…, towers:… or tiny:, or embed them: vacsr embed")


def holds_run(out: Path) -> bool:
    """Is there work to lose, a checkpoint or a report?"""
    return has_checkpoint(out / "checkpoint") or (out / "report.json").is_file()


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work and without making it."""
    parent = out.absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{out} cannot be a folder: {parent} is a file — choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"no permission to write to {parent} — choose another --out, or change it")


def check_folder(out: Path, *, resume: bool) -> None:
    """A folder that already holds a run is touched only with ``resume``."""
    check_writable(out)
    if not resume and holds_run(out):
        raise UsageError(f"{out} already holds a run — continue it with --resume, or choose another --out")


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Lock a run folder against other processes: two runs in one folder would mix their logs and checkpoints.

    The lock is re-entrant, and the first of several ranks holds it for all. The folder is made if it is not there,
    and removed if it is still empty at the end. Reading a run needs no lock.
    """
    check_writable(out)
    folder = out.resolve()
    if folder in _LOCKED.get() or not is_first_rank():
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    wait = "wait until it is done or stop it, then run the same again, or choose another --out"
    elsewhere = "choose another --out, or change its permissions"
    try:
        with lock_file(folder / LOCK, wait=wait, elsewhere=elsewhere, remove=True):
            token = _LOCKED.set(_LOCKED.get() | {folder})
            try:
                yield
            finally:
                _LOCKED.reset(token)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def clear_folder(out: Path) -> None:
    """Remove everything that a run left, except for the lock, which the caller holds."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _open_folder(out: Path, recipe: Recipe, data: TrainingData, to_report: ReportData) -> None:
    """Write config.yaml and what belongs to it; the report of an earlier run is removed first."""
    for name in ("report.json", "outcomes.safetensors", POSTHOC_FILE, "noise.safetensors", "skipped.json"):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    if data.noise is not None:
        data.noise.save(out / "noise.safetensors")
    sets = [pairs for pairs in (data.train, data.dev, *to_report.sets) if isinstance(pairs, PhotoSet)]
    skipped = {pairs.split: list(pairs.skipped) for pairs in sets if pairs.skipped}
    if skipped:
        write_json(out / "skipped.json", skipped)


def report_data(recipe: Recipe, *, held_out: PairSet | PhotoSet | None = None) -> ReportData:
    """Load what a report needs: those of the recipe's splits that the data have; ``held_out`` stands for `dev`."""
    judgments = [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments]
    sets: list[PairSet | PhotoSet] = []
    for split in recipe.evaluate.splits:
        if split == "dev" and held_out is not None:
            sets.append(held_out)
            continue
        with suppress(NoSuchSplit):  # a split that is there but broken is refused
            sets.append(read_split(recipe.data, split))
    # COCO's protocols are about its test images: other splits skip them, but one split has to fit.
    fitting: list[tuple[str, ...]] = [()] * len(sets)
    for name in recipe.evaluate.protocols:
        refused: DataError | None = None
        for index, pairs in enumerate(sets):
            try:
                protocol_galleries([name], pairs)
                fitting[index] += (name,)
            except DataError as error:
                refused = error
        if refused is not None and not any(name in names for names in fitting):
            raise refused
    return ReportData(tuple(sets), tuple(judgments), tuple(fitting))


def _warn_of_overlap(config: DataConfig, data: TrainingData, to_report: ReportData) -> None:
    """Warn of splits that choose or judge the model and hold images it was trained on, once per split.

    To report `all` or the training split itself is a choice. Images held out are in neither.
    """
    trained = set(data.train.image_ids)
    judging = {pairs.split: pairs for pairs in to_report.sets if pairs.split not in ("all", config.train)}
    if data.dev is not None and config.dev_share == 0:
        judging[config.dev] = data.dev
    for split, pairs in judging.items():
        seen = len(trained.intersection(pairs.image_ids))
        if seen:
            message = f"the model is trained on {seen:,} of the {len(pairs.image_ids):,} images of {split!r}"
            other = "data.dev_share=0.1" if split in ("all", config.train) else "data.train=train"
            warnings.warn(f"{message}, so its scores are optimistic — set {other}", stacklevel=2)


def run_posthoc(run: Path, model: MatchingModel, *, kind: PostHoc, device: str = "auto") -> PairScorer:
    """A scorer with the run's post-hoc uncertainty, fitted to its training data if it has none yet."""
    if kind == "cosine":
        return CosineDistanceScorer(model, device=device)
    if (run / POSTHOC_FILE).is_file():
        return PostHocScorer(model, PostHocUncertainty.load(run / POSTHOC_FILE), device=device)
    if not (run / "config.yaml").is_file():
        message = f"{run} is a model folder, so it does not say on which data post-hoc uncertainty is to be fitted"
        raise UsageError(f"{message} — give the run folder")
    raw = read_yaml(run / "config.yaml")
    data, train = parse(DataConfig, raw.get("data") or {}), raw.get("train") or {}
    size, seed = (train.get(name, TrainConfig.model_fields[name].default) for name in ("batch_size", "seed"))
    fitted = PostHocUncertainty.fit(model, training_data(data).train, batch_size=size, seed=seed, device=device)
    return PostHocScorer(model, fitted, device=device)


def _report(
    model: MatchingModel, train: PairSet | PhotoSet, data: ReportData, recipe: Recipe, *, out: Path
) -> RetrievalReport:
    """Evaluate the splits; post-hoc uncertainty is fitted to ``train`` and saved first."""
    config, posthoc = recipe.train, recipe.evaluate.posthoc
    if posthoc == "laplace":
        fitted = PostHocUncertainty.fit(
            model, train, batch_size=config.batch_size, seed=config.seed, device=config.device
        )
        fitted.save(out / POSTHOC_FILE)
    if posthoc == "none":
        scorer = PairScorer(model, device=config.device)
    else:
        scorer = run_posthoc(out, model, kind=posthoc, device=config.device)
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
