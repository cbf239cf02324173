"""Table files: rows, settings, seeds, columns and published numbers; how files are layered, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vacsr.compare.results import Column, PageConfig, Published, Sweep
from vacsr.config import Config, DataConfig, Recipe
from vacsr.config.io import layered_recipe, merge, parse, parse_overrides, read_yaml, recipe_layers
from vacsr.errors import ConfigError, UsageError
from vacsr.fewshot import layered_fewshot
from vacsr.fewshot.config import FewshotRecipe

_LISTS = ("rows", "settings", "columns")
_ROW_FIELD = {"rows": "name", "published": "beside"}  # which field names the row
# Files of the table itself.
_WRITTEN = ("table.md", "table.csv", "table.tex", "table.html", "page.html", "results.json", "records.json")


class TablePublished(Published):
    """Published figures as a table file has them: with the towers that they are of."""

    backbone: str = ""
    """Pattern of backbone.spec, such as `clip:*32`, for which a row of theirs may stand among ours; empty for any."""


def placed(entries: Iterable[TablePublished], *, data: str, backbone: Callable[[str], str]) -> Iterator[Published]:
    """With their data and towers, published figures have rows of their own; elsewhere only those beside ours stay.

    ``backbone`` gives the spec of a setting's towers, or the table's for an empty name.
    """
    for entry in entries:
        bound = bool(entry.data or entry.backbone)
        towers = not entry.backbone or fnmatchcase(backbone(entry.setting).lower(), entry.backbone.lower())
        same = bound and towers and data.startswith(entry.data)
        if same or entry.beside or not bound:
            found = Published(**entry.model_dump(exclude={"backbone"}))
            yield found.model_copy(update={"beside": ""}) if same else found


class Variant(Config):
    """A row or a setting: a name and what it changes in the base recipe."""

    name: str
    """Shown in the table, and the name of a folder."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields; `method: {name: vacsr, preset: paper}` and so on."""
    seeds: tuple[int, ...] | None = None
    """Other seeds than the table's; a setting's come before a row's."""


class TableRow(Variant):
    """A row, and what it is to the others."""

    baseline: bool | None = None
    """Others are tested against the best of these; unless given, every method but vacsr is one."""
    against: str = ""
    """A row that this one is tested against instead, such as the one it is a variant of."""
    sweep: tuple[Sweep, ...] = ()
    """The points of curves that this row is."""

    @field_validator("sweep", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict) else value


class StartConfig(Config):
    """A model that cells begin with; it is trained before them, once."""

    recipe: dict[str, Any]
    """Of `vacsr train`; in a table file the name of one, relative to that file."""
    folder: str
    """Its run folder, relative to where the command runs; the cells' `backbone.start` unless they name another."""


class Table(Config):
    """A table file, with what it extends and what was laid over it."""

    title: str
    """What is compared."""
    about: str = ""
    """Data and towers that the figures come from, told after the title."""
    note: str = ""
    """What a reader should know, told below the title."""
    task: Literal["train", "efficiency", "fewshot"] = "train"
    """A cell trains and reports, measures the time and memory of its steps, or learns classes from a few photos."""
    start: StartConfig | None = None
    """What the cells begin with, where they train it from nothing."""
    measures: tuple[Literal["tolerance"], ...] = ()
    """What else is measured on a trained cell."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Of which a step's time is the mean, where the task is efficiency."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Recipe fields that all cells share."""
    rows: tuple[TableRow, ...]
    """Methods, or variants of one."""
    settings: tuple[Variant, ...] = (Variant(name="clean"),)
    """Each makes a table of its own."""
    average: str = ""
    """The name of one more table, the mean over all settings, where the task is fewshot; empty for none."""
    seeds: tuple[int, ...] = (0,)
    """One run each."""
    columns: tuple[Column, ...] = ()
    """Figures of the reports."""
    published: tuple[TablePublished, ...] = ()
    """Figures of others, told apart from ours."""
    page: PageConfig = PageConfig()
    """For --page."""
    draws: Annotated[int, Field(ge=100)] = 10_000
    """Of the paired bootstrap."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """On top of base, row and setting, in this order: the command line's --set."""

    @model_validator(mode="after")
    def _fits(self) -> Table:
        if self.task != "train" and self.measures:
            raise ValueError(f"measures are taken of trained pairs, the task is {self.task} — leave measures out")
        if self.task != "fewshot" and self.average:
            raise ValueError(f"an average over settings is of fewshot tables, the task is {self.task} — leave it out")
        if self.average in [setting.name for setting in self.settings]:
            raise ValueError(f"the average is called '{self.average}', as one of the settings — rename one")
        return self

    def recipe(self, row: TableRow, setting: Variant, *, seed: int) -> Recipe | FewshotRecipe:
        """What one cell trains; its noise or its shots have its seed too.

        In a text `{seed}` stands for the seed, and `{setting}` for the setting's name.
        """
        drawn = {"seed": seed} if self.task == "fewshot" else {"noise": {"seed": seed}}
        layers = (self.base, self._started(), row.set, setting.set, self.overrides)
        names = {"seed": str(seed), "setting": setting.name}
        return self._layered(*(_filled(layer, names) for layer in layers), {"train": {"seed": seed}, "data": drawn})

    def _layered(self, *layers: Mapping[str, Any]) -> Recipe | FewshotRecipe:
        return layered_fewshot(*layers) if self.task == "fewshot" else layered_recipe(*layers)

    def _started(self) -> dict[str, Any]:
        return {} if self.start is None else {"backbone": {"start": self.start.folder}}

    def baselines(self) -> tuple[str, ...]:
        """Rows that the others are tested against."""
        return tuple(row.name for row in self.rows if self._is_baseline(row))

    def _is_baseline(self, row: TableRow) -> bool:
        if row.baseline is not None:
            return row.baseline
        return self._layered(self.base, row.set, self.overrides).method.name != "vacsr"

    def data_spec(self) -> str:
        """Where the pairs, or the photos with classes, of all cells come from."""
        data = self._layered(self.base, self.overrides).data
        return data.pairs if isinstance(data, DataConfig) else data.spec

    def backbone_spec(self, setting: str = "") -> str:
        """The towers of all cells, or of those of one setting."""
        changes = next((one.set for one in self.settings if one.name == setting), {})
        return self._layered(self.base, changes, self.overrides).backbone.spec

    def heading(self) -> str:
        """Title and data."""
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
    changes, where = parse_overrides(overrides), " with ".join(map(str, (path, *layers)))
    with _named_in(where):
        table = parse(Table, {**raw, "overrides": changes})
    check_table(table, where)
    if "page" in read_yaml(path):  # what a page that was taken over misses is left out
        check_page(table, where)
    return table


@contextmanager
def _named_in(where: str) -> Iterator[None]:
    """Say of what is wrong which file it is about, or which file asks for it."""
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
    _refuse_recipe(fields, path)
    parent = fields.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise UsageError(f"{path}: extends is {parent!r:.60}, expected a table beside it — write extends: other.yaml")
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
        raise UsageError(f"{path}: recipe is {name!r:.60}, expected a recipe beside it — write recipe: other.yaml")
    with _named_in(f"the recipe of {path}"):
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
        raise UsageError(f"{path}: drop is {names!r:.60}, expected names of rows — write drop: [ROW]")

    def kept(items: Any, key: str) -> Any:
        if not isinstance(items, list):
            return items
        return [item for item in items if (item.get(key) if isinstance(item, Mapping) else item) not in names]

    result = {**raw, **{kind: kept(raw[kind], key) for kind, key in _ROW_FIELD.items() if kind in raw}}
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
    with _named_in(f"what {path} quotes"):
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


def check_table(table: Table, where: str) -> None:
    """Refuse a table that could not be run or shown; ``where`` names the file it was read from."""
    for kind in ("rows", "settings", "seeds"):
        if not getattr(table, kind):
            raise UsageError(f"{where} has no {kind}, so that nothing could be shown — give at least one")
    _check_names(table.rows, "row", where)
    _check_names(table.settings, "setting", where)
    _check_columns(table.columns, where)
    rows = [row.name for row in table.rows]
    lost = next((row for row in table.rows if row.against and row.against not in rows), None)
    if lost is not None:
        raise UsageError(f"{where}: '{lost.name}' is against '{lost.against}', which is no row — name one of them")
    for entry in table.published:
        if entry.beside and entry.beside not in rows:
            message = f"{where}: no row '{entry.beside}' that '{entry.name}' could stand beside"
            raise UsageError(f"{message} — name a row, or leave beside: out")
    _check_recipes(table, where)


def _check_names(variants: Sequence[Variant], kind: str, where: str) -> None:
    """Names become folders, so they are told apart and can be one."""
    names = [variant.name for variant in variants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where} has two {kind}s named '{twice}', which would share their folders — rename one")
    slash = next((name for name in names if "/" in name or name in ("", ".", "..")), None)
    if slash is not None:
        raise UsageError(f"{where}: the {kind} '{slash}' becomes a folder's name — leave out '/' and give it a word")
    taken = next((name for name in names if name.lower() in _WRITTEN), None)
    if taken is not None:
        message = f"{where}: the {kind} '{taken}' becomes a folder's name, and a file of the table is called so"
        raise UsageError(f"{message} — rename it")


def _check_columns(columns: Sequence[Column], where: str) -> None:
    """A figure stands once in a table; beside ours may stand what others published."""
    for one, two in combinations(columns, 2):
        together = not one.settings or not two.settings or set(one.settings) & set(two.settings)
        if (one.key, one.published) == (two.key, two.published) and together:
            raise UsageError(f"{where} has two columns of the key '{one.key}' — take one out")


def _check_recipes(table: Table, where: str) -> None:
    """Every cell has a recipe; what does not fit is told with its row, unless all rows have it."""
    for row in table.rows:
        for setting in table.settings:
            try:
                table.recipe(row, setting, seed=table.seeds[0])
            except ConfigError as error:
                blamed = "" if _shared(table, setting, error) else f", row '{row.name}' in setting '{setting.name}'"
                raise ConfigError(f"{where}{blamed}: {error}") from error


def _shared(table: Table, setting: Variant, error: ConfigError) -> bool:
    """The same is wrong without any row or setting."""
    bare = Variant(name=setting.name)
    try:
        table.recipe(TableRow(name="base"), bare, seed=table.seeds[0])
    except ConfigError as other:
        return str(other) == str(error)
    return False


def check_page(table: Table, where: str) -> None:
    """The page shows rows and settings that are there; a slip would leave a part of it out."""
    asked, known = table.page.gallery, {"row": table.rows, "setting": table.settings}
    named = [("row", name) for name in (*table.page.drawn, *(asked.rows if asked else ()))]
    named += [("setting", asked.setting)] if asked else []
    for kind, name in named:
        names = [variant.name for variant in known[kind]]
        if name not in names:
            raise UsageError(f"{where}: page names the {kind} '{name}' — choose from: {', '.join(names)}")
