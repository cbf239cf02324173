"""K photos of each class, drawn by seed.

Draws run over all classes; base and new classes are chosen from them later. Where a class has fewer than K photos it
gives what it has (the public code repeats photos there). The public code draws from a global generator over files in
the order of the disk; here a draw depends on seed, class and names alone, see :mod:`vacsr.data.fewshot.order`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.fewshot.entries import Entry
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos
from vacsr.data.fewshot.order import rows_by_label, seeded_rows
from vacsr.errors import DataError, UsageError

VAL_SHOTS = 4
"""The most validation photos per class, as in CoOp."""


class Shots(NamedTuple):
    """Which photos of a source were drawn."""

    train: Tensor
    """[S] int64 rows of ``source.train``, by class."""
    val: Tensor
    """[V] int64 rows of ``source.val``, or of ``source.train`` where the source has none. See :func:`take_shots`."""
    hash: str
    """Of names and labels: two runs with the same one saw the same photos, wherever these lay."""


class ShotPhotos(NamedTuple):
    """The drawn photos themselves, labels over all classes."""

    train: LabelledPhotos
    val: LabelledPhotos


def draw_shots(source: FewshotSource, *, shots: int, seed: int) -> Shots:
    """``shots`` photos per class to train on and min(shots, 4) to validate on, without replacement.

    Validation photos come from ``source.val``; where there is none, from the rest of ``source.train``, and a class
    whose photos are all drawn already has none.
    """
    if shots < 1:
        raise UsageError(f"{shots} shots were asked for, expected 1 or more — write shots: 16")
    if not len(source.train):
        raise UsageError(f"{source.name} is for tests only, it has no photos to draw — draw shots from another set")
    own = has_val(source)
    ranked = _ranked(source.train, seed=seed, purpose="train")
    apart = _ranked(val_split(source), seed=seed, purpose="val") if own else [rows[shots:] for rows in ranked]
    train = [row for rows in ranked for row in rows[:shots]]
    val = [row for rows in apart for row in rows[: min(shots, VAL_SHOTS)]]
    return shots_of(source, train=train, val=val)


def take_shots(source: FewshotSource, shots: Shots) -> ShotPhotos:
    """The drawn photos; a file that is not there is named before training starts."""
    taken = ShotPhotos(source.train.take(shots.train), val_split(source).take(shots.val))
    taken.train.check_files()
    taken.val.check_files()
    return taken


def shots_of(source: FewshotSource, *, train: Iterable[int], val: Iterable[int]) -> Shots:
    """A draw from row numbers that someone else chose, with its hash."""
    rows = torch.tensor(list(train), dtype=torch.int64)
    held = torch.tensor(list(val), dtype=torch.int64)
    if not has_val(source) and set(rows.tolist()) & set(held.tolist()):
        raise DataError(f"{source.name}: a photo is both trained and validated on — draw the shots again")
    return Shots(rows, held, _hash(entries_of(source.train, rows), entries_of(val_split(source), held)))


def has_val(source: FewshotSource) -> bool:
    """Whether the source has validation photos of its own."""
    return source.val is not None and len(source.val) > 0


def val_split(source: FewshotSource) -> LabelledPhotos:
    """Where validation photos are drawn."""
    return source.val if source.val is not None and len(source.val) else source.train


def entries_of(photos: LabelledPhotos, rows: Tensor) -> list[Entry]:
    """The rows as (path, label, class name)."""
    ids, labels = photos.ids(), photos.labels.tolist()
    return [Entry(ids[row], labels[row], photos.classes[labels[row]]) for row in rows.tolist()]


def _ranked(photos: LabelledPhotos, *, seed: int, purpose: str) -> list[list[int]]:
    """Rows per class in the order of the draw, classes by label."""
    ids = photos.ids()
    return [
        seeded_rows(ids, rows, seed=seed, purpose=purpose, class_name=photos.classes[label])
        for label, rows in rows_by_label(photos.labels).items()
    ]


def _hash(train: Iterable[Entry], val: Iterable[Entry]) -> str:
    data = hashlib.sha256()
    for split, entries in (("train", train), ("val", val)):
        for entry in entries:
            data.update(f"{split}\0{entry.path}\0{entry.label}\0{entry.name}\n".encode(errors="surrogatepass"))
    return data.hexdigest()
