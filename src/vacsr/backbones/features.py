"""Cached embeddings as a backbone without towers: only their scaling is left to do."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.errors import ShapeMismatch


class FeatureScaling(nn.Module):
    """Brings one modality's features to about unit deviation; the training statistics are kept with the model."""

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
        varies = std > 1e-6 * std.max()
        self.factor.copy_(torch.where(varies, 1.0 / torch.where(varies, std, 1.0), torch.ones_like(std)))

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


class FeatureBackbone(nn.Module):
    """The two scalings, as a backbone whose inputs are feature vectors."""

    def __init__(self, image_dim: int, text_dim: int, *, image_scaling: str, text_scaling: str) -> None:
        super().__init__()
        self.image_dim, self.text_dim = image_dim, text_dim
        self.image = FeatureScaling(image_dim, image_scaling)
        self.text = FeatureScaling(text_dim, text_scaling)

    def fit(self, images: Tensor, texts: Tensor) -> None:
        """Take the scaling statistics from the training set."""
        self.image.fit(images)
        self.text.fit(texts)

    def encode_image(self, images: Tensor) -> Tensor:
        """[N, image_dim] -> [N, image_dim]"""
        out: Tensor = self.image(images)
        return out

    def encode_text(self, texts: Tensor) -> Tensor:
        """[M, text_dim] -> [M, text_dim]"""
        out: Tensor = self.text(texts)
        return out
