"""A model folder: what lies in it, whether it is whole, and what another model takes over from it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vacsr.backbones import Backbone
from vacsr.config import BackboneConfig, Config
from vacsr.config.io import parse
from vacsr.errors import DataError, UsageError
from vacsr.files import read_tensors

if TYPE_CHECKING:
    from vacsr.methods.model import MatchingModel

SCHEMA = 1
ASSETS = "backbone"
"""The folder of tower configurations and tokenizer inside a model folder."""


def model_folder(folder: Path) -> Path:
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise DataError(
        f"no trained model in {folder} (no config.json) — train one: vacsr train RECIPE.yaml --out {folder}"
    )


def read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        raise DataError(f"{path} is not JSON ({error}) — save the model again") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise DataError(f"{path} was not written by this version of vacsr (schema {SCHEMA} expected)")
    return raw


def check_assets(folder: Path, hashes: Mapping[str, str]) -> None:
    for name, expected in hashes.items():
        path = folder / ASSETS / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise DataError(f"{path} is missing or was changed since the model was saved — copy the model folder again")


def assets_of(backbone: Backbone) -> dict[str, bytes]:
    """The files that rebuild the towers, by their names under the assets folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backbone.save_assets(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def config_digest(config: Mapping[str, Any]) -> str:
    """Ties the weights to the config they were saved with."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def check_start(config: BackboneConfig, start: Path) -> None:
    """Everything that says what towers see and give must be as in the model that training starts from."""
    theirs = parse(BackboneConfig, read_config(start / "config.json")["backbone"])
    free = ("start", "weights", "augment", "checkpointing")  # these may differ
    for name in BackboneConfig.model_fields:
        own, other = getattr(config, name), getattr(theirs, name)
        if name not in free and own != other:
            message = f"backbone.{name} is {own!r}, the model in {start} that training starts from has {other!r}"
            raise UsageError(f"{message} — set it the same, or start from another model")


def take_over(model: MatchingModel, start: Path) -> None:
    """The weights of everything but the method, from a model of the same shape. One network serves for two."""
    tensors, _ = read_tensors(start / "model.safetensors")
    tensors = {f"second.{name}": tensor for name, tensor in tensors.items()} | tensors
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("method.")}
    for name, tensor in own.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            message = f"{start} has {found} as {name}, this model needs {list(tensor.shape)}"
            raise DataError(f"{message} — start from a model with the same backbone, pooling and head")
    model.load_state_dict({name: tensors[name] for name in own}, strict=False)


def model_card(model: MatchingModel, method: Config) -> str:
    count = sum(p.numel() for p in model.parameters())
    source = model.backbone.name or model.provenance.backbone or "unknown embeddings"
    parts = f"{'two towers, ' * model.has_towers}two projection heads to {model.config.head.dim} dimensions"
    parts += ", all of it twice, averaged," * (len(model.networks) == 2)
    inputs = (
        "scorer.score_all(['photo.jpg'], ['a dog on a beach'])"
        if model.has_towers
        else "scorer.score_all(images, texts)"
        f"  # images [I, {model.backbone.image_dim}], texts [T, {model.backbone.text_dim}]"
    )
    return (
        "---\nlibrary_name: vacsr\ntags: [image-text-retrieval, uncertainty]\n---\n"
        f"# {getattr(method, 'name', 'method')} on {source}\n\n"
        f"{count:,} parameters: {parts} and the method's own.\n\n"
        "```python\nimport vacsr\nscorer = vacsr.PairScorer.from_pretrained('PATH')\n"
        f"scores = {inputs}\n```\n"
    )
