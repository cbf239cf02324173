"""The whole state of a run in one safetensors file, and what tells two runs apart.

One file and one rename: after a kill at any moment there is either the old state or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import BackboneConfig, Config, TrainConfig
from vacsr.config.io import read_yaml
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import ConfigError, DataError, OtherRun
from vacsr.files import read_tensors, write_tensors

FILE = "state.safetensors"
NO_EFFECT = frozenset({"device", "log_every", "checkpoint_every", "checkpoint_epochs", "trackers"})
"""Training fields that may change when a run is resumed: the result is the same."""
READING = frozenset({"workers", "cache_gb"})
"""How photos are read, which few-shot recipes have among their training fields."""


@dataclass
class TrainState:
    """How far a run has come."""

    step: int = 0
    """Batches done."""
    best: float | None = None
    """Best dev metric so far."""
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended early, if it did."""


class Checkpoint(NamedTuple):
    """What a file holds: the run's state, its tensors by group, and those of the optimiser and the generators."""

    state: TrainState
    groups: dict[str, dict[str, Tensor]]
    optimizer: dict[int, dict[str, Any]]

    def restore(self, optimizer: Optimizer, device: torch.device) -> None:
        """Give the optimiser its moments and torch's generators their states."""
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": self.optimizer, "param_groups": groups})
        generators = self.groups["rng"]
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"], device)


def save_checkpoint(
    folder: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    optimizer: Optimizer,
    *,
    state: TrainState,
    fingerprint: str,
    device: torch.device,
) -> None:
    """Write ``folder/state.safetensors`` atomically: named groups of tensors, the optimiser and torch's generators."""
    for torn in folder.glob(f".{FILE}.*.tmp"):  # what a kill left behind
        torn.unlink(missing_ok=True)
    entries = {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None  # SGD's momentum before its first step
    }
    moments = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":  # asking CUDA takes memory on the GPU
        generators["cuda"] = torch.cuda.get_rng_state(device)
    groups = {**groups, "best": state.best_weights, "optimizer": moments, "rng": generators}
    tensors = {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    progress = {"step": state.step, "best": state.best, "best_step": state.best_step}
    metadata = {"state": json.dumps(progress), "optimizer": json.dumps(numbers), "fingerprint": fingerprint}
    write_tensors(folder / FILE, tensors, metadata=metadata)


def has_checkpoint(folder: Path) -> bool:
    """Is there a state to resume from?"""
    return (folder / FILE).is_file()


def load_checkpoint(folder: Path, *, fingerprint: str) -> Checkpoint | None:
    """Read a checkpoint, None where there is none; one of another run is refused."""
    if not has_checkpoint(folder):
        return None
    check_checkpoint(folder, fingerprint=fingerprint)
    tensors, metadata = read_tensors(folder / FILE)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = tensor
    moments: dict[int, dict[str, Any]] = {}
    for key, value in [*groups.pop("optimizer", {}).items(), *json.loads(metadata["optimizer"]).items()]:
        index, _, name = key.partition(".")
        moments.setdefault(int(index), {})[name] = value
    state = TrainState(**json.loads(metadata["state"]), best_weights=groups.pop("best", {}))
    return Checkpoint(state, groups, moments)


def check_checkpoint(folder: Path, *, fingerprint: str) -> None:
    """Refuse a checkpoint of another run, naming what differs; its tensors are not read."""
    if not has_checkpoint(folder):
        return
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            before = (file.metadata() or {}).get("fingerprint", "")
    except (SafetensorError, OSError) as error:
        message = f"{folder / FILE} is not a whole checkpoint ({error})"
        raise DataError(f"{message} — delete {folder}, or choose a new --out") from error
    if before == fingerprint:
        return
    old, new = (json.loads(text) if text.startswith("{") else {} for text in (before, fingerprint))
    parts = ", ".join(f"other {name}" for name in dict.fromkeys((*new, *old)) if old.get(name) != new.get(name))
    raise OtherRun(
        f"{folder / FILE} belongs to a run with another configuration or data{': ' if parts else ''}{parts} — resume "
        "with the recipe and the data of that run, or choose a new --out"
    )


def fingerprint(description: Mapping[str, Any]) -> str:
    """What must be equal for a checkpoint to fit: a SHA-256 of each part, as JSON, so that differences have names."""
    parts = {name: json.dumps(part, sort_keys=True).encode() for name, part in description.items()}
    return json.dumps({name: hashlib.sha256(part).hexdigest() for name, part in parts.items()})


def describe(
    method: Any,
    pairs: PairSet | PhotoSet,
    *,
    dev: PairSet | PhotoSet | None,
    config: TrainConfig,
    backbone: BackboneConfig,
    photo_size: int = 0,
) -> dict[str, Any]:
    """What tells retrieval runs apart: method, backbone, training fields, data and dev set."""
    settings = method if isinstance(method, Config) else method.config
    return {
        "method": settings.model_dump(mode="json"),
        "backbone": backbone.model_dump(mode="json"),
        "training fields": config.model_dump(mode="json", exclude=set(NO_EFFECT)),
        "training data": _digest(pairs),
        "words of the training captions": pairs.captions,
        "data.photo_size": photo_size,
        "dev data": None if dev is None else _digest(dev),
        "words of the dev captions": None if dev is None else dev.captions,
    }


def _digest(pairs: PairSet | PhotoSet) -> str:
    """Of features, or photos, and labels."""
    if isinstance(pairs, PhotoSet):
        return pairs.digest()
    data = hashlib.sha256()
    for tensor in (pairs.images, pairs.texts, pairs.caption_image):
        data.update(tensor.contiguous().numpy().tobytes())
    return data.hexdigest()


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


def check_same_training(recipe: Config, out: Path, *, read: Callable[[dict[str, Any]], Config], command: str) -> None:
    """Before a run is resumed: refuse a recipe that trains otherwise than ``out/config.yaml``, naming the field.

    Other data are noticed later, by the checkpoint's fingerprint.
    """
    file = out / "config.yaml"
    if not has_checkpoint(out / "checkpoint") or not file.is_file():
        return
    try:
        before = read(read_yaml(file))
    except ConfigError:
        return  # the checkpoint's fingerprint decides
    difference = first_difference(_training_fields(before), _training_fields(recipe))
    if difference is not None:
        raise DataError(
            f"{out} belongs to a run with another configuration or data: {difference} — resume with its own recipe: "
            f"{command} {file} --out {out} --resume, or choose a new --out"
        )


def _training_fields(recipe: Config) -> dict[str, Any]:
    parts = {"method", "backbone", "train", "search"}
    return recipe.model_dump(mode="json", include=parts, exclude={"train": {*NO_EFFECT, *READING}})
