"""A recipe from data to report, which is what `vacsr train` runs, and the evaluation of a finished run."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vacsr.backbones import load_backbone, scheme_of
from vacsr.card import Made
from vacsr.config import BackboneConfig, DataConfig, EvaluateConfig, MethodConfig, Recipe, TrainConfig
from vacsr.config.io import dump_yaml, method_config, parse
from vacsr.data import PairSet, PhotoSet, check_captioned, parse_spec, read_named, read_split, read_split_or_all
from vacsr.errors import NoSuchSplit, UsageError
from vacsr.evaluate.protocols import check_protocols, fitting_protocols, protocol_galleries
from vacsr.evaluate.report import ReportSets, RetrievalReport, config_judgments, config_tests, evaluate_splits
from vacsr.evaluate.significance import write_outcomes
from vacsr.files import read_json, write_json, write_text
from vacsr.methods.base import Method, build_method
from vacsr.model import MatchingModel, choose_device
from vacsr.scoring import CosineDistanceScorer, PairScorer, check_cosine, open_model
from vacsr.train.callbacks import Callback
from vacsr.train.checkpoint import check_checkpoint, check_folder, describe_recipe, run_lock, run_pairs, run_section
from vacsr.train.data import TrainingData, training_data
from vacsr.train.distributed import barrier
from vacsr.train.retrieval import RetrievalTask, is_graphed
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Run, Trainer

_FEATURES = ("features", "synthetic")  # schemes of cached features; the others are photos
_NOT_COCO = ("flickr8k", "scenes", "synthetic")  # other schemes may hold COCO's images


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Fill the run folder ``out``: config.yaml, metrics.jsonl, checkpoint/, model/ and, last of all, report.json.

    Just before the report, outcomes.safetensors gets the rank of each query, for paired tests. The run's ``report`` is
    None where the run was interrupted, and on ranks after the first, which writes all files.

    Errors are raised before the first file is written, except for photos of the report's splits, which are decoded
    when they are scored: `--resume` then reports without training again.
    """
    with run_lock(out):
        check_folder(out, resume=resume)
        described = describe_recipe(method=recipe.method, backbone=recipe.backbone, train=recipe.train)
        check_checkpoint(out / "checkpoint", described)
        check_recipe(recipe)
        data = training_data(recipe.data)
        sets = report_sets(recipe, held_out=data.dev if recipe.data.dev_share > 0 else None)
        task = RetrievalTask(
            recipe.method, data.train, recipe.train,
            backbone=recipe.backbone, dev=data.dev, reading=recipe.data, progress=progress,
        )  # fmt: skip
        trainer = Trainer(task, recipe.train, out)
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
            scorer = _scorer(task.model, recipe.evaluate, device=recipe.train.device)
            report = evaluate_splits(scorer, sets, recipe.evaluate, spec=recipe.data.pairs, dev=recipe.data.dev)
        report = replace(report, model=task.model.identity())
        task.model.made = Made(_differences(recipe), report.to_markdown(details=False))
        write_text(out / "model" / "README.md", task.model.card())
        write_outcomes(out / "outcomes.safetensors", report.outcomes)
        write_json(out / "report.json", report.to_dict())
        report.warn_of_sigma()
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
    go; ``resume`` continues from it, otherwise a folder that already holds a run is refused.
    """
    folder, config = None if out is None else Path(out), config or TrainConfig()
    chosen = method if isinstance(method, nn.Module) else method_config(method)
    with nullcontext() if folder is None else run_lock(folder):
        if folder is not None:
            check_folder(folder, resume=resume)
        task = RetrievalTask(
            chosen, pairs, config, backbone=backbone or BackboneConfig(), dev=dev, reading=data, progress=progress
        )
        trainer = Trainer(task, config, folder, list(callbacks))
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
    method.strip_rows(recipe.train.tile, rows=recipe.train.batch_size, columns=recipe.train.batch_size)
    if scheme.cached and spec.scheme == "features" and "captions" not in spec.options:
        method.fit(None, torch.zeros(1, dtype=torch.int64))  # refuses data without words, where it needs them
    if timed:
        return
    check_protocols(recipe.evaluate.protocols)
    coco = [name for name in recipe.evaluate.protocols if name != "flickr"]
    if coco and spec.scheme in _NOT_COCO:
        message = f"protocol '{coco[0]}' is about COCO's test images, {recipe.data.pairs} has others"
        raise UsageError(f"{message} — set evaluate.protocols=[flickr]")
    if recipe.evaluate.posthoc != "none":
        check_cosine(method, dim=recipe.backbone.head.dim)


def report_sets(recipe: Recipe, *, held_out: PairSet | PhotoSet | None = None) -> ReportSets:
    """Load those of the recipe's splits that the data have; ``held_out`` stands for `dev`.

    COCO's protocols are about its test images: other splits skip them, but one split has to fit.
    """
    config_judgments(recipe.evaluate), config_tests(recipe.evaluate)  # refuse files that cannot be read
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


def _differences(recipe: Recipe) -> dict[str, Any]:
    """What a recipe sets to other values than the defaults, as it would be written by hand."""
    method = {"name": recipe.method.name, **recipe.method.model_dump(mode="json", exclude_defaults=True)}
    return {**recipe.model_dump(mode="json", exclude_defaults=True), "method": method}


def _open_folder(out: Path, recipe: Recipe, data: TrainingData, sets: ReportSets) -> None:
    """Write config.yaml and what belongs to it; the report of an earlier run is removed first."""
    for name in ("report.json", "outcomes.safetensors", "noise.safetensors", "skipped.json"):
        (out / name).unlink(missing_ok=True)
    write_text(out / "config.yaml", dump_yaml(recipe))
    if data.noise is not None:
        data.noise.save(out / "noise.safetensors")
    splits = (data.train, data.dev, *(pairs for pairs, _ in sets))
    skipped = {pairs.split: list(pairs.skipped) for pairs in splits if isinstance(pairs, PhotoSet) and pairs.skipped}
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


def evaluate_run(
    run: Path, *, pairs: str | None, split: str | None, settings: Mapping[str, Any], device: str
) -> RetrievalReport:
    """Evaluate a run or model folder on a split: the one that is named, else `test`, else everything.

    On its own data, a run is evaluated by its own settings: `settings` (fields of :class:`EvaluateConfig`) replace
    some of them; protocols of the run that do not fit the split are left out; photos are read as in training. On other
    ``pairs`` the defaults hold instead.
    """
    saved = {} if pairs else run_section(run, "evaluate")
    known = {name: value for name, value in saved.items() if name in EvaluateConfig.model_fields and name != "splits"}
    config = parse(EvaluateConfig, {**known, **settings})
    scorer = _scorer(open_model(run), config, device=device)
    if pairs is None:
        policy = {key: value for key, value in run_section(run, "data").items() if key in ("on_error", "workers")}
        data = read_split_or_all(parse(DataConfig, {**policy, "pairs": run_pairs(run)}), split, default="test")
    else:
        data = read_named(pairs, split, default="test")
    protocols = config.protocols if "protocols" in settings else fitting_protocols(config.protocols, data)
    earlier = read_json(run / "report.json") if (run / "report.json").is_file() else {}
    fitted = RetrievalReport(tuple(earlier.get("results", ()))).temperature  # to the dev split, if it was
    spec = pairs or run_pairs(run)
    report = evaluate_splits(scorer, [(data, tuple(protocols))], config, spec=spec, temperature=fitted)
    return replace(report, model=scorer.model.identity())


def _scorer(model: MatchingModel, config: EvaluateConfig, *, device: str) -> PairScorer:
    """Of a model that fits the captions that the config adds to the data."""
    captions = config_tests(config).captions
    if captions is not None:
        model.provenance.check(captions.provenance)
    return (CosineDistanceScorer if config.posthoc == "cosine" else PairScorer)(model, device=device)
