"""The whole state of a run in one safetensors file, with a description that tells its run from others.

One file and one rename: after a kill at any moment there is either the old state or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import Config
from vacsr.errors import DataError, OtherRun
from vacsr.files import read_tensors, write_tensors

FILE = "state.safetensors"
NO_EFFECT = frozenset(
    {"device", "log_every", "checkpoint_every", "checkpoint_epochs", "trackers", "workers", "cache_gb"}
)
"""Training fields that may change when a run is resumed: the result is the same."""


@dataclass
class TrainState:
    """How far a run has come."""

    step: int = 0
    """Batches done."""
    best: float | None = None
    """Best dev metric so far."""
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    stopped: bool = False
    """Ended early, by Ctrl-C."""


def save_checkpoint(
    folder: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    optimizer: Optimizer,
    *,
    state: TrainState,
    description: Mapping[str, Any],
    device: torch.device,
) -> None:
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
    """Is there a state to resume from?"""
    return (folder / FILE).is_file()


def load_checkpoint(
    folder: Path, optimizer: Optimizer, *, description: Mapping[str, Any], device: torch.device
) -> tuple[TrainState, dict[str, dict[str, Tensor]]]:
    """The run's state and the other groups of tensors; optimiser and torch's generators are restored.

    A checkpoint of another run is refused.
    """
    check_checkpoint(folder, description)
    tensors, metadata = read_tensors(folder / FILE)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = tensor
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in groups.pop("optimizer", {}).items():
        index, _, name = key.partition(".")
        moments.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    generators = groups.pop("rng")
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], device)
    best = {name: tensor.to(device) for name, tensor in groups.pop("best", {}).items()}
    return TrainState(**json.loads(metadata["state"]), best_weights=best), groups


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
