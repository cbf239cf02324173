"""Building a backbone from what :meth:`TowerBackbone.save_assets` wrote; its weights are then loaded by the caller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vacsr.backbones.base import ASSETS, TowerBackbone
from vacsr.backbones.preprocess import PhotoTransform
from vacsr.backbones.tokenizers import WordTokenizer, read_tokenizer
from vacsr.config import BackboneConfig
from vacsr.errors import DataError


def read_backbone(config: BackboneConfig, folder: Path) -> TowerBackbone:
    """The same architecture, tokenizer and transform with fresh weights; needs no network and no checkpoint."""
    path = folder / ASSETS
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        transform = _transform(saved["transform"])
        if isinstance(tokenizer := read_tokenizer(saved["tokenizer"], folder), WordTokenizer):
            return _tiny(config, saved, tokenizer=tokenizer, transform=transform)
        image, text = _hub_towers(saved)
        return TowerBackbone(
            image, text, tokenizer=tokenizer, transform=transform, config=config, name=str(saved["name"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not describe a backbone ({error!r}) — save the model again") from error


def _transform(saved: Mapping[str, Any]) -> PhotoTransform:
    return PhotoTransform(**{**saved, "mean": tuple(saved["mean"]), "std": tuple(saved["std"])})


def _tiny(
    config: BackboneConfig, saved: Mapping[str, Any], *, tokenizer: WordTokenizer, transform: PhotoTransform
) -> TowerBackbone:
    from vacsr.backbones.tiny import TinyConfig, build_tiny

    return build_tiny(config, TinyConfig(**saved["image"]), tokenizer=tokenizer, transform=transform)


def _hub_towers(saved: Mapping[str, Any]) -> tuple[Any, Any]:
    from vacsr.backbones.hub import fresh_model, read_config
    from vacsr.backbones.hub_towers import HubImageTower, HubTextTower, clip_projection

    image, text = saved["image"], saved["text"]
    models = [fresh_model(read_config(side["config"])) for side in (image, text)]
    widths = [int(side["config"]["hidden_size"]) for side in (image, text)]
    return (
        HubImageTower(
            models[0],
            output=image["output"],
            size=int(models[0].config.image_size),
            projection=clip_projection(widths[0], image["projection"]),
        ),
        HubTextTower(
            models[1],
            output=text["output"],
            pad=text["pad"],
            summary=text["summary"],
            projection=clip_projection(widths[1], text["projection"]),
        ),
    )
