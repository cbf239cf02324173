"""Your own photos in a table: ``csv:FILE``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from vacsr.data.checks import check_unique
from vacsr.data.fewshot.entries import Entry, build_source
from vacsr.data.fewshot.labelled import FewshotSource
from vacsr.data.fewshot.shares import SPLIT_NAMES, arrange, shares_of, split_named
from vacsr.data.fewshot.specs import ClassSpec
from vacsr.data.fewshot.templates import PLAIN, check_template
from vacsr.errors import DataError

_NEEDED, _OPTIONAL = ("image", "label"), ("split", "classname")
Row = dict[str, str]


def load_class_table(spec: ClassSpec, *, whole: bool = False) -> FewshotSource:
    """``csv:FILE[,root=DIR][,image=COLUMN][,label=COLUMN][,split=COLUMN][,classname=COLUMN][,template=…]``.

    ``image`` is a path relative to the file, or to ``root``; ``label`` is the class, in sorted order (whole numbers by
    size); ``classname`` is its name in prompts, otherwise the label is. ``split`` says train, val or test; without it
    photos are shared out, see :mod:`vacsr.data.fewshot.shares`, or with ``whole`` all test. Each image stands in one
    row.
    """
    file = Path(spec.path).expanduser()
    rows = _read(file, spec)
    check_unique([row["image"] for row in rows], kind="image")
    labels = _numbered([row["label"] for row in rows])
    found: dict[str, list[Entry]] = {}
    for number, row in enumerate(rows, start=1):
        split = split_named(row.get("split", "train"))
        if split is None:
            message = f"{file}, row {number}: split {row['split']!r} is unknown"
            raise DataError(f"{message} — write one of: {', '.join(SPLIT_NAMES)}")
        entry = Entry(row["image"], labels[row["label"]], row.get("classname", row["label"]))
        found.setdefault(split, []).append(entry)
    root = Path(spec.options["root"]).expanduser() if "root" in spec.options else file.parent
    template = check_template(spec.options.get("template", PLAIN))
    splits = arrange(found, shares_of(spec), place=str(file), whole=whole)
    return build_source(root, splits, name=file.stem, template=template)


def _read(file: Path, spec: ClassSpec) -> list[Row]:
    """The columns that count, under our names, without a blank cell."""
    if not file.is_file():
        raise DataError(f"no such file: {file}; expected a table with columns image and label — check the path")
    columns = {name: spec.options.get(name, name) for name in (*_NEEDED, *_OPTIONAL)}
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            header = list(reader.fieldnames or ())
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read ({error}) — save it as UTF-8 CSV") from error
    wanted = [name for name in columns if name in _NEEDED or name in spec.options or columns[name] in header]
    lost = [name for name in wanted if columns[name] not in header]
    if lost:
        message = f"{file} has no column {columns[lost[0]]!r}; it has {', '.join(header) or 'none'}"
        raise DataError(f"{message} — name yours in the spec: {spec},{lost[0]}=COLUMN")
    if not lines:
        raise DataError(f"{file} has no rows — write one per photo")
    rows: list[Row] = [{name: (line[columns[name]] or "").strip() for name in wanted} for line in lines]
    blank = next(((at, name) for at, row in enumerate(rows, start=1) for name in wanted if not row[name]), None)
    if blank:
        raise DataError(f"{file}, row {blank[0]}: {columns[blank[1]]!r} is blank — fill it in or leave the row out")
    return rows


def _numbered(labels: Sequence[str]) -> dict[str, int]:
    """Place of each label in sorted order; by size where all are whole numbers.

    >>> _numbered(["10", "9", "10"]), _numbered(["cat", "ant"])
    ({'9': 0, '10': 1}, {'ant': 0, 'cat': 1})
    """
    whole = all(label.isdecimal() for label in labels)
    ordered = sorted(set(labels), key=lambda label: (int(label) if whole else 0, label))
    return {label: number for number, label in enumerate(ordered)}
