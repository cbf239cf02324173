"""A backbone, two projection heads and a method: what is trained, saved and scored with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import FeatureBackbone, ProjectionHead, load_backbone
from vacsr.config import BackboneConfig, Config, InfoNCEConfig, SigmoidConfig, VacsrConfig
from vacsr.data.pairs import Provenance
from vacsr.draws import RowNoise
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods import build_method
from vacsr.methods.base import Embedding, Method, ParamGroup, split_by_decay
from vacsr.recipes import method_config, parse

_IMAGE, _TEXT = 0, 1  # dropout streams
_SCHEMA = 1


class MatchingModel(nn.Module):
    """Images and texts in, scores out: the trained whole."""

    def __init__(
        self, backbone: FeatureBackbone, method: Method, *, config: BackboneConfig, provenance: Provenance | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.provenance = provenance or Provenance("", "", "")
        self.backbone = backbone
        self.image_head = ProjectionHead(backbone.image_dim, config.head)
        self.text_head = ProjectionHead(backbone.text_dim, config.head)
        self.method = method

    @classmethod
    def build(
        cls,
        method: VacsrConfig | SigmoidConfig | InfoNCEConfig | nn.Module,
        config: BackboneConfig,
        *,
        image_dim: int,
        text_dim: int,
        provenance: Provenance | None = None,
        seed: int = 0,
    ) -> MatchingModel:
        """A model with fresh weights, drawn from ``seed`` without touching torch's own generator."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
            return cls._build(method, config, image_dim=image_dim, text_dim=text_dim, provenance=provenance)

    @classmethod
    def _build(
        cls,
        method: VacsrConfig | SigmoidConfig | InfoNCEConfig | nn.Module,
        config: BackboneConfig,
        *,
        image_dim: int,
        text_dim: int,
        provenance: Provenance | None,
    ) -> MatchingModel:
        backbone = load_backbone(config, image_dim=image_dim, text_dim=text_dim)
        head = build_method(method, dim=config.head.dim) if isinstance(method, Config) else method
        if not isinstance(head, Method):
            raise UsageError(f"{type(head).__name__} is not a method: it needs loss, score, uncertainty, param_groups")
        return cls(backbone, head, config=config, provenance=provenance)

    def embed_images(self, images: Tensor, noise: RowNoise | None = None) -> Embedding:
        """[N, D_image] -> unit vectors [N, d]; ``noise`` turns dropout on."""
        return Embedding(functional.normalize(self.image_head(self.backbone.encode_image(images), noise), dim=-1))

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """[M, D_text] -> unit vectors [M, d]"""
        return Embedding(functional.normalize(self.text_head(self.backbone.encode_text(texts), noise), dim=-1))

    def dropout_noise(self, *, seed: int | Tensor, step: Tensor, rows: Tensor) -> tuple[RowNoise, RowNoise]:
        """The image and the text head's dropout draws of one step."""
        return RowNoise(seed, step, rows, _IMAGE), RowNoise(seed, step, rows, _TEXT)

    def param_groups(self) -> list[ParamGroup]:
        """Heads and method; the method says its own."""
        heads = [*self.image_head.named_parameters(), *self.text_head.named_parameters()]
        return [*split_by_decay("heads", heads), *self.method.param_groups()]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and a model card; a reader never sees half of them."""
        folder = Path(folder)
        method = getattr(self.method, "config", None)
        if not isinstance(method, Config):
            raise UsageError(f"{type(self.method).__name__} has no `config`, so it cannot be saved and built again")
        described = {
            "schema": _SCHEMA,
            "image_dim": self.backbone.image_dim,
            "text_dim": self.backbone.text_dim,
            "backbone": self.config.model_dump(mode="json"),
            "method": method.model_dump(mode="json"),
            "provenance": vars(self.provenance),
        }
        names = ("model.safetensors", "config.json", "README.md")
        with atomic_paths(*(folder / name for name in names)) as (weights, config, card):
            save_tensors(weights, self.state_dict(), metadata={"config": _digest(described)})
            config.write_text(json_text(described), encoding="utf-8")
            card.write_text(_model_card(self, method), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MatchingModel:
        """Read what :meth:`save_pretrained` wrote. A run folder works too: its ``model/`` is taken."""
        folder = _model_folder(Path(folder))
        raw = _read_config(folder / "config.json")
        tensors, metadata = read_tensors(folder / "model.safetensors")
        if metadata.get("config") != _digest(raw):
            raise DataError(f"{folder}: config.json and the weights were not saved together — save the model again")
        try:
            model = cls.build(
                method_config(raw["method"]),
                parse(BackboneConfig, raw["backbone"]),
                image_dim=raw["image_dim"],
                text_dim=raw["text_dim"],
                provenance=Provenance(**raw["provenance"]),
            )
            model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"{folder}: weights and config.json do not fit together ({error})") from error
        return model.eval()


def _model_folder(folder: Path) -> Path:
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise DataError(
        f"no trained model in {folder} (no config.json) — train one: vacsr train RECIPE.yaml --out {folder}"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        raise DataError(f"{path} is not JSON ({error}) — save the model again") from error
    if not isinstance(raw, dict) or raw.get("schema") != _SCHEMA:
        raise DataError(f"{path} was not written by this version of vacsr (schema {_SCHEMA} expected)")
    return raw


def _digest(config: Mapping[str, Any]) -> str:
    """Ties the weights to the config they were saved with."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _model_card(model: MatchingModel, method: Config) -> str:
    count = sum(p.numel() for p in model.parameters())
    source = model.provenance.backbone or "unknown embeddings"
    return (
        "---\nlibrary_name: vacsr\ntags: [image-text-retrieval, uncertainty]\n---\n"
        f"# {getattr(method, 'name', 'method')} on {source}\n\n"
        f"{count:,} parameters: two projection heads to {model.config.head.dim} dimensions and the method's own.\n\n"
        "```python\nimport vacsr\nscorer = vacsr.PairScorer.from_pretrained('PATH')\n"
        "scores = scorer.score_all(images, texts)  # images [I, "
        f"{model.backbone.image_dim}], texts [T, {model.backbone.text_dim}]\n```\n"
    )
