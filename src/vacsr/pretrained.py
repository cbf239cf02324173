"""The folder format of a model: config.json, model.safetensors, a card, and the files that rebuild its towers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from vacsr.backbones import Backbone
from vacsr.config import BackboneConfig, MethodConfig
from vacsr.config.base import method_entry
from vacsr.config.io import method_config, parse
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods.base import Method
from vacsr.provenance import Provenance

SCHEMA = 1
ASSETS = "backbone"
"""Subfolder with tower configurations and tokenizer."""
_FREE_FIELDS = ("start", "weights", "augment", "variance_block", "checkpointing")
"""Fields of the backbone in which a model may differ from the one that training starts from."""


def model_folder(folder: Path) -> Path:
    """The folder with config.json: a model folder itself, or ``model/`` in a run folder."""
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise DataError(
        f"no trained model in {folder} (no config.json) — train one: vacsr train RECIPE.yaml --out {folder}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A config.json of this schema."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        raise DataError(f"{path} is not JSON ({error}) — save the model again") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise DataError(f"{path} was not written by this version of vacsr (schema {SCHEMA} expected)")
    return raw


def config_digest(config: Mapping[str, Any]) -> str:
    """Ties the weights to the config they were saved with."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


class SavedModel(NamedTuple):
    """A model folder, its config read, its weights not yet."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> SavedModel:
        """A model folder or a run folder."""
        folder = model_folder(Path(folder).expanduser())
        return cls(folder, read_config(folder / "config.json"))

    @property
    def assets(self) -> Path:
        """The folder that rebuilds the towers."""
        return self.folder / ASSETS

    def tensors(self) -> dict[str, Tensor]:
        """The weights, after a check that nothing in the folder was changed."""
        tensors, metadata = read_tensors(self.folder / "model.safetensors")
        if metadata.get("config") != config_digest(self.config):
            raise DataError(
                f"{self.folder}: config.json and the weights were not saved together — save the model again"
            )
        for name, expected in self.config.get("assets", {}).items():
            path = self.assets / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                raise DataError(f"{path} is missing or changed since the model was saved — copy the model folder again")
        return tensors

    def check_start(self, config: BackboneConfig) -> None:
        """Training can start from this model only with the same towers, inputs and heads."""
        saved = parse(BackboneConfig, self.config["backbone"])
        for name in BackboneConfig.model_fields:
            new, old = getattr(config, name), getattr(saved, name)
            if name not in _FREE_FIELDS and new != old:
                message = (
                    f"backbone.{name} is {new!r}, the model in {self.folder} that training starts from has {old!r}"
                )
                raise UsageError(f"{message} — set it the same, or start from another model")

    def load_start(self, model: nn.Module) -> None:
        """Load everything but the method into a model of the same shape. One saved network serves for two."""
        saved = self.tensors()
        saved = {f"second.{name}": tensor for name, tensor in saved.items()} | saved
        state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("method.")}
        for name, tensor in state.items():
            if name not in saved or saved[name].shape != tensor.shape:
                shape = list(saved[name].shape) if name in saved else "nothing"
                message = f"{self.folder} has {shape} as {name}, this model needs {list(tensor.shape)}"
                raise DataError(f"{message} — start from a model with the same backbone, pooling and head")
        model.load_state_dict({name: saved[name] for name in state}, strict=False)


class PretrainedMixin(nn.Module):
    """Save to a folder and load from it, for a model with a backbone, a method and a ``build`` classmethod."""

    backbone: Backbone
    method: Method
    config: BackboneConfig
    provenance: Provenance

    @classmethod
    def build(
        cls,
        method: MethodConfig | Method,
        config: BackboneConfig,
        *,
        image_dim: int = 0,
        text_dim: int = 0,
        provenance: Provenance | None = None,
        assets: Path | None = None,
    ) -> Self:
        """A model with fresh weights; the subclass builds it."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and a model card; a reader never sees a partial write."""
        folder, method = Path(folder), self.method.config
        if method_entry(method.name).method is not type(self.method):
            raise UsageError(f"{type(self.method).__name__} cannot be loaded again — put @register above the class")
        assets = _asset_files(self.backbone)
        described = {
            "schema": SCHEMA,
            "image_dim": self.backbone.image_dim,
            "text_dim": self.backbone.text_dim,
            "backbone": self.config.model_copy(update={"start": ""}).model_dump(mode="json"),  # no longer needed
            "method": method.model_dump(mode="json"),
            "provenance": vars(self.provenance),
            "assets": {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()},
        }
        names = ("model.safetensors", "config.json", "README.md", *(f"{ASSETS}/{name}" for name in assets))
        with atomic_paths(*(folder / name for name in names)) as (weights, config, card, *copies):
            save_tensors(weights, self.state_dict(), metadata={"config": config_digest(described)})
            config.write_text(json_text(described), encoding="utf-8")
            card.write_text(model_card(self), encoding="utf-8")
            for copy, content in zip(copies, assets.values(), strict=True):
                copy.write_bytes(content)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read what :meth:`save_pretrained` wrote. A run folder works too: its ``model/`` is taken."""
        saved = SavedModel.open(folder)
        tensors, raw = saved.tensors(), saved.config
        try:
            model = cls.build(
                method_config(raw["method"]),
                parse(BackboneConfig, raw["backbone"]),
                image_dim=raw["image_dim"],
                text_dim=raw["text_dim"],
                provenance=Provenance(**raw["provenance"]),
                assets=saved.assets,
            )
            model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"{saved.folder}: weights and config.json do not fit together ({error})") from error
        return model.eval()


def _asset_files(backbone: Backbone) -> dict[str, bytes]:
    """The files that rebuild the towers, by their names in the assets folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backbone.save_assets(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def model_card(model: PretrainedMixin) -> str:
    """README.md of a model folder."""
    backbone, towers = model.backbone, not model.backbone.cached
    count = sum(p.numel() for p in model.parameters())
    count -= model.method.networks * sum(p.numel() for p in backbone.unused_params())
    source = backbone.name or model.provenance.backbone or "unknown embeddings"
    parts = f"{'two towers, ' * towers}two projection heads to {model.config.head.dim} dimensions"
    parts += ", all of it twice, averaged," * (model.method.networks == 2)
    inputs = (
        "scorer.score_all(['photo.jpg'], ['a dog on a beach'])"
        if towers
        else f"scorer.score_all(images, texts)  # images [I, {backbone.image_dim}], texts [T, {backbone.text_dim}]"
    )
    return (
        "---\nlibrary_name: vacsr\ntags: [image-text-retrieval, uncertainty]\n---\n"
        f"# {model.method.config.name} on {source}\n\n"
        f"{count:,} parameters: {parts} and those of the method.\n\n"
        "```python\nimport vacsr\nscorer = vacsr.PairScorer.from_pretrained('PATH')\n"
        f"scores = {inputs}\n```\n"
    )
