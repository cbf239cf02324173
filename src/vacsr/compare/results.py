"""The results of a comparison: runs by row, setting and seed, means over seeds, tested differences, and their JSON."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from vacsr.config import Config
from vacsr.config.io import merge
from vacsr.errors import DataError
from vacsr.evaluate.report import data_frame
from vacsr.files import load_json, read_json, read_text, write_text
from vacsr.pages.curves import RunRecord, follow

SCHEMA = 2
RESULTS, RECORDS = "results.json", "records.json"


class Column(Config):
    """One metric of the reports."""

    key: str
    """Dotted, split first: `test.rsum`, `test.mean.r1` (both directions), `test/eccv.i2t.map_at_r` (one protocol)."""
    name: str = ""  # head of the column; the key unless given
    best: Literal["high", "low", "none"] = "high"  # which end is set in bold
    digits: int = 1  # after the decimal point
    published: bool = False  # the number that others published for the row, on their data: never bold, never tested
    settings: tuple[str, ...] = ()  # those whose tables have the column; empty for all

    @property
    def head(self) -> str:
        return self.name or self.key


class Sweep(Config):
    """A row as a point of a curve."""

    name: str  # the curve: rows of one name belong together
    value: float  # the parameter's value
    default: bool = False  # whether this is the method's default


class Published(Config):
    """Numbers that others printed; shown as theirs, never bold, never tested."""

    name: str  # what they call the method
    values: dict[str, float | None]  # by column key; None where they printed none
    upper: dict[str, float] = Field(default_factory=dict)
    """By column key, where they printed a range: its upper end, of which the value is the lower."""
    source: str  # the paper and table
    setting: str = ""  # of ours that it belongs to; empty for all
    beside: str = ""
    """Our row that the numbers are shown beside, in columns marked `published`; empty gives them their own row."""
    data: str = ""  # prefix of data.pairs for which they may have their own row among ours, such as `coco:`
    backbone: str = Field(default="", exclude=True)
    """Pattern of backbone.spec, such as `clip:*32`, for which they may have their own row; empty for any."""
    note: str = ""  # what differs, printed below the table

    def printed(self, key: str) -> tuple[float, float] | None:
        """The range that was printed under a column's key, or a number twice; `mean` is that of both directions."""
        value = self.values.get(key)
        if key not in self.values and ".mean." in key:
            both = [self.values.get(key.replace(".mean.", f".{direction}.")) for direction in ("i2t", "t2i")]
            value = None if None in both else statistics.fmean(one for one in both if one is not None)
        return None if value is None else (value, self.upper.get(key, value))


class GalleryConfig(Config):
    """Answers of some rows beside each other."""

    setting: str  # whose runs are asked
    rows: tuple[str, ...]  # in this order; the first is also shown by intervals of its grade
    photos: str = ""  # SPEC of the photos where runs read cached features, such as `flickr8k:DIR`


class PageConfig(Config):
    """What the page shows besides the tables."""

    drawn: tuple[str, ...] = ()  # rows in the plots; empty for the first that have data
    gallery: GalleryConfig | None = None  # queries and answers, where the models still exist


class Summary(NamedTuple):
    """Mean and spread over seeds."""

    mean: float
    std: float
    seeds: int


class Difference(NamedTuple):
    """A row's number less the best baseline's, and whether another sample of queries would say the same."""

    setting: str
    row: str
    key: str
    against: str
    difference: float
    low: float  # lower end of the difference's 95% interval
    high: float  # upper end
    p: float  # two-sided

    @property
    def clear(self) -> bool:
        """Zero is outside of the interval."""
        return self.low > 0 or self.high < 0


def look_up(report: Mapping[str, Any], key: str) -> float | None:
    """Follow a dotted key; None where a method has no such number, or where the key names a whole section.

    `mean` is the mean of both directions, where a result has these.

    >>> look_up({"test": {"rsum": 300.0}}, "test.rsum"), look_up({"test": {"uncertainty": None}}, "test.uncertainty.x")
    (300.0, None)
    >>> look_up({"test": {"i2t": {"r1": 20.0}, "t2i": {"r1": 10.0}}}, "test.mean.r1")
    15.0
    """
    value = follow(report, *key.split("."))
    section, mean, metric = key.partition(".mean.")
    if value is None and mean:
        both = [look_up(report, f"{section}.{direction}.{metric}") for direction in ("i2t", "t2i")]
        return None if None in both else statistics.fmean(one for one in both if one is not None)
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """Rows × settings × columns, and all that a page shows of them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    settings: tuple[str, ...]
    values: tuple[RunRecord, ...]  # what the tables show: every finished run, and averages over settings
    baselines: tuple[str, ...] = ()  # rows that the others are tested against
    differences: tuple[Difference, ...] = ()  # from the best baseline of each setting and column
    published: tuple[Published, ...] = ()
    sweeps: tuple[tuple[str, Sweep], ...] = ()  # rows that are points of curves
    note: str = ""  # printed below the title
    page: PageConfig = field(default_factory=PageConfig)
    records: tuple[RunRecord, ...] | None = None
    """Whole reports and histories, for a page's plots; None where no page was asked for."""

    def __repr__(self) -> str:
        size = f"{len(self.rows)} rows, {len(self.settings)} settings, {len(self.values)} runs"
        return f"ComparisonTable({self.title!r}: {size})"

    def to_dict(self) -> dict[str, Any]:
        """What results.json holds: every value of every seed, the summaries, what was tested, what others published."""
        keys = [column.key for column in self.columns if not column.published]
        summaries = {
            setting: {
                row: {key: one._asdict() for key in keys if (one := self.summary(setting, row, key))}
                for row in self.shown_rows(setting)
            }
            for setting in self.settings
        }
        cells = [
            {
                **{name: getattr(run, name) for name in ("setting", "row", "seed")},
                "values": {key: look_up(run.report, key) for key in keys},
            }
            for run in self.values
        ]
        return {
            "schema": SCHEMA,
            "title": self.title,
            "note": self.note,
            "columns": [column.model_dump(mode="json") for column in self.columns],
            "rows": list(self.rows),
            "settings": list(self.settings),
            "baselines": list(self.baselines),
            "sweeps": [{"row": row, **sweep.model_dump(mode="json")} for row, sweep in self.sweeps],
            "published": [entry.model_dump(mode="json") for entry in self.published],
            "comparisons": [one._asdict() for one in self.differences],
            "summaries": summaries,
            "cells": cells,
        }

    def to_markdown(self) -> str:
        from vacsr.compare.formats import FORMATS

        return FORMATS["md"](self)

    def to_frame(self) -> Any:
        """One row per run and one column per metric; needs pandas."""
        return data_frame(
            {"row": run.row, "setting": run.setting, "seed": run.seed}
            | {column.key: look_up(run.report, column.key) for column in self.columns}
            for run in self.values
        )

    _repr_markdown_ = to_markdown

    def summary(self, setting: str, row: str, key: str) -> Summary | None:
        """Mean and sample standard deviation (0 for one seed) of a metric over its seeds."""
        runs = [look_up(run.report, key) for run in self.values if run.setting == setting and run.row == row]
        values = [value for value in runs if value is not None]
        if not values:
            return None
        return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def columns_of(self, setting: str) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not column.settings or setting in column.settings)

    def shown_rows(self, setting: str) -> list[str]:
        """Rows with at least one finished run."""
        present = {run.row for run in self.values if run.setting == setting}
        return [row for row in self.rows if row in present]

    def seeds(self, setting: str, row: str) -> int:
        """How many runs the numbers come from."""
        return len({run.seed for run in self.values if run.row == row and run.setting == setting})

    def best(self, setting: str, column: Column, *, among: Sequence[str]) -> str | None:
        """The row with the best mean, however many seeds it has; the first of equals."""
        if column.best == "none" or column.published:
            return None
        means = {row: summary.mean for row in among if (summary := self.summary(setting, row, column.key))}
        if not means:
            return None
        return (max if column.best == "high" else min)(means, key=lambda row: means[row])

    def leading(self, setting: str, column: Column) -> list[str]:
        """What is set in bold: the rows with the best mean, all of equals, or none where these have fewer seeds.

        One lucky seed beats a mean over several too easily to be called the best.
        """
        summaries = {row: one for row in self.shown_rows(setting) if (one := self.summary(setting, row, column.key))}
        first = self.best(setting, column, among=list(summaries))
        if first is None:
            return []
        most, best = max(one.seeds for one in summaries.values()), summaries[first].mean
        return [row for row, one in summaries.items() if one.seeds == most and math.isclose(one.mean, best)]

    def difference(self, setting: str, row: str, key: str) -> Difference | None:
        for one in self.differences:
            if (one.setting, one.row, one.key) == (setting, row, key):
                return one
        return None

    def beside(self, setting: str, row: str, key: str) -> tuple[float, float] | None:
        """What others published for our row: both ends of a range, or a number twice."""
        printed = [e.printed(key) for e in self.published if e.beside == row and e.setting in ("", setting)]
        return next((one for one in printed if one is not None), None)

    def published_rows(self, setting: str) -> list[Published]:
        """Published numbers with their own row."""
        keys = [column.key for column in self.columns_of(setting) if not column.published]
        rows = [entry for entry in self.published if not entry.beside and entry.setting in ("", setting)]
        return [entry for entry in rows if any(entry.printed(key) for key in keys)]


def read_results(path: Path) -> tuple[tuple[RunRecord, ...], tuple[Difference, ...]]:
    """The values and tested differences of a results.json."""
    raw = read_json(path)
    if raw.get("schema") != SCHEMA:
        raise DataError(f"{path} has schema {raw.get('schema')!r}, expected {SCHEMA} — use the vacsr that wrote it")
    try:
        runs = [(run["row"], run["setting"], int(run["seed"]), _nested(run["values"])) for run in raw["cells"]]
        return tuple(RunRecord(*run) for run in runs), tuple(Difference(**one) for one in raw["comparisons"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} does not hold results of a comparison ({error!r}) — give a results.json") from error


def _nested(values: Mapping[str, float | None]) -> dict[str, Any]:
    """Dotted keys as the report they came from.

    >>> _nested({"test.rsum": 300.0, "test.i2t.r1": 20.0})
    {'test': {'rsum': 300.0, 'i2t': {'r1': 20.0}}}
    """
    report: dict[str, Any] = {}
    for key, value in values.items():
        leaf: Any = value
        for part in reversed(key.split(".")):
            leaf = {part: leaf}
        report = merge(report, leaf)
    return report


def write_records(path: Path, records: Sequence[RunRecord]) -> None:
    """Reports and histories, one run per line, numbers to five digits; of several protocols a split's first."""
    lines = []
    for run in records:
        report = {split: result for split, result in run.report.items() if "/" not in split}
        entry = {"row": run.row, "setting": run.setting, "seed": run.seed, "report": report, "history": run.history}
        short = json.loads(
            json.dumps(entry), parse_float=lambda text: float(f"{float(text):.5g}"), parse_constant=lambda _: None
        )
        lines.append(json.dumps(short, ensure_ascii=False, separators=(",", ":")))
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def read_records(path: Path) -> tuple[RunRecord, ...]:
    """What :func:`write_records` wrote, without the folders of the models."""
    try:
        return tuple(RunRecord(**entry) for entry in load_json(read_text(path), source=path))
    except (DataError, TypeError) as error:
        raise DataError(f"{path} does not hold records of runs ({error}) — vacsr compare --page writes it") from error
