"""Photos with classes: what few-shot recognition learns from and is measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.data.archives import StoredPhotos, file_photos
from vacsr.data.pairs import as_rows
from vacsr.data.photos import Photos
from vacsr.errors import DataError, ShapeMismatch, UsageError


@dataclass(frozen=True, eq=False)
class LabelledPhotos:
    """N photos, each of one of C classes. A class may have no photo: a test need not show them all."""

    photos: Photos  # [N]
    labels: Tensor  # [N] int64, 0 to C - 1
    classes: tuple[str, ...]  # [C] names for people and prompts, as their source writes them; two may be the same
    name: str  # data set and split, for messages

    def __post_init__(self) -> None:
        if list(self.labels.shape) != [len(self.photos)] or self.labels.dtype != torch.int64:
            message = f"{self.name}: {len(self.photos):,} photos, labels {self.labels.dtype} {list(self.labels.shape)}"
            raise ShapeMismatch(f"{message} — give one int64 label per photo")
        blank = [number for number, name in enumerate(self.classes) if not name.strip()]
        if blank:
            raise DataError(f"{self.name}: class {blank[0]} has no name — write one, prompts are made of it")
        lost = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten().tolist()
        if lost:
            message = f"{self.name}: label {int(self.labels[lost[0]])} of {self.photos.name(lost[0])} is out of range"
            raise DataError(f"{message}, there are {len(self.classes)} classes — expected 0 to {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.photos)

    def ids(self) -> list[str]:
        """[N] paths inside the data set; draws and index files name photos by these."""
        if isinstance(self.photos, StoredPhotos):
            return [item.id for item in self.photos.items]
        return [self.photos.name(row) for row in range(len(self))]

    def take(self, rows: Tensor | Sequence[int]) -> LabelledPhotos:
        """These photos [K], in this order (a mask [N] works too); the classes stay."""
        chosen = as_rows(rows, count=len(self), device=self.labels.device)
        return replace(self, photos=self.photos.take(chosen.tolist()), labels=self.labels[chosen])

    def only(self, classes: Sequence[int]) -> LabelledPhotos:
        """The photos of these classes [K], relabelled from 0 in the order given."""
        count, chosen = len(self.classes), list(classes)
        new = torch.full((count,), -1, dtype=torch.int64)
        new[chosen] = torch.arange(len(chosen))
        labels = new.to(self.labels.device)[self.labels]
        photos, names = self.take(labels >= 0).photos, tuple(self.classes[number] for number in chosen)
        part = f", {len(chosen)} of {count} classes" if len(chosen) < count else ""
        return LabelledPhotos(photos, labels[labels >= 0], names, f"{self.name}{part}")

    def check_files(self) -> None:
        """Refuse photos whose files are missing, before hours are spent on the others."""
        items = self.photos.items if isinstance(self.photos, StoredPhotos) else ()
        absent = [item.name() for item in items if not item.exists()]
        if absent:
            message = f"{self.name}: {len(absent):,} of {len(self):,} photos are missing, first {absent[0]}"
            raise DataError(f"{message} — copy the photos again, or correct the path")

    def digest(self) -> str:
        data = hashlib.sha256(self.photos.digest().encode())
        data.update(self.labels.cpu().contiguous().numpy().tobytes())
        data.update("\0".join(self.classes).encode(errors="surrogatepass"))
        return data.hexdigest()


@dataclass(frozen=True, eq=False)
class FewshotSource:
    """What a SPEC names: two or more classes, the same in all splits, and photos to test.

    Every class has a photo to train on, or in a data set for tests only, one to test.
    """

    train: LabelledPhotos  # where shots are drawn; empty where the data set is for tests only
    val: LabelledPhotos | None  # None where the data set has none: shots for validation then come from train
    test: LabelledPhotos
    name: str
    template: str  # how a class becomes a sentence, "a photo of a {}."

    def __post_init__(self) -> None:
        classes = self.test.classes
        if len(classes) < 2:
            raise DataError(f"{self.name} has {len(classes)} class, expected two or more — check the path and labels")
        if not len(self.test):
            raise DataError(f"{self.name} has no test photos, so nothing can be measured — add some")
        held = self.train if len(self.train) else self.test
        bare = (torch.bincount(held.labels, minlength=len(classes)) == 0).nonzero().flatten().tolist()
        if bare:
            message = f"{held.name}: {len(bare):,} of {len(classes):,} classes have no photo"
            raise DataError(f"{message}, first {classes[bare[0]]!r} ({bare[0]}) — add photos or leave the class out")


class Entry(NamedTuple):
    """One photo, as a split file lists it."""

    path: str  # inside the folder of photos, with slashes
    label: int
    name: str  # of the class


class Splits(NamedTuple):
    train: Sequence[Entry]
    val: Sequence[Entry]
    test: Sequence[Entry]
    classes: tuple[str, ...] | None = None  # the names, where they are known apart from the photos


def as_entries(listed: Sequence[Any], *, source: str) -> list[Entry]:
    """The entries of ``[[path, label, class name], …]``."""
    entries = []
    for number, item in enumerate(listed):
        path, label, name = item if isinstance(item, list | tuple) and len(item) == 3 else ("", "", "")
        whole = not isinstance(label, bool) and str(label).removeprefix("-").isdecimal() and len(str(label)) < 10
        if not (isinstance(path, str) and path and isinstance(name, str) and whole):
            raise DataError(f"{source}, entry {number} is not [path, label, class name] — copy the file again")
        entries.append(Entry(path, int(label), name))
    return entries


def check_template(template: str) -> str:
    """The template, if it has one ``{}`` for the class name and no other braces."""
    rest = template.replace("{}", "", 1)
    if "{}" not in template or "{" in rest or "}" in rest:
        raise UsageError(f"template {template!r} needs one {{}} and no other braces — try: a photo of a {{}}.")
    return template


def build_source(root: Path, splits: Splits, *, name: str, template: str) -> FewshotSource:
    check_template(template)
    classes = splits.classes or class_names([*splits.train, *splits.val, *splits.test], source=name)

    def split(part: str, entries: Sequence[Entry]) -> LabelledPhotos:
        labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
        photos = replace(file_photos(root, [entry.path for entry in entries]), otherwise="remove it from the data set")
        return LabelledPhotos(photos=photos, labels=labels, classes=classes, name=f"{name}/{part}")

    val = split("val", splits.val) if splits.val else None
    return FewshotSource(split("train", splits.train), val, split("test", splits.test), name, template)


def class_names(entries: Sequence[Entry], *, source: str) -> tuple[str, ...]:
    """[C] the name of each label, if each has one and they count from 0 without a gap."""
    names: dict[int, str] = {}
    for entry in entries:
        known = names.setdefault(entry.label, entry.name)
        if known != entry.name:
            raise DataError(f"{source}: class {entry.label} is both {known!r} and {entry.name!r} — give it one name")
    for expected, label in enumerate(sorted(names)):
        if label != expected:
            raise DataError(f"{source}: label {expected} is missing, the next is {label} — count classes from 0 on")
    return tuple(names[label] for label in sorted(names))


def base_and_new(classes: int) -> tuple[range, range]:
    """Labels of base and of new classes: the first half, larger by one if the number is odd, and the rest.

    >>> base_and_new(5)
    (range(0, 3), range(3, 5))
    """
    middle = (classes + 1) // 2
    return range(middle), range(middle, classes)
