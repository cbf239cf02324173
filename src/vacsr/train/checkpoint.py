"""The whole state of a run in one safetensors file: weights, optimiser, generators and place in the data order.

One file and one rename: after a kill at any moment there is either the old state or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import BackboneConfig, Config, TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import OtherRun
from vacsr.files import read_tensors, write_tensors
from vacsr.methods.base import Method

FILE = "state.safetensors"
NO_EFFECT = frozenset({"device", "log_every", "checkpoint_every", "checkpoint_epochs", "trackers"})
"""Training fields that a run may change on its way: what comes out is the same."""
READING = frozenset({"workers", "cache_gb"})
"""Few-shot runs have how photos are read among them."""


@dataclass
class TrainState:
    """Where a run stands."""

    step: int = 0
    """Batches done."""
    best: float | None = None
    """Best dev RSUM so far."""
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended early, if it did."""


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: Optimizer, *, state: TrainState, fingerprint: str
) -> None:
    """Write ``folder/state.safetensors`` atomically; what a kill left half-written goes first."""
    for torn in folder.glob(f".{FILE}.*.tmp"):
        torn.unlink(missing_ok=True)
    optimizer_tensors, optimizer_numbers = _flatten(optimizer.state_dict()["state"])
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in state.best_weights.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors.items()}
    tensors |= {f"method_state.{name}": tensor for name, tensor in _method_state(model).items()}
    tensors |= {f"rng.{name}": tensor for name, tensor in _generators(_device(model)).items()}
    meta = {"step": state.step, "best": state.best, "best_step": state.best_step}
    metadata = {"state": json.dumps(meta), "optimizer": json.dumps(optimizer_numbers), "fingerprint": fingerprint}
    write_tensors(folder / FILE, tensors, metadata=metadata)


def has_checkpoint(folder: Path) -> bool:
    """Is there a state to go back to?"""
    return (folder / FILE).is_file()


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: Optimizer, *, fingerprint: str
) -> TrainState | None:
    """Restore everything; None where there is no checkpoint yet."""
    if not has_checkpoint(folder):
        return None
    path = folder / FILE
    tensors, metadata = read_tensors(path)
    if metadata.get("fingerprint") != fingerprint:
        raise OtherRun(f"{path} {_misfit(metadata.get('fingerprint', ''), fingerprint, folder)}")
    model.load_state_dict(_under(tensors, "model."))
    saved = _unflatten(_under(tensors, "optimizer."), json.loads(metadata["optimizer"]))
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    if _method_state(model):
        model.get_submodule("method").load_training_state(_under(tensors, "method_state."))  # type: ignore[operator]
    torch.set_rng_state(tensors["rng.cpu"])
    device = _device(model)
    if "rng.cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    return TrainState(**json.loads(metadata["state"]), best_weights=_under(tensors, "best."))


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _method_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """State of the method that its saved model does without."""
    method = getattr(model, "method", None)
    return method.training_state() if isinstance(method, Method) else {}


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Our own draws need no state; a method that uses torch's generators does.

    CUDA is asked only by a run on CUDA: the question alone takes memory on the GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _flatten(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Per-parameter optimiser state as named tensors and plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for index, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return tensors, numbers


def _unflatten(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *numbers.items()]:
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return state


def fingerprint(
    method: Any,
    pairs: PairSet | PhotoSet,
    *,
    dev: PairSet | PhotoSet | None,
    config: TrainConfig,
    backbone: BackboneConfig,
    photo_size: int = 0,
) -> str:
    """What must be equal for a checkpoint to fit: method, backbone, training fields, data and dev set.

    A digest for each part, as JSON: where two fingerprints differ, the parts have names.
    """
    parts = {
        "method": _describe(method),
        "backbone": backbone.model_dump(mode="json"),
        "training fields": config.model_dump(mode="json", exclude=set(NO_EFFECT)),
        "training data": _digest(pairs),
        "words of the training captions": pairs.captions,
        "data.photo_size": photo_size,
        "dev data": None if dev is None else _digest(dev),
        "words of the dev captions": None if dev is None else dev.captions,
    }
    return json.dumps({name: _sha256(part) for name, part in parts.items()})


def _sha256(part: Any) -> str:
    """Of anything that JSON can hold, independent of the order of keys."""
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def _misfit(before: str, now: str, folder: Path) -> str:
    """What is wrong with a checkpoint, by the parts in which fingerprints differ, and what to do."""
    old, new = _parts(before), _parts(now)
    if new and not old:
        message = "is of an earlier version, which did not look at the words of captions"
        return f"{message} — finish the run with that version, or delete {folder} to train anew"
    other = [f"other {name}" for name in dict.fromkeys((*new, *old)) if old.get(name) != new.get(name)]
    message = f"belongs to a run with another configuration or data{': ' if other else ''}{', '.join(other)}"
    return f"{message} — resume with the recipe and the data of that run, or choose a new --out"


def _parts(fingerprint: str) -> dict[str, str]:
    return json.loads(fingerprint) if fingerprint.startswith("{") else {}


def _describe(method: Any) -> Any:
    """A method's config, or the name and the parameters' shapes of an object that has none."""
    described = method if isinstance(method, Config) else getattr(method, "config", None)
    if isinstance(described, Config):
        return described.model_dump(mode="json")
    return [type(method).__name__, {name: list(p.shape) for name, p in method.named_parameters()}]


def _digest(pairs: PairSet | PhotoSet) -> str:
    """Of features, or photos, and labels."""
    if isinstance(pairs, PhotoSet):
        return pairs.digest()
    data = hashlib.sha256()
    for tensor in (pairs.images, pairs.texts, pairs.caption_image):
        data.update(tensor.contiguous().numpy().tobytes())
    return data.hexdigest()
