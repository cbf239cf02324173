"""``clip:``: both towers of one CLIP or SigLIP checkpoint, by id or folder."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from vacsr.backbones.assets import read_backbone
from vacsr.backbones.base import Scheme, Source, TowerBackbone
from vacsr.backbones.hub import fresh_model, has_tokenizer, load_config, load_model, load_tokenizer, short_name
from vacsr.backbones.hub_towers import HubImageTower, HubTextTower, clip_projection, context_of, pad_id
from vacsr.backbones.preprocess import CLIP_MEAN, CLIP_STD, PhotoTransform
from vacsr.backbones.processor import own_transform
from vacsr.backbones.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer, choose_context
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

_BUILT_IN = {"vit-b32": ("openai/clip-vit-base-patch32", 32), "vit-b16": ("openai/clip-vit-base-patch16", 16)}
_STATISTICS = {"clip": (CLIP_MEAN, CLIP_STD), "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}


class _Models(NamedTuple):
    image: Any
    text: Any
    image_projection: nn.Module | None
    text_projection: nn.Module | None


def load_clip(config: BackboneConfig) -> TowerBackbone:
    """The backbone of ``clip:ID_OR_FOLDER``; ``clip:vit-b32`` and ``clip:vit-b16`` are OpenAI's, by a short name.

    With random weights these two need no download. SigLIP has no class token, so it is pooled by ``gpo`` or ``mean``;
    its captions are filled up to its context with padding that it attends to, as in its training.
    """
    _check(config)
    given = config.spec.partition(":")[2].strip()
    source, patch = _BUILT_IN.get(given, (given, 0))
    fresh = config.weights == "random"
    offline = fresh and patch > 0
    described = _openai(patch) if offline else _described(source)
    mean, std = _STATISTICS[described.model_type]
    usual = PhotoTransform(described.vision_config.image_size, mean, std)
    transform = own_transform("" if offline else source, config, usual=usual)
    models = _fresh(described, size=transform.size) if fresh else _pretrained(source, described)
    stand_in = offline or (fresh and not has_tokenizer(source))
    tokenizer = _tokenizer("" if stand_in else source, config, text=models.text)
    return TowerBackbone(
        HubImageTower(
            models.image, output=config.image_output, size=transform.size, projection=models.image_projection
        ),
        HubTextTower(
            models.text,
            output=config.text_output,
            pad=pad_id(models.text, tokenizer),
            summary="last",
            projection=models.text_projection,
        ),
        tokenizer=tokenizer,
        transform=transform,
        config=config,
        name=f"clip:{short_name(source)}",
    )


def _described(source: str) -> Any:
    """The checkpoint's configuration, if it is of a family this file knows."""
    described = load_config(source)
    if described.model_type not in _STATISTICS:
        message = f"{source} is of type {described.model_type!r}, clip: takes CLIP and SigLIP"
        raise UsageError(f"{message} — for two towers of any kind write towers:IMAGE,TEXT")
    return described


def _openai(patch: int) -> Any:
    """OpenAI's ViT-B with this patch size, from its paper and released configuration."""
    from vacsr.backbones.hub import read_config

    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    text = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    return read_config(
        {
            "model_type": "clip",
            "projection_dim": 512,
            "vision_config": {**vision, "image_size": 224, "patch_size": patch},
            "text_config": {**text, "vocab_size": 49408, "max_position_embeddings": 77},
        }
    )


def _fresh(described: Any, *, size: int) -> _Models:
    """Random weights, built for photos of this side."""
    vision, text = described.vision_config, described.text_config
    vision.image_size = size
    projected = getattr(described, "projection_dim", 0) if described.model_type == "clip" else 0
    return _Models(
        fresh_model(vision),
        fresh_model(text),
        clip_projection(vision.hidden_size, projected),
        clip_projection(text.hidden_size, projected),
    )


def _pretrained(source: str, described: Any) -> _Models:
    """The checkpoint's two towers and, of CLIP, their projections; its logit scale stays behind."""
    model = load_model(source, described)
    projections = [getattr(model, name, None) for name in ("visual_projection", "text_projection")]
    return _Models(model.vision_model, model.text_model, projections[0], projections[1])


def _tokenizer(source: str, config: BackboneConfig, *, text: Any) -> Tokenizer:
    """The checkpoint's own; bytes where there is none, for random weights only."""
    own = context_of(text)
    if not source:
        return ByteTokenizer(text.config.vocab_size, context=choose_context(config.context, own=own))
    return HubTokenizer(load_tokenizer(source), context=choose_context(config.context, own=own))


def _load(config: BackboneConfig, source: Source) -> TowerBackbone:
    return load_clip(config) if source.assets is None else read_backbone(config, source.assets)


def _check(config: BackboneConfig) -> None:
    if not config.spec.partition(":")[2].strip():
        raise UsageError("clip: names no checkpoint — write clip:vit-b32, clip:ID or clip:FOLDER")


SCHEME = Scheme("clip:ID_OR_FOLDER", _load, _check, pretrained=True, matched=True)
