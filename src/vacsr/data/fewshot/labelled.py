"""Photos with classes: what few-shot recognition learns from and is measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import as_rows
from vacsr.data.photos import Photos
from vacsr.data.sources import FilePhotos
from vacsr.data.stored import StoredPhotos
from vacsr.errors import DataError, ShapeMismatch, UsageError


@dataclass(frozen=True, eq=False)
class LabelledPhotos:
    """N photos, each of one of C classes. A class without a photo may exist: a test need not show them all."""

    photos: Photos
    """[N]"""
    labels: Tensor
    """[N] int64, 0 to C - 1."""
    classes: tuple[str, ...]
    """[C] names for people and prompts, as their source writes them; two classes may share one."""
    name: str
    """Data set and split, for messages."""

    def __post_init__(self) -> None:
        if list(self.labels.shape) != [len(self.photos)]:
            shape = list(self.labels.shape)
            raise ShapeMismatch(f"{self.name}: {len(self.photos):,} photos, labels {shape} — give one label per photo")
        if self.labels.dtype != torch.int64:
            raise DataError(f"{self.name}: labels are {self.labels.dtype}, expected int64 — convert them with .long()")
        blank = [number for number, name in enumerate(self.classes) if not name.strip()]
        if blank:
            raise DataError(f"{self.name}: class {blank[0]} has no name — write one, prompts are made of it")
        lost = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten().tolist()
        if lost:
            message = f"{self.name}: label {int(self.labels[lost[0]])} of {self.photos.name(lost[0])} is out of range"
            raise DataError(f"{message}, there are {len(self.classes)} classes — expected 0 to {len(self.classes) - 1}")

    def __len__(self) -> int:
        """The number of photos."""
        return len(self.photos)

    def ids(self) -> list[str]:
        """[N] what draws and index files call the photos: paths inside the data set, wherever that lies."""
        if isinstance(self.photos, FilePhotos):
            return list(self.photos.paths)
        return [self.photos.name(row) for row in range(len(self))]

    def take(self, rows: Tensor | Sequence[int]) -> LabelledPhotos:
        """These photos [K], in this order (a mask [N] works too); the classes stay."""
        chosen = as_rows(rows, count=len(self), device=self.labels.device)
        return replace(self, photos=self.photos.take(chosen.tolist()), labels=self.labels[chosen])

    def only(self, classes: Sequence[int]) -> LabelledPhotos:
        """The photos of these classes [K], relabelled from 0 in the order given."""
        count, chosen = len(self.classes), list(classes)
        outside = [number for number in chosen if not 0 <= number < count]
        if outside or len(set(chosen)) < len(chosen):
            what = f"{outside[0]} does not exist, expected 0 to {count - 1}" if outside else "is given twice"
            raise UsageError(f"{self.name}: a class {what} — list each class to keep once")
        new = torch.full((count,), -1, dtype=torch.int64)
        new[chosen] = torch.arange(len(chosen))
        labels = new.to(self.labels.device)[self.labels]
        rows = (labels >= 0).nonzero().flatten()
        return LabelledPhotos(
            photos=self.photos.take(rows.tolist()),
            labels=labels[rows],
            classes=tuple(self.classes[number] for number in chosen),
            name=f"{self.name}, {len(chosen)} of {count} classes" if len(chosen) < count else self.name,
        )

    def check_files(self) -> None:
        """Refuse photos whose files are not there, before hours are spent on the others."""
        if not isinstance(self.photos, StoredPhotos):
            return
        absent = [row for row in range(len(self)) if not self.photos.has(row)]
        if absent:
            first = self.photos.name(absent[0])
            message = f"{self.name}: {len(absent):,} of {len(self):,} photos are not there, first {first}"
            raise DataError(f"{message} — copy the photos again, or correct the path")

    def digest(self) -> str:
        """Of photos, labels and class names."""
        data = hashlib.sha256(self.photos.digest().encode())
        data.update(self.labels.cpu().contiguous().numpy().tobytes())
        data.update("\0".join(self.classes).encode(errors="surrogatepass"))
        return data.hexdigest()


class FewshotSource(NamedTuple):
    """What a spec names. All splits have the same classes."""

    train: LabelledPhotos
    """Where shots are drawn; without rows where the data set is for tests only."""
    val: LabelledPhotos | None
    """None where the data set has none; draws then keep some of ``train`` apart."""
    test: LabelledPhotos
    name: str
    template: str
    """How a class becomes a sentence, ``a photo of a {}.``"""


def check_source(source: FewshotSource) -> FewshotSource:
    """The source, if it can be learned or tested: two classes, test photos, the same classes in every split.

    Every class has a photo to learn from, or in a data set for tests only, one to test.
    """
    classes = source.test.classes
    if len(classes) < 2:
        raise DataError(f"{source.name} has {len(classes)} class, expected two or more — check the path and the labels")
    if any(split is not None and split.classes != classes for split in (source.train, source.val)):
        raise DataError(f"{source.name}: its splits name other classes — give all splits the same list")
    if not len(source.test):
        raise DataError(f"{source.name} has no test photos — add some, nothing could be measured")
    held = source.train if len(source.train) else source.test
    bare = (torch.bincount(held.labels, minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if bare:
        message = f"{held.name}: {len(bare):,} of {len(classes):,} classes have no photo"
        raise DataError(f"{message}, first {classes[bare[0]]!r} ({bare[0]}) — add photos or leave the class out")
    return source
