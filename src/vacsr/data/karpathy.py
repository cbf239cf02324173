"""Karpathy's split files (``dataset_coco.json``, ``dataset_flickr8k.json``), by which most retrieval is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.config.io import load_json
from vacsr.errors import DataError

SPLITS = {"train": "train", "restval": "train", "val": "dev", "test": "test"}
"""Karpathy's names and ours: what COCO's validation photos have left over is trained on too."""


class KarpathyImage(NamedTuple):
    """One photo of a split file."""

    filename: str
    folder: str
    """``filepath``: the COCO folder, "" elsewhere."""
    split: str
    """Ours."""
    cocoid: int | None
    sentences: tuple[str, ...]
    sentids: tuple[int, ...]


def read_karpathy(path: Path) -> list[KarpathyImage]:
    """Every photo of a split file, in its order."""
    images = read_json(path, keys=("images",))["images"]
    try:
        return [_image(entry) for entry in images]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{path} is not one of Karpathy's split files ({type(error).__name__}: {error})"
        raise DataError(f"{message} — expected images with filename, split and sentences: copy it again") from error


def read_json(path: Path, *, keys: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object that has these keys, each with a list."""
    try:
        value = load_json(path.read_text(encoding="utf-8-sig"), source=path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}) — copy it again") from error
    lists = isinstance(value, dict) and all(isinstance(value.get(key), list) for key in keys)
    if not lists:
        raise DataError(f"{path} does not hold lists {' and '.join(keys)} — give the file as it was published")
    return dict(value)


def _image(entry: Mapping[str, Any]) -> KarpathyImage:
    split = entry["split"]
    if split not in SPLITS:
        raise ValueError(f"split {split!r} of {entry['filename']}")
    sentences = entry["sentences"]
    return KarpathyImage(
        filename=str(entry["filename"]),
        folder=str(entry.get("filepath", "")),
        split=SPLITS[split],
        cocoid=int(entry["cocoid"]) if "cocoid" in entry else None,
        sentences=tuple(str(sentence["raw"]) for sentence in sentences),
        sentids=tuple(int(sentence["sentid"]) for sentence in sentences),
    )
