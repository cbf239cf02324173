"""Table files: rows, settings, seeds, columns and published numbers; how files are layered, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vacsr.compare.results import Column, PageConfig, Published, Sweep
from vacsr.config import Config, DataConfig, Recipe
from vacsr.config.io import merge, merge_layers, parse, parse_overrides, read_yaml, recipe_from, recipe_layers
from vacsr.errors import ConfigError, UsageError
from vacsr.fewshot import fewshot_from
from vacsr.fewshot.config import FewshotRecipe

_LISTS = ("rows", "settings", "columns")
# Files that a table writes beside its cells' folders.
_WRITTEN = ("table.md", "table.csv", "table.tex", "table.html", "page.html", "results.json", "records.json")


class Variant(Config):
    """A row or a setting: a name and what it changes in the base recipe."""

    name: str  # shown in the table, and the name of a folder
    set: dict[str, Any] = Field(default_factory=dict)  # recipe fields; `method: {name: vacsr, preset: paper}` and so on
    seeds: tuple[int, ...] | None = None
    """Instead of the table's; a setting's come before a row's. A row with `[]` is never run, only drawn by --from."""

    @field_validator("name")
    @classmethod
    def _folder(cls, name: str) -> str:
        if "/" in name or name in ("", ".", "..") or name.lower() in _WRITTEN:
            raise ValueError(f"'{name}' cannot be the name of a cell's folder — choose a plain word")
        return name


class TableRow(Variant):
    """A row, and what it is to the others."""

    baseline: bool | None = None
    """Whether others are tested against it, if it is the best of these; by default true of every method but vacsr."""
    against: str = ""  # a row that this one is tested against instead, such as the one it is a variant of
    sweep: tuple[Sweep, ...] = ()  # the points of curves that this row is

    @field_validator("sweep", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict) else value


class StartConfig(Config):
    """A model that cells begin with; it is trained before them, once."""

    recipe: dict[str, Any]  # of `vacsr train`; in a table file the name of one, relative to that file
    folder: str
    """Its run folder, relative to where the command runs; the cells' `backbone.start` unless they name another."""


class Table(Config):
    """A table file, with what it extends and what was laid over it."""

    title: str  # what is compared
    about: str = ""  # data and towers that the numbers come from, shown after the title
    note: str = ""  # what a reader should know, shown below the title
    task: Literal["train", "efficiency", "fewshot"] = "train"
    """A cell trains and reports, measures the time and memory of its steps, or learns classes from a few photos."""
    start: StartConfig | None = None  # what the cells begin with, where they train it from nothing
    measures: tuple[Literal["tolerance"], ...] = ()  # what else is measured on a trained cell
    steps: Annotated[int, Field(ge=1)] = 100  # of which a step's time is the mean, where the task is efficiency
    base: dict[str, Any] = Field(default_factory=dict)  # recipe fields that all cells share
    rows: Annotated[tuple[TableRow, ...], Field(min_length=1)]  # methods, or variants of one
    settings: Annotated[tuple[Variant, ...], Field(min_length=1)] = (Variant(name="clean"),)  # one table each
    average: str = ""
    """The name of one more table, the mean over all settings, where the task is fewshot; empty for none."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)  # one run each
    columns: tuple[Column, ...] = ()  # metrics of the reports
    published: tuple[Published, ...] = ()  # numbers of others, marked as theirs
    page: PageConfig = PageConfig()  # for --page
    draws: Annotated[int, Field(ge=100)] = 10_000  # of the paired bootstrap
    overrides: dict[str, Any] = Field(default_factory=dict)
    """On top of base, row and setting, in this order: the command line's --set."""

    @model_validator(mode="after")
    def _fits(self) -> Table:
        if self.task != "train" and self.measures:
            raise ValueError(f"measures are taken of trained pairs, the task is {self.task} — leave measures out")
        if self.task != "fewshot" and self.average:
            raise ValueError(f"an average over settings is of fewshot tables, the task is {self.task} — leave it out")
        for kind, variants in (("row", self.rows), ("setting", self.settings)):
            names = [variant.name for variant in variants]
            if len(set(names)) < len(names):
                name = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two {kind}s named '{name}' would share their folders — rename one")
        if self.average in [setting.name for setting in self.settings]:
            raise ValueError(f"the average is called '{self.average}', as one of the settings — rename one")
        for one, two in combinations(self.columns, 2):
            together = not one.settings or not two.settings or set(one.settings) & set(two.settings)
            if (one.key, one.published) == (two.key, two.published) and together:
                raise ValueError(f"two columns have the key '{one.key}' — take one out")
        return self

    def recipe(self, row: TableRow, setting: Variant, *, seed: int) -> Recipe | FewshotRecipe:
        """What one cell trains; its noise or its shots have its seed too.

        In a text `{seed}` stands for the seed, and `{setting}` for the setting's name.
        """
        drawn = {"seed": seed} if self.task == "fewshot" else {"noise": {"seed": seed}}
        start = {} if self.start is None else {"backbone": {"start": self.start.folder}}
        layers = (self.base, start, row.set, setting.set, self.overrides)
        names = {"seed": str(seed), "setting": setting.name}
        return self._layered(*(_filled(layer, names) for layer in layers), {"train": {"seed": seed}, "data": drawn})

    def _layered(self, *layers: Mapping[str, Any]) -> Recipe | FewshotRecipe:
        raw = merge_layers(*layers)
        return fewshot_from(raw) if self.task == "fewshot" else recipe_from(raw)

    def baselines(self) -> tuple[str, ...]:
        """Rows that the others are tested against."""
        methods = {row.name: self._layered(self.base, row.set, self.overrides).method.name for row in self.rows}
        marked = {row.name: methods[row.name] != "vacsr" if row.baseline is None else row.baseline for row in self.rows}
        return tuple(name for name, baseline in marked.items() if baseline)

    def data_spec(self) -> str:
        """Where the pairs, or the photos with classes, of all cells come from."""
        data = self._layered(self.base, self.overrides).data
        return data.pairs if isinstance(data, DataConfig) else data.spec

    def backbone_spec(self, setting: str = "") -> str:
        """The towers of all cells, or of those of one setting."""
        changes = next((one.set for one in self.settings if one.name == setting), {})
        return self._layered(self.base, changes, self.overrides).backbone.spec

    def published_here(self) -> Iterator[Published]:
        """Published numbers: their own row on the same data and towers; elsewhere only those beside our rows stay."""
        data = self.data_spec()
        for entry in self.published:
            bound = bool(entry.data or entry.backbone)
            pattern, spec = entry.backbone.lower(), self.backbone_spec(entry.setting).lower()
            same = bound and data.startswith(entry.data) and (not pattern or fnmatchcase(spec, pattern))
            if same or entry.beside or not bound:
                yield entry.model_copy(update={"backbone": "", "beside": "" if same else entry.beside})

    def heading(self) -> str:
        return f"{self.title}: {self.about}" if self.about else self.title


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """Texts with what stands for a name in braces: a world, a start or a data set of a cell's own.

    >>> _filled({"data": {"pairs": "scenes:seed={seed}"}}, {"seed": "3"})
    {'data': {'pairs': 'scenes:seed=3'}}
    """
    if isinstance(value, Mapping):
        return {key: _filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(inner, names) for inner in value]
    if not isinstance(value, str):
        return value
    for name, text in names.items():
        value = value.replace(f"{{{name}}}", text)
    return value


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
    dropped = raw.pop("drop", ())
    with _named_in(" with ".join(map(str, (path, *layers)))):
        table = _without(parse(Table, {**raw, "overrides": parse_overrides(overrides)}), dropped)
        table.data_spec()  # an error that all cells share is not one of the first row
        for row in table.rows:
            for setting in table.settings:
                with _named_in(f"row '{row.name}' in setting '{setting.name}'"):
                    table.recipe(row, setting, seed=table.seeds[0])
        _check_names(table, page="page" in read_yaml(path))  # what a page that was taken over misses is left out
    return table


@contextmanager
def _named_in(where: str) -> Iterator[None]:
    """Say which file or row an error is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file on top of what it extends."""
    if path.resolve() in above:
        raise UsageError(f"{path} extends itself, by way of {above[-1].name} — take extends: out of one of them")
    with _named_in(f"what {above[-1]} extends") if above else nullcontext():
        fields = read_yaml(path)
    if "rows" not in fields and ("method" in fields or isinstance(fields.get("base"), str)):
        fewshot = any(layer.get("task") == "fewshot" for layer in recipe_layers(path))
        command = "vacsr fewshot" if fewshot else "vacsr train"
        raise UsageError(f"{path} is a recipe, expected a table with rows — train it: {command} {path}")
    parent = fields.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise UsageError(f"{path}: extends is {parent!r:.60}, expected a table beside it — write extends: other.yaml")
    below = _read(path.parent / parent, (*above, path.resolve())) if parent else {}
    return _lay(below, fields, path)


def _lay(below: Mapping[str, Any], fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One file's fields over others."""
    result = {key: value for key, value in {**below, **fields}.items() if key != "recipe"}
    layers = _recipe(fields["recipe"], path) if "recipe" in fields else [below.get("base") or {}]
    result["base"] = reduce(merge, [*layers, fields.get("base") or {}])
    start = fields.get("start")
    if isinstance(start, Mapping) and isinstance(start.get("recipe"), str):
        result["start"] = {**start, "recipe": reduce(merge, _recipe(start["recipe"], path))}
    for kind in _LISTS:
        if isinstance(fields.get(kind), list):
            result[kind] = [_named(item, below.get(kind) or (), kind, path) for item in fields[kind]]
    if isinstance(fields.get("published"), list):
        result["published"] = [entry for item in fields["published"] for entry in _published(item, path)]
    if "drop" in fields:
        names = fields["drop"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{path}: drop is {names!r:.60}, expected names of rows — write drop: [ROW]")
        result["drop"] = [*below.get("drop", ()), *names]
        if isinstance(result.get("rows"), list):
            named = [(row.get("name") if isinstance(row, Mapping) else None, row) for row in result["rows"]]
            result["rows"] = [row for name, row in named if name not in names]
    return result


def _recipe(name: Any, path: Path) -> list[dict[str, Any]]:
    """The fields of the recipe that a table names, in layers."""
    if not isinstance(name, str):
        raise UsageError(f"{path}: recipe is {name!r:.60}, expected a recipe beside it — write recipe: other.yaml")
    with _named_in(f"the recipe of {path}"):
        return recipe_layers(path.parent / name)


def _named(item: Any, below: Sequence[Mapping[str, Any]], kind: str, path: Path) -> Any:
    """An entry as it is, or the one below that it names, with its changes."""
    changes = dict(item) if isinstance(item, Mapping) else {}
    name = item if isinstance(item, str) else changes.pop("like", None)
    if name is None:
        return item
    for entry in below:
        if name in (entry.get("name"), entry.get("key")):
            return {**entry, **changes}
    known = ", ".join(str(entry.get("name") or entry.get("key")) for entry in below) or "none"
    raise UsageError(f"{path}: {kind} names '{name}', which is not among those it extends ({known}) — write it out")


def _published(item: Any, path: Path) -> list[Any]:
    """An entry as it is, or all entries of a group: `published.yaml#ablation`.

    Where a group lists ``settings``, an entry has values for each of them, and ``notes`` by setting.
    """
    if not isinstance(item, str):
        return [item]
    name, _, group = item.partition("#")
    with _named_in(f"what {path} quotes"):
        groups = read_yaml(path.parent / name)
    if group not in groups:
        raise UsageError(f"{path}: {name} has no group '{group}' — choose one of: {', '.join(groups)}")
    shared, entries = dict(groups[group]), []
    try:
        keys, settings = shared.pop("keys"), shared.pop("settings", None)
        for entry in shared.pop("entries"):
            notes, rows = entry.pop("notes", {}), entry.pop("values")
            for setting, values in [(None, rows)] if settings is None else zip(settings, rows, strict=True):
                named = {} if setting is None else {"setting": setting}
                named |= {"note": notes[setting]} if setting in notes else {}
                entries.append({**shared, **entry, **named, "values": dict(zip(keys, values, strict=True))})
        return entries
    except (KeyError, ValueError) as error:
        raise UsageError(f"{name}, group '{group}': an entry's values are not one for each of its keys") from error


def _without(table: Table, dropped: Iterable[str]) -> Table:
    """Without what refers to dropped rows: numbers published beside them, tests against them, parts of the page."""
    gone = set(dropped) - {row.name for row in table.rows}
    gallery = table.page.gallery
    if gallery is not None:
        asked = tuple(name for name in gallery.rows if name not in gone)
        gallery = gallery.model_copy(update={"rows": asked}) if asked else None
    drawn = tuple(name for name in table.page.drawn if name not in gone)
    rows = [row.model_copy(update={"against": ""}) if row.against in gone else row for row in table.rows]
    return table.model_copy(
        update={
            "rows": tuple(rows),
            "published": tuple(entry for entry in table.published if entry.beside not in gone),
            "page": PageConfig(drawn=drawn, gallery=gallery),
        }
    )


def _check_names(table: Table, *, page: bool) -> None:
    """Refuse names of rows and settings that do not exist; a slip would leave a part of the table or page out."""
    known = {"row": [row.name for row in table.rows], "setting": [setting.name for setting in table.settings]}
    named = [(f"row '{row.name}' is against", "row", row.against) for row in table.rows if row.against]
    named += [(f"published '{one.name}' is beside", "row", one.beside) for one in table.published if one.beside]
    gallery = table.page.gallery if page else None
    drawn = table.page.drawn if page else ()
    named += [("page shows", "row", name) for name in (*drawn, *(gallery.rows if gallery else ()))]
    named += [("page shows", "setting", gallery.setting)] if gallery else []
    for what, kind, name in named:
        if name not in known[kind]:
            raise ConfigError(f"{what} the {kind} '{name}', which is missing — choose from: {', '.join(known[kind])}")
