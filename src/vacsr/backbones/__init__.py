"""Backbones: from photos and captions to tokens, by a scheme such as ``clip:`` or ``features:``.

A backbone is one file that defines a :class:`Scheme` and one line in :data:`SCHEMES`.
"""

from pathlib import Path

from vacsr.backbones import huggingface, tiny
from vacsr.backbones.base import FEATURES, Backbone, Scheme, Source, Tokens
from vacsr.backbones.heads import ProjectionHead, build_pooling
from vacsr.backbones.towers import TowerBackbone
from vacsr.config import BackboneConfig
from vacsr.errors import DataError, UsageError

__all__ = ["Backbone", "ProjectionHead", "Tokens", "TowerBackbone", "build_pooling", "load_backbone", "scheme_of"]

SCHEMES: dict[str, Scheme] = {
    "features": FEATURES,
    "clip": huggingface.CLIP,
    "towers": huggingface.TOWERS,
    "tiny": tiny.SCHEME,
}


def scheme_of(spec: str) -> Scheme:
    """The scheme of ``backbone.spec``."""
    scheme = SCHEMES.get(spec.partition(":")[0])
    if scheme is None:
        raise UsageError(f"unknown backbone '{spec}' — write {', '.join(one.usage for one in SCHEMES.values())}")
    return scheme


def load_backbone(
    config: BackboneConfig, *, image_dim: int = 0, text_dim: int = 0, assets: Path | None = None
) -> Backbone:
    """The backbone that ``config.spec`` names; cached features need their dimensions.

    With ``assets``, a folder that :meth:`Backbone.save_assets` wrote, towers come with fresh weights and the caller
    loads the trained ones.
    """
    scheme = scheme_of(config.spec)
    if config.lora.rank and not scheme.pretrained:
        message = f"backbone.lora.rank={config.lora.rank}: '{config.spec}' has no pretrained towers to adapt"
        raise UsageError(f"{message} — set it to 0, or use clip:ID_OR_FOLDER or towers:IMAGE,TEXT")
    try:
        return scheme.load(config, Source(image_dim, text_dim, assets))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if assets is None:
            raise
        raise DataError(f"{assets} does not describe a backbone ({error!r}) — save the model again") from error
