"""``towers:IMAGE,TEXT``: any two transformers checkpoints, one for photos and one for captions."""

from __future__ import annotations

from typing import Any

from vacsr.backbones.assets import read_backbone
from vacsr.backbones.base import Scheme, Source, TowerBackbone
from vacsr.backbones.hub import fresh_model, has_tokenizer, load_config, load_model, load_tokenizer, short_name
from vacsr.backbones.hub_towers import HubImageTower, HubTextTower, context_of, pad_id, side_of
from vacsr.backbones.preprocess import PhotoTransform
from vacsr.backbones.processor import own_transform
from vacsr.backbones.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer, choose_context
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

_DINOV2_SIDE = 224  # its table of positions is for 518, its image processor cuts 224


def load_towers(config: BackboneConfig) -> TowerBackbone:
    """The backbone of ``towers:IMAGE,TEXT``: folders or ids of a vision and of a text transformer.

    ``hidden`` and ``norm`` are tokens before and after the final norm where the architecture has one (ViT, DINOv2);
    where the blocks themselves end in a norm (BERT) both are the same. Tokens are projected only by a text tower
    that has a head of its own (SigLIP). Dropout and stochastic depth are off: what training drops is drawn by seed,
    outside the towers.
    """
    sources = _sources(config)
    image, transform = _image(sources[0], config)
    text = side_of(_model(load_config(sources[1]), sources[1], config), "text_model")
    tokenizer = _tokenizer(sources[1], config, text=text)
    first = isinstance(tokenizer, HubTokenizer) and tokenizer.classifies
    return TowerBackbone(
        image,
        HubTextTower(
            text, output=config.text_output, pad=pad_id(text, tokenizer), summary="first" if first else "last"
        ),
        tokenizer=tokenizer,
        transform=transform,
        config=config,
        name=f"towers:{short_name(sources[0])},{short_name(sources[1])}",
    )


def _image(source: str, config: BackboneConfig) -> tuple[HubImageTower, PhotoTransform]:
    described = load_config(source)
    vision = getattr(described, "vision_config", described)
    side = getattr(vision, "image_size", None)
    if side is None or not hasattr(vision, "patch_size"):
        raise UsageError(
            f"{source} ({described.model_type}) is not an image transformer with patches — give one such as DINOv2 or "
            "ViT first, the text tower second"
        )
    own = _DINOV2_SIDE if vision.model_type.startswith("dinov2") else side
    transform = own_transform(source, config, usual=PhotoTransform(own if isinstance(own, int) else own[0]))
    model = _model(described, source, config)
    return HubImageTower(model, output=config.image_output, size=transform.size), transform


def _model(described: Any, source: str, config: BackboneConfig) -> Any:
    return fresh_model(described) if config.weights == "random" else load_model(source, described)


def _tokenizer(source: str, config: BackboneConfig, *, text: Any) -> Tokenizer:
    own = context_of(text)
    if config.weights == "random" and not has_tokenizer(source):
        return ByteTokenizer(text.config.vocab_size, context=choose_context(config.context, own=own))
    tokenizer = load_tokenizer(source)
    own = min(own, int(tokenizer.model_max_length))
    return HubTokenizer(tokenizer, context=choose_context(config.context, own=own))


def _load(config: BackboneConfig, source: Source) -> TowerBackbone:
    return load_towers(config) if source.assets is None else read_backbone(config, source.assets)


def _check(config: BackboneConfig) -> None:
    _sources(config)
    if config.image_output == "projected":  # a text tower may have a head of its own (SigLIP)
        raise UsageError("towers: has no projection per token of images — set image_output to norm or hidden")


def _sources(config: BackboneConfig) -> list[str]:
    sources = [part.strip() for part in config.spec.partition(":")[2].split(",")]
    if len(sources) != 2 or not all(sources):
        raise UsageError(f"{config.spec!r} does not name two towers — write towers:IMAGE,TEXT (folders or ids)")
    return sources


SCHEME = Scheme("towers:IMAGE,TEXT", _load, _check, pretrained=True)
