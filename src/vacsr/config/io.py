"""Recipes as files: YAML, a recipe on top of its base, presets, dotted overrides, errors that name the field."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from vacsr.config.base import Config, MethodConfig, Task, config_error, method_entry
from vacsr.config.recipe import Recipe
from vacsr.errors import ConfigError, DataError
from vacsr.files import read_text

C = TypeVar("C", bound=Config)


MAX_YAML = 1 << 20  # bytes of a YAML file
MAX_VALUES = 100_000  # of a YAML file with every alias (`*name`) written out: a few lines can stand for billions


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, a duplicate key is an error, and so are aliases that multiply."""

    def get_single_node(self) -> yaml.Node | None:
        """Refuses what would be too large, before anything is built."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and next(islice(_written_out(node), MAX_VALUES, None), None) is not None:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, aliases written out — use fewer")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks the keys as written, before merge keys (`<<`) add those of other mappings."""
        node = super().compose_mapping_node(anchor)
        names: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in names:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"duplicate key '{key.value}' in line {line} — keep one of them")
                names.add((key.tag, key.value))
        return node


def _written_out(node: yaml.Node) -> Iterator[yaml.Node]:
    """A node and all below it, each as often as an alias names it; without end where a node holds itself."""
    yield node
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in item if isinstance(item, tuple) else (item,):
            yield from _written_out(part)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_yaml(text: str, *, source: object) -> Any:
    """Read YAML; what cannot be read is a :class:`ConfigError` that names its ``source``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist; nested too deep
        raise ConfigError(f"{source}: not readable YAML: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that must hold a mapping."""
    try:
        value = load_yaml(read_text(path, limit=MAX_YAML), source=path)
    except DataError as error:
        raise ConfigError(f"{error}, and give a YAML file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold sections such as data, method and train, not {type(value).__name__}")
    return value


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML text."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse(kind: type[C], raw: Mapping[str, Any], *, within: str = "") -> C:
    """Validate ``raw`` as ``kind``; every problem is named by its dotted field, below the section ``within``."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise config_error(error, "the configuration", *([within] if within else ())) from error


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` on top; mappings merge field by field, everything else is replaced.

    A mapping with another ``name`` is replaced too: the settings of one method are not those of another.
    """
    if base.get("name") is not None and changes.get("name") not in (None, base["name"]):
        return dict(changes)
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``["train.epochs=3", "method.name=sigmoid"]`` as a nested mapping; values are YAML."""
    result: dict[str, Any] = {}
    for item in overrides:
        path, mark, text = item.partition("=")
        if not mark or not path.strip():
            raise ConfigError(f"override '{item}' — write section.field=value")
        leaf: Any = text.strip()
        if leaf and not re.fullmatch(r"\S+:", text):  # `tiny:` is the name of a backbone and not a mapping
            leaf = load_yaml(text, source=f"override '{item}'")
        for part in reversed(path.strip().split(".")):
            leaf = {part: leaf}
        result = merge(result, leaf)
    return result


def method_section(raw: Any) -> dict[str, Any]:
    """A recipe's method section as fields; `vacsr-paper` stands for a name and a preset."""
    if raw is not None and not isinstance(raw, str | Mapping):
        raise ConfigError(f"method: expected a name or fields such as {{name: vacsr, preset: paper}}, not {raw!r:.60}")
    fields = {"name": raw} if isinstance(raw, str) else dict(raw or {})
    if fields.get("name") is not None:
        fields["name"], _, suffix = str(fields["name"]).partition("-")
        if suffix:
            fields.setdefault("preset", suffix)
    return fields


def merge_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Several parsed recipes as one, later ones on top. A method's preset starts from that method's defaults."""
    whole: dict[str, Any] = {"method": {}}
    for layer in layers:
        method = method_section(layer.get("method"))
        if method.get("preset") is not None and "name" in whole["method"]:
            whole["method"] = {"name": whole["method"]["name"]}
        whole = merge(whole, {**layer, "method": method})
    return whole


def resolve_method(raw: str | Mapping[str, Any] | None, *, task: Task = "retrieval") -> dict[str, Any]:
    """Replace ``preset`` by its fields, with explicit fields on top."""
    fields = method_section(raw)
    name, preset = str(fields.pop("name", None) or "vacsr"), str(fields.pop("preset", None) or "default")
    presets = method_entry(name, task=task).presets
    if preset not in presets:
        raise ConfigError(f"method '{name}' has no preset '{preset}' — choose one of: {', '.join(presets)}")
    return {**merge(presets[preset], fields), "name": name}


def method_config(method: str | Mapping[str, Any] | MethodConfig, *, task: Task = "retrieval") -> MethodConfig:
    """The typed config of a method given by name (`vacsr`, `vacsr-paper`), mapping or config."""
    if isinstance(method, MethodConfig):
        return method
    fields = resolve_method(method, task=task)
    return parse(method_entry(fields["name"], task=task).config, fields, within="method")


def recipe_from(raw: Mapping[str, Any] | None, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from parsed YAML and dotted overrides."""
    fields = merge_layers(raw or {}, parse_overrides(overrides))
    return parse(Recipe, {**fields, "method": resolve_method(fields["method"])})


def read_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe file, on top of the one that its ``base:`` names, and dotted overrides on top of both."""
    return recipe_from(merge_layers(*recipe_layers(path)), overrides)


def recipe_layers(path: Path, *, above: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """A recipe file's fields after those of its base, the furthest first; ``above``: the recipes that build on it."""
    if path.resolve() in [one.resolve() for one in above]:
        names = " → ".join(map(str, (*above, path)))
        raise ConfigError(f"recipes build on each other in a circle: {names} — take base: out of one of them")
    try:
        fields = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"the base of {above[-1]}: {error}" if above else str(error)) from error
    if "base" not in fields:
        return [fields]
    name = fields.pop("base")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: base is {name!r:.60}, expected a recipe beside it — write base: other.yaml")
    return [*recipe_layers(path.parent / Path(name).expanduser(), above=(*above, path)), fields]
