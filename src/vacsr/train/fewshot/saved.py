"""A few-shot model folder: what was learned, and what it takes to put it onto its CLIP again."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.config import BackboneConfig
from vacsr.config.fewshot import AnyFewshotConfig, FewshotRecipe
from vacsr.data.provenance import Provenance
from vacsr.errors import DataError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods.fewshot import ClassSet, FewshotMethod
from vacsr.methods.saved import SCHEMA, config_digest, model_folder, read_config
from vacsr.recipes import parse
from vacsr.scoring import choose_device
from vacsr.train.fewshot.build import Built, build

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


class LoadedFewshot(NamedTuple):
    """A trained method, and the classes it was trained on; it takes others too, by ``method.prepared``."""

    method: FewshotMethod
    classes: ClassSet
    transform: PhotoTransform
    """How photos are made for it."""


def save_fewshot(folder: Path, built: Built, *, recipe: FewshotRecipe, classes: ClassSet) -> None:
    """Write config.json and model.safetensors, which holds what was learned and not the CLIP; both or neither."""
    described = {
        "schema": SCHEMA,
        "task": "fewshot",
        "backbone": recipe.backbone.model_dump(mode="json"),
        "origin": built.origin,
        "method": recipe.method.model_dump(mode="json"),
        "classes": list(classes.names),
        "template": classes.template,
        "sentences": [list(own) for own in classes.sentences],
    }
    with atomic_paths(folder / _WEIGHTS, folder / _CONFIG) as (weights, config):
        save_tensors(weights, built.method.saved(), metadata={"config": config_digest(described)})
        config.write_text(json_text(described), encoding="utf-8")


def load_fewshot(run: str | Path, *, device: str = "auto") -> LoadedFewshot:
    """Read a run or model folder of `vacsr fewshot`; its CLIP comes from where the recipe says, and must be as then."""
    try:
        folder = model_folder(Path(run).expanduser())
    except DataError as error:
        raise DataError(f"no few-shot model in {run} — train one: vacsr fewshot RECIPE.yaml --out {run}") from error
    raw = read_config(folder / _CONFIG)
    if raw.get("task") != "fewshot":
        raise DataError(f"{folder} is no few-shot model — give a run of vacsr fewshot")
    tensors, metadata = read_tensors(folder / _WEIGHTS)
    if metadata.get("config") != config_digest(raw):
        raise DataError(f"{folder}: {_CONFIG} and the weights were not saved together — run vacsr fewshot again")
    classes = ClassSet(tuple(raw["classes"]), raw["template"], tuple(tuple(own) for own in raw["sentences"]))
    method: AnyFewshotConfig = parse(FewshotRecipe, {"method": raw["method"]}).method
    backbone = parse(BackboneConfig, raw["backbone"])
    built = build(method, backbone, classes=classes, seed=0, device=choose_device(device))
    Provenance(**raw["origin"]).check(Provenance(**built.origin))
    built.method.load(tensors)
    built.method.eval()
    return LoadedFewshot(built.method, classes, built.transform)
