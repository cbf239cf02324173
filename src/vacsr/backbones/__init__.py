"""Towers: from an image or a text to a feature vector, by a scheme such as ``features:``."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vacsr.backbones.features import FeatureBackbone
from vacsr.backbones.heads import ProjectionHead
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

__all__ = ["Backbone", "FeatureBackbone", "ProjectionHead", "load_backbone"]


class Backbone(Protocol):
    """What every pair of towers offers; an nn.Module."""

    image_dim: int
    text_dim: int

    def fit(self, images: Tensor, texts: Tensor) -> None:
        """Take what statistics it needs from the training inputs."""

    def encode_image(self, images: Tensor) -> Tensor:
        """[N, ...] -> [N, image_dim]"""

    def encode_text(self, texts: Tensor) -> Tensor:
        """[M, ...] -> [M, text_dim]"""


def load_backbone(config: BackboneConfig, *, image_dim: int, text_dim: int) -> FeatureBackbone:
    """The backbone that ``config.spec`` names."""
    scheme = config.spec.partition(":")[0]
    if scheme != "features":
        raise UsageError(f"unknown backbone '{config.spec}' — this release takes 'features:' (cached embeddings)")
    return FeatureBackbone(image_dim, text_dim, image_scaling=config.image_scaling, text_scaling=config.text_scaling)
