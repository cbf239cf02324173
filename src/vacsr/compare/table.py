"""What a table file holds: rows, settings, seeds, columns, and what others published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vacsr.compare.published import TablePublished
from vacsr.config import Config, DataConfig, Recipe
from vacsr.config.io import layered_recipe
from vacsr.fewshot import layered_fewshot
from vacsr.fewshot.config import FewshotRecipe
from vacsr.report.tables import Column, Sweep


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


class GalleryConfig(Config):
    """Answers of some rows beside each other."""

    setting: str
    """Whose runs are asked."""
    rows: tuple[str, ...]
    """In this order; the first is also shown by intervals of its grade."""
    photos: str = ""
    """SPEC of the photos where runs read cached features, such as `flickr8k:DIR`."""


class PageConfig(Config):
    """What the page shows besides the tables."""

    drawn: tuple[str, ...] = ()
    """Rows in the figures; empty for the first that have data."""
    gallery: GalleryConfig | None = None
    """Queries and answers, where models are still there."""


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
