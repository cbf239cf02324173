"""A few-shot model folder: what was learned, and what it takes to put it onto its CLIP again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.config import BackboneConfig
from vacsr.config.fewshot import AnyFewshotConfig, FewshotRecipe
from vacsr.config.io import parse
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods.fewshot import ClassSet, FewshotMethod
from vacsr.methods.saved import SCHEMA, config_digest, model_folder, read_config
from vacsr.provenance import Provenance
from vacsr.scoring import choose_device
from vacsr.train.fewshot.build import Built, build
from vacsr.train.precision import matmul_precision

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_PHOTOS = 100  # at a time


class Predicted(NamedTuple):
    """What a model says of N photos over C classes, on the processor."""

    names: tuple[str, ...]
    """[C] the classes, in the order of the columns."""
    probabilities: Tensor
    """[N, C] each row adds up to 1."""
    uncertainty: Tensor | None
    """[N, C] σ of every pair of photo and class; None where the method has none."""

    def best(self) -> list[str]:
        """[N] the likeliest class of each photo."""
        return [self.names[place] for place in self.probabilities.argmax(dim=1).tolist()]


class LoadedFewshot(NamedTuple):
    """A trained method, and the classes it was trained on; it takes others too, by their names."""

    method: FewshotMethod
    classes: ClassSet
    transform: PhotoTransform
    """How photos are made for it."""

    @torch.no_grad()
    def predict(self, photos: Sequence[Image.Image], names: Sequence[str] | None = None) -> Predicted:
        """Photos against the classes of training, or against others by their names, in float32 as reports are made."""
        if not len(photos):
            raise UsageError("no photos to predict — give a list of PIL images")
        device = next(self.method.parameters()).device
        classes = self.classes if names is None else _by_name(self.classes, names)
        logits, sigmas = [], []
        with matmul_precision("fp32"):
            prepared = self.method.prepared(classes)
            for start in range(0, len(photos), _PHOTOS):
                pixels = torch.stack([self.transform.pixels(photo) for photo in photos[start : start + _PHOTOS]])
                found, sigma = self.method.scored(self.transform.normalize(pixels.to(device)), prepared)
                logits.append(found.double().softmax(dim=1).float().cpu())
                sigmas += [] if sigma is None else [sigma.float().cpu()]
        return Predicted(classes.names, torch.cat(logits), torch.cat(sigmas) if sigmas else None)


def _by_name(classes: ClassSet, names: Sequence[str]) -> ClassSet:
    """Other classes with the same sentence; the very same ones stay as they were trained."""
    if isinstance(names, str) or not names or any(not name.strip() for name in names):
        raise UsageError(f"classes {names!r} — give a list of names, as in ['red tree', 'blue fish']")
    return classes if tuple(names) == classes.names else ClassSet(tuple(names), classes.template)


def save_fewshot(folder: Path, built: Built, *, recipe: FewshotRecipe, classes: ClassSet) -> None:
    """Write config.json and model.safetensors, which holds what was learned and not the CLIP; both or neither."""
    described = {
        "schema": SCHEMA,
        "task": "fewshot",
        "backbone": _placed(recipe.backbone).model_dump(mode="json"),
        "origin": built.origin,
        "method": recipe.method.model_dump(mode="json"),
        "classes": list(classes.names),
        "template": classes.template,
        "sentences": [list(own) for own in classes.sentences],
    }
    with atomic_paths(folder / _WEIGHTS, folder / _CONFIG) as (weights, config):
        save_tensors(weights, built.method.saved(), metadata={"config": config_digest(described)})
        config.write_text(json_text(described), encoding="utf-8")


def _placed(backbone: BackboneConfig) -> BackboneConfig:
    """With a start that is found from any folder, not only from that in which training was begun."""
    start = str(Path(backbone.start).expanduser().resolve()) if backbone.start else ""
    return backbone.model_copy(update={"start": start})


def load_fewshot(run: str | Path, *, device: str = "auto", start: str | Path | None = None) -> LoadedFewshot:
    """Read a run or model folder of `vacsr fewshot`; its CLIP comes from where the recipe says, and must be as then.

    ``start`` says where the run that ``backbone.start`` named is now, if it has moved.
    """
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
    backbone = _found(parse(BackboneConfig, raw["backbone"]), start, folder=folder)
    built = build(method, backbone, classes=classes, seed=0, device=choose_device(device))
    Provenance(**raw["origin"]).check(Provenance(**built.origin))
    built.method.load(tensors)
    built.method.eval()
    return LoadedFewshot(built.method, classes, built.transform)


def _found(backbone: BackboneConfig, start: str | Path | None, *, folder: Path) -> BackboneConfig:
    """The backbone with its start in the place given or saved, if that is there."""
    if not backbone.start:
        if start is not None:
            raise UsageError(f"{folder} stands on {backbone.spec}, not on a trained run — leave start= out")
        return backbone
    placed = _placed(backbone if start is None else backbone.model_copy(update={"start": str(start)}))
    if not Path(placed.start).is_dir():
        message = f"{folder} stands on the towers of {placed.start}, which is not there"
        raise DataError(f"{message} — put that run back, or say where it is: load_fewshot(RUN, start=FOLDER)")
    return placed
