"""Few-shot recipes from YAML: the same layers and overrides as other recipes, and each paper's plan beneath them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vacsr.config.fewshot import FEWSHOT_METHODS, VACSR_READINGS, FewshotRecipe, published
from vacsr.config.io import merge, merge_layers, parse, parse_overrides, recipe_layers
from vacsr.data.fewshot.specs import nearest, parse_class_spec
from vacsr.errors import ConfigError

_DEFAULT = FewshotRecipe()


def read_fewshot(path: Path, overrides: Iterable[str] = ()) -> FewshotRecipe:
    """A recipe file, on top of the one that its ``base:`` names, and dotted overrides on top of both."""
    return layered_fewshot(*recipe_layers(path), parse_overrides(overrides))


def fewshot_from(raw: Mapping[str, Any] | None, overrides: Iterable[str] = ()) -> FewshotRecipe:
    """A recipe from parsed YAML and dotted overrides."""
    return layered_fewshot(raw or {}, parse_overrides(overrides))


def layered_fewshot(*layers: Mapping[str, Any]) -> FewshotRecipe:
    """A recipe from several parsed YAML mappings, later ones on top; below all of them what the paper sets."""
    whole = merge_layers(*layers)
    method = whole.pop("method")
    name = str(method.setdefault("name", _DEFAULT.method.name))
    if name not in FEWSHOT_METHODS:
        hint = nearest(name, FEWSHOT_METHODS)
        raise ConfigError(f"unknown few-shot method '{name}'{hint} — choose one of: {', '.join(FEWSHOT_METHODS)}")
    _default_backbone(whole)
    return _parsed(_planned({**whole, "method": _read_as(method)}), name)


def _read_as(method: dict[str, Any]) -> dict[str, Any]:
    """`vacsr-paper` is the adapter and the loss as printed, as in retrieval; other methods have one reading."""
    preset = str(method.pop("preset", None) or "default")
    if preset not in VACSR_READINGS:
        choices = ", ".join(VACSR_READINGS)
        raise ConfigError(f"method '{method['name']}' has no preset '{preset}' — choose one of: {choices}")
    return merge(VACSR_READINGS[preset], method) if method["name"] == "vacsr" else method


def _planned(raw: dict[str, Any]) -> dict[str, Any]:
    """With the paper's plan below what is written, where that is asked for."""
    data, train = raw.get("data", {}), raw.get("train", {})
    if raw.get("preset", "paper") != "paper" or not isinstance(data, Mapping) or not isinstance(train, Mapping):
        return raw
    dataset = dataset_of(str(data.get("spec", _DEFAULT.data.spec)))
    plan = published(raw["method"]["name"], dataset, str(data.get("protocol", _DEFAULT.data.protocol)))
    return {**raw, "method": merge(plan["method"], raw["method"]), "train": merge(plan["train"], train)}


def dataset_of(spec: str) -> str:
    """What plans call a data set: the name of a public one, or the scheme.

    >>> dataset_of("coop:data,set=dtd"), dataset_of("scenes:classes=24")
    ('dtd', 'scenes')
    """
    parsed = parse_class_spec(spec)
    return parsed.options.get("set", "") if parsed.scheme == "coop" else parsed.scheme


def _default_backbone(whole: dict[str, Any]) -> None:
    """Other recipes begin with cached features, which have nothing to prompt; these begin with a CLIP."""
    backbone = whole.get("backbone", {})
    if isinstance(backbone, Mapping) and not backbone.get("spec") and not backbone.get("start"):
        whole["backbone"] = {**backbone, "spec": _DEFAULT.backbone.spec}


def _parsed(raw: Mapping[str, Any], name: str) -> FewshotRecipe:
    """Fields are named as a person types them: the method's name, which tells the union apart, is not part of them."""
    try:
        return parse(FewshotRecipe, raw)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"  method.{name}.", "  method.")) from error
