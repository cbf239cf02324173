"""A comparison table as data: everything it is drawn from, and back, so that pages are made again without the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vacsr.config.io import merge, parse
from vacsr.errors import DataError
from vacsr.report.tables import CellValues, Column, Comparison, ComparisonTable, Published, Sweep, look_up

SCHEMA = 2


def table_to_json(table: ComparisonTable) -> dict[str, Any]:
    """Every value of every seed, the summaries, what was tested, and what others published."""
    keys = [column.key for column in table.columns if not column.published]
    return {
        "schema": SCHEMA,
        "title": table.title,
        "note": table.note,
        "columns": [column.model_dump(mode="json") for column in table.columns],
        "rows": list(table.rows),
        "settings": list(table.settings),
        "baselines": list(table.baselines),
        "sweeps": [{"row": row, **sweep.model_dump(mode="json")} for row, sweep in table.sweeps],
        "published": [entry.model_dump(mode="json") for entry in table.published],
        "comparisons": [found._asdict() for found in table.comparisons],
        "summaries": _summaries(table, keys),
        "cells": [
            {
                "setting": v.setting,
                "row": v.row,
                "seed": v.seed,
                "values": {key: look_up(v.report, key) for key in keys},
            }
            for v in table.values
        ],
    }


def _summaries(table: ComparisonTable, keys: Sequence[str]) -> dict[str, Any]:
    """Setting → row → key → mean, std and seeds."""
    return {
        setting: {
            row: {key: found._asdict() for key in keys if (found := table.summary(setting, row, key))}
            for row in table.shown_rows(setting)
        }
        for setting in table.settings
    }


def table_from_json(raw: Mapping[str, Any]) -> ComparisonTable:
    """The table that :func:`table_to_json` described. The first schema had title and cells alone; it is read too."""
    cells = [
        CellValues(cell["row"], cell["setting"], int(cell["seed"]), _nested(cell["values"])) for cell in raw["cells"]
    ]
    keys = dict.fromkeys(key for cell in raw["cells"] for key in cell["values"])
    return ComparisonTable(
        title=raw["title"],
        note=raw.get("note", ""),
        columns=tuple(parse(Column, column) for column in raw.get("columns") or [{"key": key} for key in keys]),
        rows=tuple(raw.get("rows") or dict.fromkeys(cell.row for cell in cells)),
        settings=tuple(raw.get("settings") or dict.fromkeys(cell.setting for cell in cells)),
        values=tuple(cells),
        baselines=tuple(raw.get("baselines", ())),
        comparisons=tuple(Comparison(**found) for found in raw.get("comparisons", ())),
        published=tuple(parse(Published, entry) for entry in raw.get("published", ())),
        sweeps=tuple(_sweep(entry) for entry in raw.get("sweeps", ())),
    )


def read_results(path: Path) -> ComparisonTable:
    """A results.json."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema"] not in (1, SCHEMA):
            given = f"{path} has schema {raw['schema']!r}, expected 1 or {SCHEMA}"
            raise DataError(f"{given} — use the vacsr that wrote it")
        return table_from_json(raw)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror} — give a results.json of vacsr compare") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not hold results of a comparison ({error!r}) — give a results.json") from error


def _sweep(entry: Mapping[str, Any]) -> tuple[str, Sweep]:
    fields = dict(entry)
    return fields.pop("row"), parse(Sweep, fields)


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
