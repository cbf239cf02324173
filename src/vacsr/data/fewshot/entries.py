"""Lists of (path, label, class name), as every layout can be read, and the source that they make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos
from vacsr.data.sources import FilePhotos
from vacsr.errors import DataError


class Entry(NamedTuple):
    """One photo, as a split file lists it."""

    path: str
    """Inside the folder of photos, with slashes."""
    label: int
    name: str
    """Of the class."""


class Splits(NamedTuple):
    """What a layout says."""

    train: Sequence[Entry]
    val: Sequence[Entry] | None
    test: Sequence[Entry]
    classes: tuple[str, ...] | None = None
    """The names, where they are known apart from the photos."""


def as_entries(listed: Sequence[Any], *, place: str) -> list[Entry]:
    """``[[path, label, class name], …]`` of a JSON file. ``place`` is for messages."""
    return [_entry(item, place=f"{place}, entry {number}") for number, item in enumerate(listed)]


def build_source(root: Path, splits: Splits, *, name: str, template: str) -> FewshotSource:
    """The source of photos under ``root``."""
    everything = [*splits.train, *(splits.val or ()), *splits.test]
    classes = splits.classes or class_names(everything, place=name)

    def split(part: str, entries: Sequence[Entry]) -> LabelledPhotos:
        labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
        photos = FilePhotos(root, tuple(entry.path for entry in entries))
        return LabelledPhotos(photos=photos, labels=labels, classes=classes, name=f"{name}/{part}")

    val = None if splits.val is None else split("val", splits.val)
    return FewshotSource(split("train", splits.train), val, split("test", splits.test), name, template)


def class_names(entries: Sequence[Entry], *, place: str) -> tuple[str, ...]:
    """[C] the name of each label, if each has one and they count from 0 without a gap.

    >>> class_names([Entry("a.jpg", 1, "cat"), Entry("b.jpg", 0, "dog")], place="pets")
    ('dog', 'cat')
    """
    names: dict[int, str] = {}
    for entry in entries:
        known = names.setdefault(entry.label, entry.name)
        if known != entry.name:
            message = f"{place}: class {entry.label} is called {known!r}, and {entry.name!r} at {entry.path}"
            raise DataError(f"{message} — give each label one name")
    for expected, label in enumerate(sorted(names)):
        if label < 0:
            raise DataError(f"{place}: label {label} ({names[label]!r}) is out of range — count classes from 0")
        if label != expected:
            message = f"{place}: class {expected} has no photo, the next label is {label} ({names[label]!r})"
            raise DataError(f"{message} — count classes from 0 without a gap")
    return tuple(names[label] for label in sorted(names))


def _entry(item: Any, *, place: str) -> Entry:
    if isinstance(item, list | tuple) and len(item) == 3:
        path, label, name = item
        whole = isinstance(label, int) and not isinstance(label, bool)
        if isinstance(path, str) and path and isinstance(name, str) and (whole or str(label).isdecimal()):
            return Entry(path, int(label), name)
    raise DataError(f"{place} is not [path, label, class name] — copy the file again, or write these three")
