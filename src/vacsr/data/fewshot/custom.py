"""Your own photos with classes: a folder per class (``folder:``), or a table with a row per photo (``csv:``).

Without splits, photos are shared out by class: 30% to the test, 20% to validation (as CoOp did where a data set came
without splits), the rest to training. Training gets at least one photo of a class, and the test one where a class has
two. Which photos go where depends on the seed and the names alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from vacsr.config.base import Config
from vacsr.data.archives import missing
from vacsr.data.fewshot.coop import PLAIN, photos_in, subfolders
from vacsr.data.fewshot.labelled import Entry, FewshotSource, Splits, build_source
from vacsr.data.fewshot.shots import rows_by_label, seeded_rows
from vacsr.data.formats import CLASS_FORMATS, Spec, register
from vacsr.data.pairs import check_unique
from vacsr.data.tables import read_rows
from vacsr.errors import DataError, UsageError

_VAL_NAMES = ("val", "dev", "valid", "validation")
SPLIT_NAMES: Mapping[str, str] = {"train": "train", **dict.fromkeys(_VAL_NAMES, "val"), "test": "test"}
"""What a split may be called, in upper or lower case, and what it is."""
_SHARES = ("val", "test", "seed")
_TABLE = ("image", "label", "classname", "split", "template", *_SHARES)


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

    Where all folders of ``DIR`` are named train, val (or dev, valid, validation) and test, in upper or lower case,
    classes are one level down; labels are over the classes of all of them. Otherwise photos are shared out by the
    options ``val``, ``test`` and ``seed``; with ``whole`` they all test.
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
    splits, template = _arrange(photos, spec, whole=whole)._replace(classes=classes), spec.option("template") or PLAIN
    return build_source(root, splits, name=root.resolve().name, template=template)


def _split_folders(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The split of each folder, or nothing where the folders are classes."""
    parts = {name: SPLIT_NAMES[name.casefold()] for name in names if name.casefold() in SPLIT_NAMES}
    odd = [name for name in names if name not in parts]
    if odd and {"train", "test"} & set(parts.values()):
        raise DataError(f"{root} holds {', '.join(parts)} and {odd[0]}/, which is not a split — move it away")
    if len(set(parts.values())) < len(parts):
        raise DataError(f"{root} holds {', '.join(parts)}, two names for the same split — keep one of them")
    return {} if odd else parts


@register("csv", path="FILE", options=_TABLE, path_options=("root",), suffix=".csv", formats=CLASS_FORMATS)
def load_class_table(spec: Spec, whole: bool = False) -> FewshotSource:
    """``csv:FILE[,root=DIR][,image=COLUMN][,label=COLUMN][,split=COLUMN][,classname=COLUMN][,template=…]``.

    ``image`` is a path relative to the file, or to ``root``; ``label`` is the class, in sorted order (whole numbers by
    size); ``classname`` is its name in prompts, otherwise the label is. ``split`` says train, val or test; without it
    photos are shared out, or with ``whole`` all test. Each image is in one row.
    """
    file = spec.location
    columns = _read_columns(file, spec)
    images, names = columns["image"], columns["label"]
    check_unique(images, kind="image")
    labels = _numbered(names)
    photos: dict[str, list[Entry]] = {}
    optional = columns.get("classname", names), columns.get("split", ("train",) * len(images))
    for image, name, classname, split in zip(images, names, *optional, strict=True):
        part = SPLIT_NAMES.get(split.casefold())
        if part is None:
            raise DataError(f"{file}: {image} has the unknown split {split!r} — write one of: {', '.join(SPLIT_NAMES)}")
        photos.setdefault(part, []).append(Entry(image, labels[name], classname))
    root, template = spec.path_option("root") or file.parent, spec.option("template") or PLAIN
    return build_source(root, _arrange(photos, spec, whole=whole), name=file.stem, template=template)


def _read_columns(file: Path, spec: Spec) -> dict[str, tuple[str, ...]]:
    """``image`` and ``label``, and ``split`` and ``classname`` where the table has them."""
    table = read_rows(file)
    if not table.rows:
        raise DataError(f"{file} has no rows — write one per photo")
    columns = {}
    for name in ("image", "label", "split", "classname"):
        values = table.column(spec.option(name) or name)
        if values is not None:
            columns[name] = tuple(value.strip() for value in values)
        elif name in ("image", "label") or name in spec.options:
            message = f"{file} has no column {spec.option(name) or name!r}; it has {', '.join(table.rows[0])}"
            raise DataError(f"{message} — name yours in the spec: {spec},{name}=COLUMN")
    return columns


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

    Without a test split, the validation photos are the test, as is custom with ImageNet.
    """
    shares, has_shares = spec.fill(Shares), any(name in spec.options for name in _SHARES)
    if set(photos) == {"train"}:
        return Splits((), (), photos["train"]) if whole and not has_shares else _share_out(photos["train"], shares)
    if has_shares:
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
