"""What a table file holds: rows, settings, seeds, columns, and what others published."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vacsr.config import Config, Recipe
from vacsr.recipes import layered_recipe
from vacsr.report.tables import Column, Published, Sweep


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
    task: Literal["train", "efficiency"] = "train"
    """A cell trains and reports, or measures the time and memory of its steps."""
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
    seeds: tuple[int, ...] = (0,)
    """One run each."""
    columns: tuple[Column, ...] = ()
    """Figures of the reports."""
    published: tuple[Published, ...] = ()
    """Figures of others, told apart from ours."""
    page: PageConfig = PageConfig()
    """For --page."""
    draws: Annotated[int, Field(ge=100)] = 10_000
    """Of the paired bootstrap."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """On top of base, row and setting, in this order: the command line's --set."""

    def recipe(self, row: TableRow, setting: Variant, *, seed: int) -> Recipe:
        """What one cell trains; its noise has its seed too, and `{seed}` in a text stands for it."""
        drawn = {"train": {"seed": seed}, "data": {"noise": {"seed": seed}}}
        layers = (self.base, row.set, setting.set, self.overrides)
        return layered_recipe(*(_with_seed(layer, seed) for layer in layers), drawn)

    def baselines(self) -> tuple[str, ...]:
        """Rows that the others are tested against."""
        return tuple(row.name for row in self.rows if self._is_baseline(row))

    def _is_baseline(self, row: TableRow) -> bool:
        if row.baseline is not None:
            return row.baseline
        return layered_recipe(self.base, row.set, self.overrides).method.name != "vacsr"

    def data_spec(self) -> str:
        """Where the pairs of all cells come from."""
        return layered_recipe(self.base, self.overrides).data.pairs

    def heading(self) -> str:
        """Title and data."""
        return f"{self.title}: {self.about}" if self.about else self.title


def _with_seed(value: Any, seed: int) -> Any:
    """Texts with the seed in the place of `{seed}`: a world, or a start, of a cell's own.

    >>> _with_seed({"data": {"pairs": "scenes:seed={seed}"}}, 3)
    {'data': {'pairs': 'scenes:seed=3'}}
    """
    if isinstance(value, dict):
        return {key: _with_seed(inner, seed) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_seed(inner, seed) for inner in value]
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value
