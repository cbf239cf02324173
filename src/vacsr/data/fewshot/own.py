"""Your own photos with classes: a folder per class (``folder:``), or a table with a row per photo (``csv:``).

Without splits, photos are shared out by class: 30% to the test, 20% to validation (as CoOp did where a data set came
without splits), the rest to training. Training gets at least one photo of a class, and the test one where a class has
two. Which photos go where depends on the seed and the names alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from vacsr.config.base import Config
from vacsr.data.captions import missing
from vacsr.data.fewshot.coop import PLAIN, check_template, photos_in, subfolders
from vacsr.data.fewshot.labelled import Entry, FewshotSource, Splits, build_source
from vacsr.data.fewshot.shots import rows_by_label, seeded_rows
from vacsr.data.formats import CLASS_FORMATS, Spec, register
from vacsr.data.pairs import check_unique
from vacsr.data.tables import read_rows
from vacsr.errors import DataError, UsageError

SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "val": "val",
    "dev": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""What a split may be called, in letters of any size, and what it is."""
_SHARES = ("val", "test", "seed")
_COLUMNS = ("image", "label", "split", "classname")  # of which the last two may be missing


class Shares(Config):
    """How photos without splits are shared out."""

    val: Annotated[float, Field(ge=0, lt=1)] = 0.2
    test: Annotated[float, Field(gt=0, lt=1)] = 0.3
    seed: int = 0

    @model_validator(mode="after")
    def _leave_some_to_train(self) -> Self:
        if self.val + self.test >= 1:
            raise ValueError(f"val={self.val} and test={self.test} leave no photos to train on")
        return self


@register("folder", path="DIR", options=("template", *_SHARES), formats=CLASS_FORMATS)
def load_class_folder(spec: Spec, whole: bool = False) -> FewshotSource:
    """``folder:DIR[,template=…]``: the name of a folder is its class, in sorted order; folders in it are read too.

    Where all folders of ``DIR`` are named train, val (or dev, valid, validation) and test, in letters of any size,
    classes are one level down; labels are over the classes of all of them. Otherwise photos are shared out; the
    options ``val``, ``test`` and ``seed`` say how. With ``whole`` they all test.
    """
    root = spec.location
    first = subfolders(root) if root.is_dir() else []
    if not first:
        raise missing(root, expected="a folder per class (cat/, dog/), or train/ and test/ that hold these")
    parts = _split_folders(root, first)
    inside = {f"{part}/": subfolders(root / part) for part in parts} or {"": first}
    classes = tuple(sorted({name for names in inside.values() for name in names}))
    label = {name: number for number, name in enumerate(classes)}
    photos = {
        parts.get(part[:-1], "train"): [
            Entry(path, label[name], name) for name in names for path in photos_in(root, f"{part}{name}")
        ]
        for part, names in inside.items()
    }
    splits = _arrange(photos, spec, whole=whole)._replace(classes=classes)
    return build_source(root, splits, name=root.resolve().name, template=_template(spec))


def _split_folders(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Which split each folder is; none where they are classes. A mixture would make a class of a split."""
    parts = {name: SPLIT_NAMES[name.casefold()] for name in names if name.casefold() in SPLIT_NAMES}
    odd = [name for name in names if name not in parts]
    if odd and {"train", "test"} & set(parts.values()):
        message = f"{root} holds {', '.join(parts)}, and {odd[0]}/ beside, which is no split"
        raise DataError(f"{message} — move it away, or put all class folders into one folder train/")
    if len(set(parts.values())) < len(parts):
        raise DataError(f"{root} holds {', '.join(parts)}, two names for the same split — keep one of them")
    return {} if odd else parts


@register(
    "csv",
    path="FILE",
    options=("image", "label", "classname", "split", "template", *_SHARES),
    path_options=("root",),
    suffix=".csv",
    formats=CLASS_FORMATS,
)
def load_class_table(spec: Spec, whole: bool = False) -> FewshotSource:
    """``csv:FILE[,root=DIR][,image=COLUMN][,label=COLUMN][,split=COLUMN][,classname=COLUMN][,template=…]``.

    ``image`` is a path relative to the file, or to ``root``; ``label`` is the class, in sorted order (whole numbers by
    size); ``classname`` is its name in prompts, otherwise the label is. ``split`` says train, val or test; without it
    photos are shared out, or with ``whole`` all test. Each image is in one row.
    """
    file = spec.location
    rows = _read(file, spec)
    check_unique([row["image"] for row in rows], kind="image")
    labels = _numbered([row["label"] for row in rows])
    photos: dict[str, list[Entry]] = {}
    for number, row in enumerate(rows, start=1):
        split = SPLIT_NAMES.get(row.get("split", "train").casefold())
        if split is None:
            message = f"{file}, row {number}: split {row['split']!r} is unknown"
            raise DataError(f"{message} — write one of: {', '.join(SPLIT_NAMES)}")
        entry = Entry(row["image"], labels[row["label"]], row.get("classname", row["label"]))
        photos.setdefault(split, []).append(entry)
    root, splits = spec.path_option("root") or file.parent, _arrange(photos, spec, whole=whole)
    return build_source(root, splits, name=file.stem, template=_template(spec))


def _template(spec: Spec) -> str:
    return check_template(spec.option("template") or PLAIN)


def _read(file: Path, spec: Spec) -> list[dict[str, str]]:
    """The columns that count, under our names, without a blank cell."""
    rows, places = read_rows(file)
    if not rows:
        raise DataError(f"{file} has no rows — write one per photo")
    columns = {name: spec.option(name) or name for name in _COLUMNS}
    wanted = [name for name in _COLUMNS if name in _COLUMNS[:2] or name in spec.options or columns[name] in rows[0]]
    lost = next((name for name in wanted if columns[name] not in rows[0]), None)
    if lost is not None:
        message = f"{file} has no column {columns[lost]!r}; it has {', '.join(rows[0])}"
        raise DataError(f"{message} — name yours in the spec: {spec},{lost}=COLUMN")
    cells = [{name: str(row[columns[name]]).strip() for name in wanted} for row in rows]
    for cell, place in zip(cells, places, strict=True):
        blank = next((columns[name] for name in wanted if not cell[name]), None)
        if blank is not None:
            raise DataError(f"{place}: {blank!r} is blank — fill it in or leave the row out")
    return cells


def _numbered(labels: Sequence[str]) -> dict[str, int]:
    """The position of each label in sorted order; by size where all are whole numbers.

    >>> _numbered(["10", "9", "10"]), _numbered(["cat", "ant"])
    ({'9': 0, '10': 1}, {'ant': 0, 'cat': 1})
    """
    whole = all(label.isdecimal() and len(label) < 19 for label in labels)
    ordered = sorted(set(labels), key=lambda label: (int(label) if whole else 0, label))
    return {label: number for number, label in enumerate(ordered)}


def _arrange(photos: Mapping[str, Sequence[Entry]], spec: Spec, *, whole: bool) -> Splits:
    """Splits from what is in ``train``, ``val`` and ``test``; ``train`` alone is shared out, or with ``whole`` tests.

    Where there is no test the validation photos are the test, as is custom with ImageNet. Without training photos the
    source is for tests only.
    """
    shares, given = spec.fill(Shares), any(name in spec.options for name in _SHARES)
    if set(photos) == {"train"}:
        return Splits((), (), photos["train"]) if whole and not given else _share_out(photos["train"], shares)
    if given:
        named = " and ".join(photos)
        raise UsageError(f"{spec} has splits of its own ({named}) — leave out val=, test= and seed=")
    train, val = photos.get("train", ()), photos.get("val", ())
    return Splits(train, val, photos["test"]) if "test" in photos else Splits(train, (), val)


def _share_out(entries: Sequence[Entry], shares: Shares) -> Splits:
    ids = [entry.path for entry in entries]
    part = ["train"] * len(entries)
    for rows in rows_by_label([entry.label for entry in entries]).values():
        order = seeded_rows(ids, rows, seed=shares.seed, purpose="split", class_name=entries[rows[0]].name)
        test = min(max(round(len(order) * shares.test), 1), len(order) - 1)
        val = min(round(len(order) * shares.val), len(order) - 1 - test)
        for position, row in enumerate(order[: test + val]):
            part[row] = "test" if position < test else "val"
    split = {name: [entry for entry, of in zip(entries, part, strict=True) if of == name] for name in SPLIT_NAMES}
    return Splits(split["train"], split["val"], split["test"])
