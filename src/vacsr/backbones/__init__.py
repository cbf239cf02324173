"""Towers: from photos and captions to tokens and vectors, by a scheme such as ``clip:`` or ``features:``."""

from __future__ import annotations

from pathlib import Path

from vacsr.backbones.base import TowerBackbone, TowerParams
from vacsr.backbones.features import FeatureBackbone
from vacsr.backbones.heads import ProjectionHead
from vacsr.backbones.pooling import build_pooling
from vacsr.backbones.tokens import Tokens
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

__all__ = [
    "FeatureBackbone",
    "ProjectionHead",
    "Tokens",
    "TowerBackbone",
    "TowerParams",
    "build_pooling",
    "load_backbone",
]


def load_backbone(
    config: BackboneConfig, *, image_dim: int = 0, text_dim: int = 0, assets: Path | None = None
) -> FeatureBackbone | TowerBackbone:
    """The backbone that ``config.spec`` names; cached features need their dimensions.

    With ``assets``, a folder that :meth:`TowerBackbone.save_assets` wrote, towers come with fresh weights and the
    caller loads the trained ones.
    """
    scheme = config.spec.partition(":")[0]
    if scheme == "features":
        scaling = {"image_scaling": config.image_scaling, "text_scaling": config.text_scaling}
        return FeatureBackbone(image_dim, text_dim, **scaling)
    if scheme not in ("clip", "towers", "tiny"):
        raise UsageError(
            f"unknown backbone '{config.spec}' — write features: (cached embeddings), clip:ID_OR_FOLDER, "
            "towers:IMAGE,TEXT or tiny:"
        )
    return _towers(config, scheme, assets=assets)


def _towers(config: BackboneConfig, scheme: str, *, assets: Path | None) -> TowerBackbone:
    """Each scheme in its own file, read when it is asked for."""
    if assets is not None:
        from vacsr.backbones.assets import read_backbone

        return read_backbone(config, assets)
    if scheme == "clip":
        from vacsr.backbones.clip import load_clip

        return load_clip(config)
    if scheme == "towers":
        from vacsr.backbones.towers import load_towers

        return load_towers(config)
    from vacsr.backbones.tiny import load_tiny

    return load_tiny(config)
