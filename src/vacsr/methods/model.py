"""A backbone, two projection heads and a method: what is trained, saved and scored with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import FeatureBackbone, ProjectionHead, TowerBackbone, load_backbone
from vacsr.backbones.pooling import build_pooling
from vacsr.backbones.tokens import Tokens
from vacsr.config import BackboneConfig, Config, InfoNCEConfig, SigmoidConfig, TowersConfig, VacsrConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.data.provenance import UNKNOWN, Provenance
from vacsr.draws import RowNoise
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods import build_method
from vacsr.methods.base import Embedding, Method, ParamGroup, split_by_decay
from vacsr.methods.saved import (
    ASSETS,
    SCHEMA,
    assets_of,
    check_assets,
    check_start,
    config_digest,
    model_card,
    model_folder,
    read_config,
    take_over,
)
from vacsr.recipes import method_config, parse

_IMAGE, _TEXT = 0, 1  # streams of draws


class MatchingModel(nn.Module):
    """Images and texts in, scores out: the trained whole."""

    def __init__(
        self,
        backbone: FeatureBackbone | TowerBackbone,
        method: Method,
        *,
        config: BackboneConfig,
        provenance: Provenance | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.provenance = provenance or UNKNOWN
        self.backbone = backbone
        self.image_head = ProjectionHead(backbone.image_dim, config.head)
        self.text_head = ProjectionHead(backbone.text_dim, config.head)
        self.image_pool = build_pooling(config.pooling) if isinstance(backbone, TowerBackbone) else None
        self.text_pool = build_pooling(config.pooling) if isinstance(backbone, TowerBackbone) else None
        self.method = method

    @classmethod
    def build(
        cls,
        method: VacsrConfig | SigmoidConfig | InfoNCEConfig | nn.Module,
        config: BackboneConfig,
        *,
        image_dim: int = 0,
        text_dim: int = 0,
        provenance: Provenance | None = None,
        seed: int = 0,
        fit: PairSet | PhotoSet | None = None,
        assets: Path | None = None,
    ) -> MatchingModel:
        """A model with fresh heads, drawn from ``seed`` without touching torch's own generator.

        ``image_dim`` and ``text_dim`` are those of cached features; towers know their own. ``fit``: the training set,
        from which the backbone takes statistics or words. ``assets``: rebuild saved towers, weights to follow. Where
        ``config.start`` names a model, everything but the method is taken over from it.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
            start = model_folder(Path(config.start).expanduser()) if config.start and assets is None else None
            if start is not None:
                check_start(config, start)
            known = assets if start is None else start / ASSETS
            backbone = load_backbone(config, image_dim=image_dim, text_dim=text_dim, assets=known)
            if fit is not None:
                _fit(backbone, fit)
            head = build_method(method, dim=config.head.dim) if isinstance(method, Config) else method
            if not isinstance(head, Method):
                needs = "it needs loss, score, uncertainty, param_groups"
                raise UsageError(f"{type(head).__name__} is not a method: {needs}")
            model = cls(backbone, head, config=config, provenance=provenance)
        if start is not None:
            take_over(model, start)
        return model

    def embed_images(self, images: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [N, D_image], or photos [N, 3, H, W] uint8, to unit vectors [N, d]; ``noise`` is for training."""
        if isinstance(self.backbone, FeatureBackbone):
            return _unit(self.image_head(self.backbone.encode_image(images), noise))
        return _unit(self._pooled(self.backbone.encode_image(images, noise), self.image_head, self.image_pool, noise))

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [M, D_text], or tokens [M, L] with −1 for padding, to unit vectors [M, d]."""
        if isinstance(self.backbone, FeatureBackbone):
            return _unit(self.text_head(self.backbone.encode_text(texts), noise))
        return _unit(self._pooled(self.backbone.encode_text(texts, noise), self.text_head, self.text_pool, noise))

    def _pooled(self, tokens: Tokens, head: nn.Module, pool: nn.Module | None, noise: RowNoise | None) -> Tensor:
        """GPO sorts the projected tokens; mean and class token are taken before, which is cheaper. -> [N, d]"""
        assert pool is not None, "towers have a pooling"
        if self.config.pooling == "gpo":
            projected: Tensor = pool(tokens._replace(values=head(tokens.values, noise)))
            return projected
        pooled: Tensor = head(pool(tokens), noise)
        return pooled

    def dropout_noise(self, *, seed: int | Tensor, step: Tensor, rows: Tensor) -> tuple[RowNoise, RowNoise]:
        """The draws of one step for images and for texts: augmentation and dropout."""
        return RowNoise(seed, step, rows, _IMAGE), RowNoise(seed, step, rows, _TEXT)

    def param_groups(self, towers: TowersConfig | None = None) -> list[ParamGroup]:
        """Heads, pooling, method and towers, these at rates of their own; a tower with rate 0 is left out."""
        new = [*self.image_head.named_parameters(), *self.text_head.named_parameters()]
        for pool in (self.image_pool, self.text_pool):
            new += [] if pool is None else pool.named_parameters()
        groups = [*split_by_decay("heads", new), *self.method.param_groups()]
        return groups + (_tower_groups(self.backbone, towers or TowersConfig()) if self.has_towers else [])

    @property
    def has_towers(self) -> bool:
        """Does it read photos and words, or cached features?"""
        return isinstance(self.backbone, TowerBackbone)

    def rest(self, towers: Iterable[str]) -> None:
        """Let these towers ("image", "text") rest: no gradient; the others learn."""
        if isinstance(self.backbone, TowerBackbone):
            resting = frozenset(towers)
            for name, parts in self.backbone.tower_params().items():
                for _, parameter in [*parts.stem, *(named for block in parts.blocks for named in block)]:
                    parameter.requires_grad_(name not in resting)

    @contextmanager
    def plain_blocks(self) -> Iterator[None]:
        """Without compiled blocks for a while: other batch sizes would each compile anew."""
        compiled = {block: block._compiled_call_impl for block in self._blocks()}
        self.compile_blocks(False)
        try:
            yield
        finally:
            for block, call in compiled.items():
                block._compiled_call_impl = call

    def _blocks(self) -> list[nn.Module]:
        if not isinstance(self.backbone, TowerBackbone):
            return []
        return [*self.backbone.image.blocks(), *self.backbone.text.blocks()]

    def compile_blocks(self, on: bool) -> None:
        """torch.compile the towers' blocks, or undo it. Equal blocks share one compilation."""
        for block in self._blocks():
            if on:
                block.compile(dynamic=False)
            else:
                block._compiled_call_impl = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and a model card; a reader never sees half of them."""
        folder = Path(folder)
        method = getattr(self.method, "config", None)
        if not isinstance(method, Config):
            raise UsageError(f"{type(self.method).__name__} has no `config`, so it cannot be saved and built again")
        assets = assets_of(self.backbone)
        described = {
            "schema": SCHEMA,
            "image_dim": self.backbone.image_dim,
            "text_dim": self.backbone.text_dim,
            "backbone": self.config.model_copy(update={"start": ""}).model_dump(mode="json"),  # needed no more
            "method": method.model_dump(mode="json"),
            "provenance": vars(self.provenance),
            "assets": {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()},
        }
        names = ("model.safetensors", "config.json", "README.md", *(f"{ASSETS}/{name}" for name in assets))
        with atomic_paths(*(folder / name for name in names)) as (weights, config, card, *copies):
            save_tensors(weights, self.state_dict(), metadata={"config": config_digest(described)})
            config.write_text(json_text(described), encoding="utf-8")
            card.write_text(model_card(self, method), encoding="utf-8")
            for copy, content in zip(copies, assets.values(), strict=True):
                copy.write_bytes(content)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MatchingModel:
        """Read what :meth:`save_pretrained` wrote. A run folder works too: its ``model/`` is taken."""
        folder = model_folder(Path(folder))
        raw = read_config(folder / "config.json")
        tensors, metadata = read_tensors(folder / "model.safetensors")
        if metadata.get("config") != config_digest(raw):
            raise DataError(f"{folder}: config.json and the weights were not saved together — save the model again")
        check_assets(folder, raw.get("assets", {}))
        try:
            model = cls.build(
                method_config(raw["method"]),
                parse(BackboneConfig, raw["backbone"]),
                image_dim=raw["image_dim"],
                text_dim=raw["text_dim"],
                provenance=Provenance(**raw["provenance"]),
                assets=folder / ASSETS,
            )
            model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"{folder}: weights and config.json do not fit together ({error})") from error
        return model.eval()


def _unit(x: Tensor) -> Embedding:
    return Embedding(functional.normalize(x, dim=-1))


def _fit(backbone: FeatureBackbone | TowerBackbone, pairs: PairSet | PhotoSet) -> None:
    """Statistics of features, or the words of captions."""
    if isinstance(backbone, FeatureBackbone):
        if isinstance(pairs, PhotoSet):
            raise UsageError(
                "backbone 'features:' takes cached embeddings, these data are photos — set backbone.spec to clip:…, "
                "towers:… or tiny:, or embed them first: vacsr embed"
            )
        backbone.fit(pairs.images, pairs.texts)
    elif isinstance(pairs, PhotoSet):
        backbone.fit(pairs.captions)
    else:
        raise UsageError(
            f"backbone '{backbone.config.spec}' reads photos, these data are cached features — set "
            "backbone.spec=features:, or give photos such as data.pairs=folder:DIR"
        )


def _tower_groups(backbone: nn.Module, config: TowersConfig) -> list[ParamGroup]:
    """Block ℓ of L at rate·decay^(L−ℓ), everything outside the blocks at the tower's own rate."""
    assert isinstance(backbone, TowerBackbone)
    groups: list[ParamGroup] = []
    for name, rate in (("image", config.image_lr), ("text", config.text_lr)):
        parts = backbone.tower_params()[name]
        if rate == 0:
            continue
        groups += split_by_decay(f"{name}-stem", parts.stem, lr_scale=rate)
        for number, block in enumerate(parts.blocks):
            scale = rate * config.layer_decay ** (len(parts.blocks) - number)
            groups += split_by_decay(f"{name}-block-{number}", block, lr_scale=scale)
    return groups
