"""Run folders: who may fill one, what one says of its data and settings, and its evaluation by them."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vacsr.choices import PostHocOrNone
from vacsr.config import DataConfig, EvaluateConfig, TrainConfig
from vacsr.config.io import parse, read_yaml
from vacsr.data import PairSet, PhotoSet, load_pairs, parse_spec
from vacsr.data.formats import OnError
from vacsr.errors import EnvironmentProblem, UsageError, VacsrError
from vacsr.evaluate.protocols import fitting_protocols
from vacsr.evaluate.report import RetrievalReport, config_judgments, evaluate_retrieval
from vacsr.evaluate.truth import scene_truth
from vacsr.files import lock_file, make_folder
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.posthoc import POSTHOC_FILE, CosineDistanceScorer, PostHocScorer, PostHocUncertainty
from vacsr.train.checkpoint import has_checkpoint
from vacsr.train.data import read_split_or_all, training_data
from vacsr.train.distributed import is_first_rank

LOCK = ".lock"
_LOCKED: ContextVar[frozenset[Path]] = ContextVar("run folders locked by this context", default=frozenset())


def holds_run(out: Path) -> bool:
    """Is there work to lose, a checkpoint or a report?"""
    return has_checkpoint(out / "checkpoint") or (out / "report.json").is_file()


def check_folder(out: Path, *, resume: bool) -> None:
    """A folder that already holds a run is touched only with ``resume``."""
    if not resume and holds_run(out):
        raise UsageError(
            f"{out} already holds a run — continue it with --resume (resume=True), or choose another --out"
        )


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work and without making it."""
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise UsageError(f"{out} cannot be a folder: {parent} is a file — choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"no permission to write to {parent} — choose another --out, or change it")


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


def run_section(run: Path, name: str) -> dict[str, Any]:
    """A section of config.yaml, not validated: an older run may have other fields. Empty if it is missing."""
    config = run / "config.yaml"
    section = read_yaml(config).get(name) if config.is_file() else None
    return section if isinstance(section, dict) else {}


def run_pairs(run: Path) -> str:
    """The SPEC of the data that a run was trained on."""
    data = run_section(run, "data")
    if "pairs" not in data:
        raise UsageError(f"{run} is a model folder, which does not name its data — add --pairs SPEC")
    return str(data["pairs"])


def training_pairs(run: Path) -> PairSet | PhotoSet | None:
    """The whole training split, with any share that was held out; None if it is unknown or cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing photos; only names are compared
            split = str(run_section(run, "data").get("train", "train"))
            return load_pairs(run_pairs(run), split=split, on_error="skip")
    except VacsrError:
        return None


def run_files(run: Path) -> list[Path]:
    """The files that commands read of a run or model folder and of its data; not what else is in the folder."""
    data, judged = run_section(run, "data"), run_section(run, "evaluate").get("judgments") or ()
    model = run / "model" if (run / "model").is_dir() else run
    files = [model / name for name in ("config.json", "model.safetensors", "search.json", "backbone")]
    files += [run / name for name in ("config.yaml", POSTHOC_FILE)]
    return [*files, *(Path(str(path)).expanduser() for path in judged), *spec_files(data.get("pairs"))]


def spec_files(spec: str | None) -> list[Path]:
    """The files that a SPEC names; a folder's are unknown."""
    if spec is None:
        return []
    parsed = parse_spec(str(spec))
    paths = [Path(text).expanduser() for text in (parsed.path, *parsed.options.values()) if text]
    return [path for path in paths if path.is_file()]


def evaluate_run(
    run: Path,
    *,
    pairs: str | None = None,
    split: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    device: str = "auto",
) -> RetrievalReport:
    """Evaluate a run or model folder on a split: the one that is named, else `test`, else everything.

    On its own data, a run is evaluated by its own settings: `settings` (fields of :class:`EvaluateConfig`) replace
    some of them; protocols of the run that do not fit the split are left out; photos are read as in training. On other
    ``pairs`` the defaults hold instead.
    """
    own = {} if pairs else run_section(run, "evaluate")
    known = {name: value for name, value in own.items() if name in EvaluateConfig.model_fields and name != "splits"}
    config = parse(EvaluateConfig, {**known, **settings})
    scorer = PairScorer.from_pretrained(run, device=device)
    if config.posthoc != "none":
        scorer = run_scorer(run, scorer.model, posthoc=config.posthoc, device=device)
    data = _read_pairs(run, pairs, split=split)
    protocols = config.protocols if "protocols" in settings else fitting_protocols(config.protocols, data)
    return evaluate_pairs(scorer, data, config, protocols=protocols, spec=pairs or run_pairs(run))


def read_named(pairs: str, split: str | None, *, default: str, on_error: OnError = "fail") -> PairSet | PhotoSet:
    """Data that a user names: the split asked for, else the SPEC's own, else ``default``, else everything."""
    chosen = split or parse_spec(pairs).options.get("split")
    return read_split_or_all(parse(DataConfig, {"pairs": pairs, "on_error": on_error}), chosen, default=default)


def _read_pairs(run: Path, pairs: str | None, *, split: str | None) -> PairSet | PhotoSet:
    """The run's own data are read with the run's skip policy."""
    if pairs is not None:
        return read_named(pairs, split, default="test")
    policy = {key: value for key, value in run_section(run, "data").items() if key in ("on_error", "workers")}
    return read_split_or_all(parse(DataConfig, {**policy, "pairs": run_pairs(run)}), split, default="test")


def evaluate_pairs(
    scorer: PairScorer, pairs: PairSet | PhotoSet, config: EvaluateConfig, *, protocols: Sequence[str], spec: str
) -> RetrievalReport:
    """Score a split and report the protocols, as ``config`` says; ``spec`` is that of the data."""
    return evaluate_retrieval(
        scorer, pairs,
        protocols=protocols, judgments=config_judgments(config), ties=config.ties, bins=config.bins,
        truth=scene_truth(spec, pairs),
    )  # fmt: skip


def run_scorer(run: Path, model: MatchingModel, *, posthoc: PostHocOrNone, device: str = "auto") -> PairScorer:
    """A scorer with the run's post-hoc uncertainty, fitted to its training data if the run has not saved it."""
    if posthoc == "none":
        return PairScorer(model, device=device)
    if posthoc == "cosine":
        return CosineDistanceScorer(model, device=device)
    if (run / POSTHOC_FILE).is_file():
        return PostHocScorer(model, PostHocUncertainty.load(run / POSTHOC_FILE), device=device)
    if not (run / "config.yaml").is_file():
        message = f"{run} is a model folder, so it does not say on which data post-hoc uncertainty is to be fitted"
        raise UsageError(f"{message} — give the run folder")
    train, data = run_section(run, "train"), parse(DataConfig, run_section(run, "data"))
    size, seed = (train.get(name, TrainConfig.model_fields[name].default) for name in ("batch_size", "seed"))
    fitted = PostHocUncertainty.fit(model, training_data(data).train, batch_size=size, seed=seed, device=device)
    return PostHocScorer(model, fitted, device=device)
