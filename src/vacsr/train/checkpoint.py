"""A run on disk: the lock on its folder, and its whole state in one file with a description that tells runs apart.

One safetensors file and one rename: after a kill at any moment there is either the old state or the new one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import Config
from vacsr.config.io import read_yaml
from vacsr.data.formats import spec_files
from vacsr.errors import DataError, OtherRun, UsageError
from vacsr.evaluate.pair_files import named_file
from vacsr.files import lock_file, make_folder, read_tensors, write_tensors
from vacsr.train.distributed import is_first_rank

FILE = "state.safetensors"
LOCK = ".lock"
NO_EFFECT = frozenset(
    {"device", "log_every", "checkpoint_every", "checkpoint_epochs", "trackers", "workers", "cache_gb"}
)
"""Training fields that may change when a run is resumed: the result is the same."""
_LOCKED: ContextVar[frozenset[Path]] = ContextVar("run folders locked by this context", default=frozenset())


@dataclass
class TrainState:
    """How far a run has come."""

    step: int = 0  # batches done
    best: float | None = None  # dev metric so far
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    stopped: bool = False  # ended early, by Ctrl-C


def save_checkpoint(
    folder: Path, groups: Mapping[str, Mapping[str, Tensor]], optimizer: Optimizer,
    *, state: TrainState, description: Mapping[str, Any], device: torch.device,
) -> None:  # fmt: skip
    """Write ``folder/state.safetensors`` atomically: named groups of tensors, the optimiser and torch's generators."""
    for torn in folder.glob(f".{FILE}.*.tmp"):  # what a kill left behind
        torn.unlink(missing_ok=True)
    moments = {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None  # SGD's momentum before its first step
    }
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":  # asking CUDA takes memory on the GPU
        generators["cuda"] = torch.cuda.get_rng_state(device)
    groups = {**groups, "best": state.best_weights, "optimizer": moments, "rng": generators}
    tensors = {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    progress = {"step": state.step, "best": state.best, "best_step": state.best_step}
    metadata = {"state": json.dumps(progress), "description": json.dumps(description)}
    write_tensors(folder / FILE, tensors, metadata=metadata)


def has_checkpoint(folder: Path) -> bool:
    return (folder / FILE).is_file()


def load_checkpoint(
    folder: Path, optimizer: Optimizer, *, description: Mapping[str, Any], device: torch.device
) -> tuple[TrainState, dict[str, dict[str, Tensor]]]:
    """The run's state and the other groups of tensors; optimiser and torch's generators are restored.

    A checkpoint of another run is refused.
    """
    check_checkpoint(folder, description)
    tensors, metadata = read_tensors(folder / FILE)
    groups = _grouped(tensors)
    moments = {int(index): values for index, values in _grouped(groups.pop("optimizer", {})).items()}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    generators = groups.pop("rng")
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], device)
    best = {name: tensor.to(device) for name, tensor in groups.pop("best", {}).items()}
    return TrainState(**json.loads(metadata["state"]), best_weights=best), groups


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``{"group.name": tensor}`` as ``{"group": {"name": tensor}}``."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = tensor
    return groups


def check_checkpoint(folder: Path, description: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run: one that differs in a part of ``description``. Its tensors are not read."""
    if not has_checkpoint(folder):
        return
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            before = json.loads(file.metadata()["description"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        message = f"{folder / FILE} is not a whole checkpoint of this version ({error})"
        raise DataError(f"{message} — delete {folder}, or choose a new --out") from error
    now = json.loads(json.dumps(description))
    difference = first_difference({name: before.get(name) for name in now}, now)
    if difference is not None:
        raise OtherRun(
            f"{folder / FILE} belongs to a run with another configuration or data: {difference} — resume with the "
            "recipe and the data of that run, or choose a new --out"
        )


def describe_recipe(*, method: Config, backbone: Config, train: Config) -> dict[str, Any]:
    """What a recipe alone says of the weights; a task adds what its data say."""
    parts = {"method": method, "backbone": backbone, "train": train}
    return {name: part.model_dump(mode="json", exclude=set(NO_EFFECT)) for name, part in parts.items()}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first dotted field in which two configurations differ, with both values."""
    for key in dict.fromkeys((*now, *before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            difference = first_difference(old, new, f"{prefix}{key}.")
            if difference is not None:
                return difference
        elif old != new:
            return f"{prefix}{key} was {old!r} and is now {new!r}"
    return None


def holds_run(out: Path) -> bool:
    """Is there work to lose, a checkpoint or a report?"""
    return has_checkpoint(out / "checkpoint") or (out / "report.json").is_file()


def check_folder(out: Path, *, resume: bool) -> None:
    """A folder that already holds a run is touched only with ``resume``."""
    if not resume and holds_run(out):
        raise UsageError(f"{out} already holds a run — continue with --resume (resume=True), or choose another --out")


def check_not_file(out: Path) -> None:
    """Refuse a path that cannot become a folder, before any work."""
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not parent.is_dir():
        raise UsageError(f"{out} cannot be a folder: {parent} is a file — choose another --out")


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Lock a run folder against other processes: two runs in one folder would mix their logs and checkpoints.

    The lock is re-entrant, and the first of several ranks holds it for all. The folder is made if it is not there,
    and removed if it is still empty at the end. Reading a run needs no lock.
    """
    check_not_file(out)
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


def run_section(run: Path, name: str) -> dict[str, Any]:
    """A section of config.yaml, not validated: an older run may have other fields. Empty if it is missing."""
    config = run / "config.yaml"
    section = read_yaml(config).get(name) if config.is_file() else None
    return section if isinstance(section, dict) else {}


def run_pairs(run: Path) -> str:
    """The SPEC of the data that a run was trained on; of encoders that are known by their vectors, these."""
    if str(run).startswith("features:"):
        return str(run)
    data = run_section(run, "data")
    if "pairs" not in data:
        raise UsageError(f"{run} is a model folder, which does not name its data — add --pairs SPEC")
    return str(data["pairs"])


def run_files(run: Path) -> list[Path]:
    """The files that commands read of a run or model folder and of its data; not what else is in the folder."""
    data, settings = run_section(run, "data"), run_section(run, "evaluate")
    judged = [path for name in ("judgments", "preferences", "captions", "rivals") for path in settings.get(name) or ()]
    model = run / "model" if (run / "model").is_dir() else run
    files = [run / "config.yaml"]
    files += [model / name for name in ("config.json", "model.safetensors", "search.json", "backbone")]
    return [*files, *(named_file(str(path))[1] for path in judged), *spec_files(data.get("pairs"))]
