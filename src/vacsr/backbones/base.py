"""The interface of every backbone, images and texts to tokens, and the one without towers: cached features."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.augment import Partners, blend
from vacsr.backbones.heads import build_pooling
from vacsr.backbones.hub import local_folder
from vacsr.backbones.images import PhotoTransform
from vacsr.config import BackboneConfig
from vacsr.config.io import parse
from vacsr.errors import DataError, ShapeMismatch, UsageError, VacsrError
from vacsr.noise import RowNoise, seeded
from vacsr.provenance import UNKNOWN, Provenance

NamedParams = list[tuple[str, nn.Parameter]]


class Tokens(NamedTuple):
    """Token vectors of B items, L positions each. Cached features are tokens of length one."""

    values: Tensor  # [B, L, D]
    mask: Tensor  # [B, L] bool, True where the token is real; the real ones need not be adjacent
    summary: Tensor  # [B] int64, the position of the class or end token, which stands for the whole item
    spread: Tensor | None = None  # [B, L, W] what variances are made from, where the backbone has a branch for them


class TowerParams(NamedTuple):
    """A tower's parameters by depth, for learning rates that differ with it."""

    stem: NamedParams  # everything outside the blocks: embeddings, norms, projection
    blocks: list[NamedParams]  # the first block is the nearest to the input
    variance: NamedParams  # of the branch that variances are made from, if there is one


class Backbone(nn.Module):
    """Images and texts to tokens. With ``noise`` the encoders augment, as in training; without it they do not.

    The defaults describe a backbone without towers, such as cached features: nothing to tokenize, compile or freeze.
    """

    name: str = ""  # what its embeddings are known by; "" where they come from elsewhere
    cached: bool = False  # reads cached features: rows of numbers instead of photos and captions
    origin: Provenance = UNKNOWN  # of cached features
    transform: PhotoTransform  # how photos become squares; absent where ``cached``
    pretrained_loss: Mapping[str, Any] = MappingProxyType({})  # of towers that were trained together: a method's fields

    def __init__(self, config: BackboneConfig, *, image_dim: int, text_dim: int) -> None:
        """``image_dim`` and ``text_dim``: widths of a token that comes out."""
        super().__init__()
        self.config, self.image_dim, self.text_dim = config, image_dim, text_dim
        self.spread_dims = image_dim, text_dim  # widths of the tokens that variances are made from
        self.pooling = config.pooling  # how its tokens become one vector

    @abstractmethod
    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        """Photos uint8 [B, 3, H, W] (or features [B, D]) -> [B, L, D]; ``mix`` blends each with its partner."""

    @abstractmethod
    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        """Rows of :meth:`tokenize` int [B, L] (or features [B, D]) -> [B, L, D]"""

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids, −1 after the end; L is the longest caption, cut at the context. -> [M, L] int32"""
        raise UsageError("the backbone reads cached features, not words — train a model with clip:, towers: or tiny:")

    def fit(self, pairs: Any) -> None:
        """Learn from the training set what is needed before training: statistics of features, or words of captions."""

    def tower_params(self) -> dict[str, TowerParams]:
        """Parameters by tower and depth; together they are all that can be trained in the towers."""
        return {}

    def unused_params(self) -> list[nn.Parameter]:
        """Parameters of checkpoints that no token passes, such as a final norm that the output skips; always frozen."""
        return []

    def add_variance(self) -> None:
        """Give each tower a branch that variances are made from."""

    def add_lora(self) -> None:
        """Train low-rank updates from now on, as ``config.lora`` says, instead of the towers."""
        raise UsageError(f"{type(self).__name__} takes no LoRA — set backbone.lora.rank=0")

    def merge_lora(self) -> None:
        """After :meth:`add_lora`: make the updates part of the towers' own weights."""

    def base_params(self) -> list[nn.Parameter]:
        """The towers' own weights, which LoRA never changes; none without LoRA."""
        return []

    def compile_blocks(self, on: bool) -> None:
        """Run the repeated layers through torch.compile, or run them eagerly. Equal blocks share one compilation."""

    def set_checkpointing(self, on: bool) -> None:
        """Recompute the blocks' activations in the backward pass, or store them."""

    @property
    def reads_photos(self) -> bool:
        """Photos and captions, or only cached features?"""
        return not self.cached

    def provenance(self) -> Provenance:
        return UNKNOWN

    def save_assets(self, folder: Path) -> None:
        """Write what, besides the weights, rebuilds the towers."""


class Source(NamedTuple):
    """What a backbone is built from besides its config."""

    image_dim: int = 0  # width of cached image features
    text_dim: int = 0
    assets: Path | None = None  # of Backbone.save_assets: the same towers with fresh weights; the caller loads others


@dataclass(frozen=True)
class Scheme:
    """One kind of backbone: what a recipe writes before the colon of ``backbone.spec``."""

    usage: str  # what to write, for messages
    load: Callable[[BackboneConfig, Source], Backbone]
    cached: bool = False  # reads cached features, not photos
    pretrained: bool = False  # reads trained weights from files, so it can embed photos as it is
    matched: bool = False  # its two towers were trained together, so they match photos and captions without training


class FeatureScaling(nn.Module):
    """Brings one modality's features to about unit deviation; the training statistics are saved with the model."""

    shift: Tensor
    factor: Tensor

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.dim, self.kind = dim, kind
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("factor", torch.ones(dim))

    @torch.no_grad()
    def fit(self, features: Tensor) -> None:
        """Take mean and deviation from the training features; a dimension that never varies is only centred."""
        if self.kind != "standardize":
            return
        std, mean = torch.std_mean(features.double(), dim=0, correction=0)
        self.shift.copy_(mean)
        self.factor.copy_(1.0 / torch.where(std > 1e-6 * std.max(), std, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, dim] -> [B, dim]"""
        if x.shape[-1] != self.dim:
            message = f"the model expects features of dimension {self.dim}, these have {x.shape[-1]}"
            raise ShapeMismatch(f"{message} — use those of the backbone it was trained on, or train on these")
        if self.kind == "unit":
            return functional.normalize(x, dim=-1) * math.sqrt(self.dim)
        return (x - self.shift) * self.factor if self.kind == "standardize" else x


class FeatureEncoder(nn.Module):
    """What makes cached features: pretrained towers, and a pooling of their tokens into one unit vector per item."""

    def __init__(self, backbone: Backbone, *, image: Literal["cls", "mean"], text: Literal["cls", "mean"]) -> None:
        """``image``, ``text``: how their tokens are pooled."""
        super().__init__()
        self.backbone, self.pooling = backbone.eval(), {"image": image, "text": text}
        self.image_pool, self.text_pool = build_pooling(image), build_pooling(text)

    @classmethod
    def from_provenance(cls, origin: Provenance) -> FeatureEncoder:
        """The encoders that :meth:`provenance` described; it is an error if their weights have changed since."""
        from vacsr.backbones import load_backbone

        try:
            settings = json.loads(origin.encoder)
            with seeded(0):  # as random weights were drawn, if the features have such
                backbone = load_backbone(parse(BackboneConfig, settings["backbone"]))
            origin.check(backbone.provenance())
            return cls(backbone, image=settings["image"], text=settings["text"])
        except (VacsrError, ValueError, KeyError, TypeError) as error:
            message = f"the model was trained on features of {origin.backbone}, which cannot be used here ({error})"
            raise DataError(f"{message} — put the encoders where they were, or give features") from error

    def provenance(self) -> Provenance:
        """Where the features come from, with what loads the encoders again: ids, or folders of this machine."""
        config = self.backbone.config
        scheme, _, names = config.spec.partition(":")
        folders = [str(folder.resolve()) if (folder := local_folder(name)) else name for name in names.split(",")]
        changed = config.model_copy(update={"spec": f"{scheme}:{','.join(folders)}"}).model_dump(exclude_defaults=True)
        settings = json.dumps({"backbone": changed, **self.pooling})
        return replace(self.backbone.provenance(), encoder=settings)

    @torch.no_grad()
    def images(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] -> [B, D], of length 1"""
        return functional.normalize(self.image_pool(self.backbone.encode_images(pixels)), dim=-1)

    @torch.no_grad()
    def texts(self, ids: Tensor) -> Tensor:
        """Rows of :meth:`Backbone.tokenize` [B, L] -> [B, D], of length 1"""
        return functional.normalize(self.text_pool(self.backbone.encode_texts(ids)), dim=-1)


class FeatureBackbone(Backbone):
    """Cached features as tokens of length one; only their scaling is left to do.

    Photos and captions are read too where it is known which encoders the features came from. These are loaded when they
    are needed, and not saved with the model.
    """

    cached = True

    def __init__(self, config: BackboneConfig, source: Source) -> None:
        super().__init__(config, image_dim=source.image_dim, text_dim=source.text_dim)
        self.pooling = "cls"  # any pooling gives the one token back; this one has no weights
        self._encoders: list[FeatureEncoder] = []  # a list, so that its weights are not this module's
        self.image = FeatureScaling(source.image_dim, config.image_scaling)
        self.text = FeatureScaling(source.text_dim, config.text_scaling)

    def fit(self, pairs: Any) -> None:
        if hasattr(pairs, "photos"):
            message = "backbone 'features:' takes cached embeddings, these data are photos"
            raise UsageError(f"{message} — set backbone.spec to clip:…, towers:… or tiny:, or run vacsr embed first")
        self.image.fit(pairs.images)
        self.text.fit(pairs.texts)

    @property
    def reads_photos(self) -> bool:
        return bool(self.origin.encoder)

    @property
    def transform(self) -> PhotoTransform:  # type: ignore[override]
        return self._encoder().backbone.transform

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        return self._encoder().backbone.tokenize(captions) if self.reads_photos else super().tokenize(captions)

    def _encoder(self, device: torch.device | None = None) -> FeatureEncoder:
        if not self._encoders:
            self._encoders.append(FeatureEncoder.from_provenance(self.origin))
        return self._encoders[0].to(device)

    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        if images.ndim == 4:
            images = self._encoder(images.device).images(images)
        if mix is not None:
            images = blend(images, images.flip(0) if mix.images is None else mix.images, mix.mixture)
        return _one_token(self.image(images))

    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        if not texts.is_floating_point():
            texts = self._encoder(texts.device).texts(texts)
        return _one_token(self.text(texts))


def _one_token(features: Tensor) -> Tokens:
    """[N, D] -> [N, 1, D]; a variance is made from the same features."""
    first = torch.zeros_like(features[:, 0], dtype=torch.int64)  # len would fix the number in an exported graph
    values = features.unsqueeze(1)
    return Tokens(values, torch.ones_like(first, dtype=torch.bool).unsqueeze(1), first, spread=values)


FEATURES = Scheme("features: (cached embeddings)", FeatureBackbone, cached=True)
