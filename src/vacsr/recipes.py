"""Reading and writing recipes: YAML, what one builds on, presets, dotted overrides, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from vacsr.config import Config, MethodConfig, Recipe
from vacsr.config.base import method_entry
from vacsr.config.strict_yaml import RepeatedKey, load_yaml
from vacsr.errors import ConfigError

C = TypeVar("C", bound=Config)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` on top; mappings merge field by field, everything else is replaced.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def method_section(raw: Any) -> dict[str, Any]:
    """A recipe's method section as fields: `vacsr-paper`, also as a name among fields, is name and preset.

    >>> method_section("vacsr-paper")
    {'name': 'vacsr', 'preset': 'paper'}
    """
    if raw is not None and not isinstance(raw, str | Mapping):
        raise ConfigError(f"method: expected a name or fields such as {{name: vacsr, preset: paper}}, not {raw!r}")
    fields = {"name": raw} if isinstance(raw, str) else dict(raw or {})
    if fields.get("name") is not None:
        fields["name"], _, suffix = str(fields["name"]).partition("-")
        if suffix:
            fields.setdefault("preset", suffix)
    return fields


def layer_method(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One method section on top of another. Another name, or a preset, starts the method afresh.

    >>> layer_method({"name": "vacsr", "preset": "paper"}, {"objective": {"kl_weight": 0.0}})
    {'name': 'vacsr', 'preset': 'paper', 'objective': {'kl_weight': 0.0}}
    >>> layer_method({"name": "vacsr", "lr_scale": 0.5}, {"preset": "paper"})
    {'name': 'vacsr', 'preset': 'paper'}
    """
    before, now = below.get("name"), above.get("name")
    if before is not None and now is not None and now != before:
        return dict(above)
    if above.get("preset") is not None and "name" in below:
        return {"name": before, **above}
    return merge(below, above)


def resolve_method(raw: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Replace ``preset`` by its fields, explicit fields on top.

    >>> resolve_method("infonce-paper")
    {'scale': 1.0, 'name': 'infonce'}
    """
    fields = method_section(raw)
    name, preset = str(fields.pop("name", None) or "vacsr"), str(fields.pop("preset", None) or "default")
    presets = method_entry(name).presets
    if preset not in presets:
        raise ConfigError(f"method '{name}' has no preset '{preset}' — choose one of: {', '.join(presets)}")
    below = dict(presets[preset])
    if isinstance(fields.get("base"), Mapping) and "base" in below:  # a method within: another one starts afresh too
        fields["base"] = layer_method(below.pop("base"), fields["base"])
    return {**merge(below, fields), "name": name}


def method_config(method: str | Mapping[str, Any] | Config) -> MethodConfig:
    """The typed config of a method given by name (`vacsr`, `vacsr-paper`), mapping or config."""
    if isinstance(method, MethodConfig):
        return method
    if isinstance(method, Config):
        raise ConfigError(f"{type(method).__name__} is not a method's config — derive it from MethodConfig")
    fields = resolve_method(method)
    return parse(method_entry(fields["name"]).config, fields, within="method")


def parse(kind: type[C], raw: Mapping[str, Any], *, within: str = "") -> C:
    """Validate ``raw`` as ``kind``; every problem is named by its dotted field, below the section ``within``."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        above = (within,) if within else ()
        lines = [f"  {'.'.join(map(str, (*above, *item['loc'])))}: {item['msg']}" for item in error.errors()]
        raise ConfigError("the configuration does not fit:\n" + "\n".join(lines)) from error


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``["train.epochs=3", "method.name=sigmoid"]`` as a nested mapping; values are YAML.

    >>> parse_overrides(["train.lr=1e-3", "train.trackers=[jsonl, csv]"])
    {'train': {'lr': 0.001, 'trackers': ['jsonl', 'csv']}}
    """
    result: dict[str, Any] = {}
    for item in overrides:
        path, mark, text = item.partition("=")
        if not mark or not path.strip():
            raise ConfigError(f"override '{item}' is not of the form section.field=value")
        leaf: Any = _scalar(text)
        for part in reversed(path.strip().split(".")):
            leaf = {part: leaf}
        result = merge(result, leaf)
    return result


def _scalar(text: str) -> Any:
    """YAML 1.1 reads 1e-3 as a string, and `tiny:` as a mapping; people mean a number, and the name of towers."""
    if not text.strip():
        return ""
    if re.fullmatch(r"\S+:", text):
        return text
    if "e" in text.lower():
        with suppress(ValueError):
            return float(text)
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a day that no month has
        raise ConfigError(f"cannot read the value '{text}': {error}") from error


def layered_recipe(*layers: Mapping[str, Any]) -> Recipe:
    """A recipe from several parsed YAML mappings, later ones on top."""
    whole: dict[str, Any] = {}
    method: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise ConfigError(f"expected sections such as data, method and train, not {layer!r}")
        method = layer_method(method, method_section(layer.get("method")))
        whole = merge(whole, {key: value for key, value in layer.items() if key != "method"})
    return parse(Recipe, {**whole, "method": resolve_method(method)})


def recipe_from(raw: Mapping[str, Any] | None, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from parsed YAML and dotted overrides."""
    return layered_recipe(raw or {}, parse_overrides(overrides))


def read_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe file, on top of the one that its ``base:`` names, and dotted overrides on top of both."""
    return layered_recipe(*recipe_layers(path), parse_overrides(overrides))


def recipe_layers(path: Path) -> list[dict[str, Any]]:
    """The fields of a recipe file after those of its base and of the base's base, the furthest first."""
    layers: list[dict[str, Any]] = []
    chain: list[Path] = []
    place: Path | None = path
    while place is not None:
        if place.resolve() in [seen.resolve() for seen in chain]:
            names = " → ".join(str(step) for step in (*chain, place))
            raise ConfigError(f"recipes build on each other in a circle: {names} — take base: out of one of them")
        chain.append(place)
        fields = _read_base(chain)
        place = _base_of(fields, place)
        layers.insert(0, {name: value for name, value in fields.items() if name != "base"})
    return layers


def _read_base(chain: list[Path]) -> dict[str, Any]:
    """The last file of the chain; what is wrong with a base is told with the recipe that asks for it."""
    *before, path = chain
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"the base of {before[-1]}: {error}" if before else str(error)) from error


def _base_of(fields: Mapping[str, Any], path: Path) -> Path | None:
    """Where the recipe at ``path`` says it builds on, relative to its own folder; None where it builds on nothing."""
    if "base" not in fields:
        return None
    name = fields["base"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: base is {name!r}, expected a recipe beside it — write base: other.yaml")
    return path.parent / Path(name).expanduser()


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that must hold a mapping."""
    try:
        value = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path} — give the path of a YAML file") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} — give the path of a YAML file") from error
    except RepeatedKey as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold sections such as data, method and train, not {type(value).__name__}")
    return value


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML text."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
