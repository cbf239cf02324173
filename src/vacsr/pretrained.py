"""The folder format of a model: config.json, model.safetensors, a card, and the files that rebuild its towers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vacsr.backbones import Backbone
from vacsr.config import BackboneConfig
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_json, read_tensors, read_text, save_tensors
from vacsr.hub import download, hub_id, published_config

SCHEMA = 1
ASSETS = "backbone"  # subfolder with tower configurations and tokenizer


def model_folder(folder: Path) -> Path:
    """The folder with config.json: a model folder itself, ``model/`` in a run folder, or what a Hub id is cached in."""
    published = hub_id(folder)
    folder = folder if published is None else download(published)
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    if (folder / "config.yaml").is_file():
        how = f"vacsr train {folder / 'config.yaml'} --out {folder} --resume"
        raise DataError(f"the run in {folder} is not finished, it has no model yet — continue it: {how}")
    message = f"no trained model in {folder} (no config.json)" if folder.is_dir() else f"no such folder: {folder}"
    raise DataError(f"{message} — train one: vacsr train RECIPE.yaml --out DIR, or search without: clip:ID_OR_FOLDER")


def encoder_spec(source: str | Path) -> str | None:
    """The backbone spec of encoders that are used without training; None for a trained model or run.

    ``clip:ID_OR_FOLDER`` and ``towers:IMAGE,TEXT`` as they are, a checkpoint of transformers by its folder or id, and
    encoders that are known by their vectors: ``features:FILE``. Of an id that is not in the cache, config.json is
    downloaded.
    """
    text, folder = str(source), Path(source).expanduser()
    if text.startswith(("clip:", "towers:", "features:")):
        return text
    if folder.is_dir():
        config = folder / "config.json"
        foreign = config.is_file() and "model_type" in read_json(config)
        return f"clip:{folder}" if foreign else None
    published = hub_id(source)
    if published is None or "model_type" not in published_config(published):
        return None
    if published.revision:
        raise UsageError(f"{text} is a checkpoint of transformers — download that revision, and give the folder")
    return f"clip:{text}"


def config_digest(config: Mapping[str, Any]) -> str:
    """Ties the weights to the config they were saved with."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def weights_digest(tensors: Mapping[str, Tensor], *, start: str = "") -> str:
    """SHA-256 of named tensors, whatever device they are on and file they are in."""
    digest = hashlib.sha256(start.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SavedModel(NamedTuple):
    """A model folder, its config read, its weights not yet."""

    folder: Path
    config: dict[str, Any]
    revision: str = ""  # user/model@commit, if it comes from the Hub

    @classmethod
    def open(cls, source: str | Path) -> SavedModel:
        """A model folder, a run folder, or a Hub id, which is downloaded."""
        published = hub_id(source)
        folder = model_folder(Path(source).expanduser())
        config = read_json(folder / "config.json")
        if config.get("schema") != SCHEMA:
            message = f"{folder}/config.json was not written by this version of vacsr"
            raise DataError(f"{message} — save or train the model again with it")
        revision = config.get("revision", "") if published is None else f"{published.repo}@{folder.name}"
        return cls(folder, config, revision)

    @property
    def assets(self) -> Path:
        """The folder that rebuilds the towers."""
        return self.folder / ASSETS

    def tensors(self) -> dict[str, Tensor]:
        """The weights, after a check that nothing in the folder was changed."""
        tensors, metadata = read_tensors(self.folder / "model.safetensors")
        if metadata.get("config") != config_digest(self.config):
            raise DataError(f"{self.folder}: config.json and weights were not saved together — save the model again")
        if self.config.get("weights", expected := weights_digest(tensors)) != expected:
            message = f"the weights in {self.folder} are not those that were saved (SHA-256 {expected[:12]}…)"
            raise DataError(f"{message} — delete this copy, then copy or download it again")
        for name, expected in self.config.get("assets", {}).items():
            path = self.assets / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                raise DataError(f"{path} is missing or changed since the model was saved — copy the model folder again")
        return tensors

    def load_start(self, model: nn.Module) -> None:
        """Load everything but the method into a model of the same shape. One saved network serves for two; members
        that the saved model does not have start fresh."""
        saved = self.tensors()
        saved = {f"second.{name}": tensor for name, tensor in saved.items()} | saved
        names = [name for name in model.state_dict() if not name.startswith("method.")]
        names = [name for name in names if name in saved or "others." not in name]
        try:
            model.load_state_dict({name: saved[name] for name in names}, strict=False)
        except (KeyError, RuntimeError) as error:
            message = f"the weights in {self.folder} do not fit this model ({error})"
            raise DataError(f"{message} — start from a model with the same backbone, pooling and head") from error


def read_card(folder: Path) -> str:
    """README.md of a model folder; "" where it has none that can be read."""
    try:
        return read_text(folder / "README.md", limit=1 << 20)
    except DataError:
        return ""


def check_start(config: BackboneConfig, saved: BackboneConfig, *, folder: str | Path) -> None:
    """Refuse a backbone that differs from that of the model in ``folder``, which training starts from."""
    free = {"start", "weights", "augment", "checkpointing", "lora"}
    for name in BackboneConfig.model_fields:
        new, old = getattr(config, name), getattr(saved, name)
        if new != old and name not in free:
            message = f"backbone.{name} is {new!r}, but {old!r} in {folder}, which training starts from"
            raise UsageError(f"{message} — set it the same, or start from another model")


def write_model_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, texts: Mapping[str, str] | None = None,
    backbone: Backbone | None = None,
) -> None:  # fmt: skip
    """Write config, weights, ``texts`` by file name and what rebuilds the towers; a reader never sees a part."""
    described = {"schema": SCHEMA, **config, "weights": weights_digest(tensors)}
    files = {name: text.encode() for name, text in (texts or {}).items()}
    if backbone is not None:
        with tempfile.TemporaryDirectory() as name:
            backbone.save_assets(Path(name))
            written = sorted(path for path in Path(name).rglob("*") if path.is_file())
            assets = {path.relative_to(name).as_posix(): path.read_bytes() for path in written}
        described["assets"] = {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()}
        files |= {f"{ASSETS}/{name}": content for name, content in assets.items()}
    names = ("model.safetensors", "config.json", *files)
    with atomic_paths(*(folder / name for name in names)) as (weights_path, config_path, *paths):
        save_tensors(weights_path, tensors, metadata={"config": config_digest(described)})
        config_path.write_text(json_text(described), encoding="utf-8")
        for path, content in zip(paths, files.values(), strict=True):
            path.write_bytes(content)
