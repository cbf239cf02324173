"""``features:``: cached embeddings as a backbone without towers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.augment import Partners, blend
from vacsr.backbones.base import Backbone, Scheme, Source, Tokens
from vacsr.config import BackboneConfig
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.noise import RowNoise


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
            raise ShapeMismatch(
                f"the model expects features of dimension {self.dim}, these have {x.shape[-1]} — "
                "use the embeddings of the backbone it was trained on, or train on these"
            )
        if self.kind == "unit":
            return functional.normalize(x, dim=-1) * math.sqrt(self.dim)
        return (x - self.shift) * self.factor if self.kind == "standardize" else x


class FeatureBackbone(Backbone):
    """Cached features as tokens of length one; only their scaling is left to do."""

    cached = True

    def __init__(self, config: BackboneConfig, source: Source) -> None:
        super().__init__(config, image_dim=source.image_dim, text_dim=source.text_dim)
        self.pooling = "cls"  # any pooling gives the one token back; this one has no weights
        self.image = FeatureScaling(source.image_dim, config.image_scaling)
        self.text = FeatureScaling(source.text_dim, config.text_scaling)

    def fit(self, pairs: Any) -> None:
        if hasattr(pairs, "photos"):
            raise UsageError(
                "backbone 'features:' takes cached embeddings, these data are photos — set backbone.spec to clip:…, "
                "towers:… or tiny:, or embed them first: vacsr embed"
            )
        self.image.fit(pairs.images)
        self.text.fit(pairs.texts)

    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        if mix is not None:
            images = blend(images, images.flip(0) if mix.images is None else mix.images, mix.mixture)
        return _one_token(self.image(images))

    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        return _one_token(self.text(texts))


def _one_token(features: Tensor) -> Tokens:
    """[N, D] -> [N, 1, D]; a variance is made from the same features."""
    first = torch.zeros(len(features), dtype=torch.int64, device=features.device)
    values = features.unsqueeze(1)
    return Tokens(values, torch.ones_like(first, dtype=torch.bool).unsqueeze(1), first, spread=values)


SCHEME = Scheme("features: (cached embeddings)", FeatureBackbone, cached=True)
