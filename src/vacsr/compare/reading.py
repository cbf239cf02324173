"""Reading table files: one extends another, others are laid over it; what was written once is named, not repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

from vacsr.compare.table import Table
from vacsr.compare.table_checks import check_page, check_table
from vacsr.config.io import merge, parse, parse_overrides, read_yaml, recipe_layers
from vacsr.errors import ConfigError, UsageError

_LISTS = ("rows", "settings", "columns")

_TOLD_BY = {"rows": "name", "published": "beside"}  # which field names the row


def read_table(path: Path, overrides: Sequence[str] = (), *, layers: Sequence[Path] = ()) -> Table:
    """A table file; ``layers`` are files whose fields are laid over it, and overrides change every cell.

    ``extends: FILE`` starts from another table. ``base`` merges field by field, unless ``recipe: FILE`` starts it
    afresh; ``drop: [ROW]`` leaves out the rows of these names, where there are any; all else replaces. In rows,
    settings and columns a bare name stands for the entry of that name below, and ``like: NAME`` for it with changes. A
    recipe that says ``task: fewshot`` says so for the table too.
    """
    raw = _read(path, ())
    for layer in layers:
        raw = _lay(raw, read_yaml(layer), layer)
    if raw["base"].get("task") == "fewshot":
        raw.setdefault("task", "fewshot")
    changes, where = parse_overrides(overrides), " with ".join(map(str, (path, *layers)))
    with _told(where):
        table = parse(Table, {**raw, "overrides": changes})
    check_table(table, where)
    if "page" in read_yaml(path):  # what a page that was taken over misses is left out
        check_page(table, where)
    return table


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Say of what is wrong which file it is about, or which file asks for it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file on top of what it extends."""
    if path.resolve() in above:
        raise UsageError(f"{path} extends itself, by way of {above[-1].name} — take extends: out of one of them")
    with _told(f"what {above[-1]} extends") if above else nullcontext():
        fields = read_yaml(path)
    _refuse_recipe(fields, path)
    parent = fields.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise UsageError(f"{path}: extends is {parent!r}, expected a table beside it — write extends: other.yaml")
    below = _read(path.parent / parent, (*above, path.resolve())) if parent else {}
    return _lay(below, fields, path)


def _refuse_recipe(fields: Mapping[str, Any], path: Path) -> None:
    """A recipe may be given by mistake; it too may have a ``base``, which is the name of another."""
    if "rows" in fields or ("method" not in fields and not isinstance(fields.get("base"), str)):
        return
    fewshot = any(layer.get("task") == "fewshot" for layer in recipe_layers(path))
    command = "vacsr fewshot" if fewshot else "vacsr train"
    raise UsageError(f"{path} is a recipe, expected a table with rows — train it: {command} {path}")


def _lay(below: Mapping[str, Any], fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One file's fields over others."""
    result = {key: value for key, value in {**below, **fields}.items() if key not in ("recipe", "drop")}
    layers = _recipe(fields["recipe"], path) if "recipe" in fields else [below.get("base") or {}]
    result["base"] = reduce(merge, [*layers, fields.get("base") or {}])
    if isinstance(fields.get("start"), Mapping):
        result["start"] = _start(fields["start"], path)
    for kind in _LISTS:
        if isinstance(fields.get(kind), list):
            result[kind] = [_named(item, below.get(kind) or (), kind, path) for item in fields[kind]]
    if isinstance(fields.get("published"), list):
        result["published"] = [entry for item in fields["published"] for entry in _published(item, path)]
    return _without(result, fields["drop"], path) if "drop" in fields else result


def _start(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """With the fields of its recipe in place of the recipe's name."""
    name = fields.get("recipe")
    return {**fields, "recipe": reduce(merge, _recipe(name, path)) if isinstance(name, str) else name}


def _recipe(name: Any, path: Path) -> list[dict[str, Any]]:
    """The fields of the recipe that a table names, in layers."""
    if not isinstance(name, str):
        raise UsageError(f"{path}: recipe is {name!r}, expected a recipe beside it — write recipe: other.yaml")
    with _told(f"the recipe of {path}"):
        return recipe_layers(path.parent / name)


def _named(item: Any, below: Sequence[Mapping[str, Any]], kind: str, path: Path) -> Any:
    """An entry as it stands, or the one that its name stands for, with changes where it has any."""
    changes = dict(item) if isinstance(item, Mapping) else {}
    name = item if isinstance(item, str) else changes.pop("like", None)
    if name is None:
        return item
    for entry in below:
        if name in (entry.get("name"), entry.get("key")):
            return {**entry, **changes}
    known = ", ".join(str(entry.get("name") or entry.get("key")) for entry in below) or "none"
    raise UsageError(f"{path}: {kind} names '{name}', which is not among those it extends ({known}) — write it out")


def _without(raw: dict[str, Any], names: Any, path: Path) -> dict[str, Any]:
    """The table but for these rows, and for what speaks of them: page, tests against them, what stands beside them.

    A file may be laid over several tables, so a row that is not there is no slip.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: drop is {names!r}, expected names of rows — write drop: [ROW]")

    def kept(items: Any, key: str) -> Any:
        if not isinstance(items, list):
            return items
        return [item for item in items if (item.get(key) if isinstance(item, Mapping) else item) not in names]

    result = {**raw, **{kind: kept(raw[kind], key) for kind, key in _TOLD_BY.items() if kind in raw}}
    if isinstance(result.get("rows"), list):
        result["rows"] = [_untested(row, names) for row in result["rows"]]
    if isinstance(raw.get("page"), Mapping):
        page = dict(raw["page"])
        if "drawn" in page:
            page["drawn"] = kept(page["drawn"], "name")
        if isinstance(page.get("gallery"), Mapping):
            left = kept(page["gallery"].get("rows"), "name")
            page["gallery"] = {**page["gallery"], "rows": left} if left else None
        result["page"] = page
    return result


def _untested(row: Any, names: Sequence[str]) -> Any:
    """A row that was tested against one of these is tested against the best baseline."""
    if not isinstance(row, Mapping) or row.get("against") not in names:
        return row
    return {key: value for key, value in row.items() if key != "against"}


def _published(item: Any, path: Path) -> list[Any]:
    """An entry as it stands, or all entries of a group: `published.yaml#ablation`.

    Where a group lists ``settings``, an entry has values for each of them, and ``notes`` by setting.
    """
    if not isinstance(item, str):
        return [item]
    name, _, group = item.partition("#")
    with _told(f"what {path} quotes"):
        groups = read_yaml(path.parent / name)
    if group not in groups:
        raise UsageError(f"{path}: {name} has no group '{group}' — choose one of: {', '.join(groups)}")
    shared = dict(groups[group])
    entries, keys, settings = shared.pop("entries"), shared.pop("keys"), shared.pop("settings", None)
    try:
        if settings is not None:
            entries = [one for entry in entries for one in _by_setting(entry, settings)]
        return [{**shared, **entry, "values": dict(zip(keys, entry["values"], strict=True))} for entry in entries]
    except ValueError as error:
        raise UsageError(f"{name}, group '{group}': an entry's values are not one for each of its keys") from error


def _by_setting(entry: Mapping[str, Any], settings: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for each setting."""
    rest = {key: value for key, value in entry.items() if key not in ("values", "notes")}
    notes = {setting: {"note": note} for setting, note in entry.get("notes", {}).items()}
    found = zip(settings, entry["values"], strict=True)
    return [{**rest, **notes.get(setting, {}), "setting": setting, "values": values} for setting, values in found]
