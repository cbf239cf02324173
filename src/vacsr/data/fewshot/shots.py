"""K photos of each class, drawn by seed, or as a file lists them.

Draws run over all classes; base and new classes are chosen from them later. A class with fewer than K photos gives all
of them (the public code repeats photos). Photos are sorted by a hash of (seed, purpose, class, name). So a draw does
not depend on the disk, and a draw of four is the start of the draw of sixteen.

Draws in files: ``.json``, ``{"train": [[path, label, class name], …], "val": […]}``, with the hash of the draw if we
wrote it; ``.txt``, one path per line, all to train on. Paths are those inside the data set, or end in one of them.
"""

import hashlib
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vacsr.data.fewshot.labelled import Entry, FewshotSource, LabelledPhotos, as_entries
from vacsr.errors import DataError, UsageError
from vacsr.files import read_json, read_lines, write_json

VAL_SHOTS = 4  # the most validation photos per class, as in CoOp


class Shots(NamedTuple):
    train: Tensor  # [S] int64 rows of source.train, by class
    val: Tensor  # [V] int64 rows of source.val, or of source.train where the source has none; see take_shots
    hash: str  # of names and labels: two runs with the same one saw the same photos


def draw_shots(source: FewshotSource, *, shots: int, seed: int) -> Shots:
    """``shots`` photos per class to train on and min(shots, 4) to validate on, without replacement.

    Validation photos come from ``source.val``, or from what is left of ``source.train`` where there is none.
    """
    if not len(source.train):
        raise UsageError(f"{source.name} is for tests only and has no training photos — draw shots from another set")
    ranked = _ranked(source.train, seed=seed, purpose="train")
    held_out = [rows[shots:] for rows in ranked]
    if val_split(source) is not source.train:
        held_out = _ranked(val_split(source), seed=seed, purpose="val")
    train = [row for rows in ranked for row in rows[:shots]]
    val = [row for rows in held_out for row in rows[: min(shots, VAL_SHOTS)]]
    return shots_of(source, train=train, val=val)


def take_shots(source: FewshotSource, shots: Shots) -> tuple[LabelledPhotos, LabelledPhotos]:
    """The photos to train and to validate on; missing files are an error before training starts."""
    train, val = source.train.take(shots.train), val_split(source).take(shots.val)
    train.check_files()
    val.check_files()
    return train, val


def shots_of(source: FewshotSource, *, train: Iterable[int], val: Iterable[int]) -> Shots:
    """A draw from row numbers, with its hash."""
    rows = torch.tensor(list(train), dtype=torch.int64)
    held_out = torch.tensor(list(val), dtype=torch.int64)
    if val_split(source) is source.train and set(rows.tolist()) & set(held_out.tolist()):
        raise DataError(f"{source.name}: a photo is both trained and validated on — draw the shots again")
    data = hashlib.sha256()
    for split, photos, chosen in (("train", source.train, rows), ("val", val_split(source), held_out)):
        for entry in entries_of(photos, chosen):
            data.update(f"{split}\0{entry.path}\0{entry.label}\0{entry.name}\n".encode(errors="surrogatepass"))
    return Shots(rows, held_out, data.hexdigest())


def val_split(source: FewshotSource) -> LabelledPhotos:
    """Where validation photos are drawn."""
    return source.val if source.val is not None and len(source.val) else source.train


def entries_of(photos: LabelledPhotos, rows: Tensor) -> list[Entry]:
    ids, labels = photos.ids(), photos.labels.tolist()
    return [Entry(ids[row], labels[row], photos.classes[labels[row]]) for row in rows.tolist()]


def _ranked(photos: LabelledPhotos, *, seed: int, purpose: str) -> list[list[int]]:
    """Rows per class in the order of the draw, classes by label."""
    ids = photos.ids()
    return [
        seeded_rows(ids, rows, seed=seed, purpose=purpose, class_name=photos.classes[label])
        for label, rows in rows_by_label(photos.labels.tolist()).items()
    ]


def seeded_rows(ids: Sequence[str], rows: Sequence[int], *, seed: int, purpose: str, class_name: str) -> list[int]:
    """``rows`` of one class, in the order of their ids' hashes."""

    def key(row: int) -> tuple[bytes, str, int]:
        words = f"{seed}\0{purpose}\0{class_name}\0{ids[row]}"
        return hashlib.sha256(words.encode(errors="surrogatepass")).digest(), ids[row], row

    return sorted(rows, key=key)


def rows_by_label(labels: Sequence[int]) -> Mapping[int, list[int]]:
    """Which rows carry each label, labels in order."""
    rows: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return dict(sorted(rows.items()))


def save_shots(path: str | Path, shots: Shots, *, source: FewshotSource) -> None:
    """Write a draw as JSON that :func:`load_shots` reads back and checks."""
    train, val = entries_of(source.train, shots.train), entries_of(val_split(source), shots.val)
    write_json(Path(path), {"source": source.name, "hash": shots.hash, "train": train, "val": val})


def load_shots(path: str | Path, source: FewshotSource) -> Shots:
    """A saved or published draw as rows of ``source``.

    Labels and class names must be those of the source, and a saved hash must fit. A published draw keeps the photos
    that it repeats; one that lists no ``val`` has no validation photos.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() == ".txt":
        paths = [line.strip() for line in read_lines(file)]
        shots = shots_of(source, train=_find_rows(paths, source.train, file), val=())
    elif file.suffix.lower() == ".json":
        shots = _shots_of_entries(read_json(file), source, file=file)
    else:
        keys = '{"train": [[path, label, class name], …], "val": […]}'
        action = f"convert it to JSON once, {keys}" if file.suffix.lower() == ".pkl" else "give .json or .txt"
        raise DataError(f"{file} is not a list of shots in .json or .txt — {action}")
    if not len(shots.train):
        raise DataError(f"{file} lists no photos to train on — list some, or leave the file out to draw shots by seed")
    return shots


def _shots_of_entries(value: dict[str, Any], source: FewshotSource, *, file: Path) -> Shots:
    """The rows of ``{"train": [[path, label, class name], …], "val": …}``, checked against the source."""
    rows = {}
    for part, photos in (("train", source.train), ("val", val_split(source))):
        listed = value.get(part, [])
        if not isinstance(listed, list):
            raise DataError(f"{file}: {part} is not a list — write [[path, label, class name], …]")
        entries = as_entries(listed, source=f"{file}, {part}")
        rows[part] = _find_rows([entry.path for entry in entries], photos, file)
        _check_classes(entries, photos, rows[part], file=file)
    shots = shots_of(source, train=rows["train"], val=rows["val"])
    if value.get("hash", shots.hash) != shots.hash:
        raise DataError(f"{file} was changed: its photos do not match its hash — draw again, or remove the hash")
    return shots


def _find_rows(paths: Sequence[str], photos: LabelledPhotos, file: Path) -> list[int]:
    """The rows of photos whose ids are the longest ends of the paths."""

    def plain(path: str) -> str:
        return posixpath.normpath(path.replace("\\", "/"))

    row_of: dict[str, int] = {}
    for row, name in enumerate(photos.ids()):
        row_of.setdefault(plain(name), row)
    rows = []
    for path in paths:
        end = plain(path)
        while end and end not in row_of:
            end = end.partition("/")[2]
        if not end:
            raise DataError(f"{file}: {path} is not in {photos.name} — use shots of this data set")
        rows.append(row_of[end])
    return rows


def _check_classes(entries: Sequence[Entry], photos: LabelledPhotos, rows: Sequence[int], *, file: Path) -> None:
    """The file gives each photo the class that the data set gives it, but for underscores and case."""

    def words(name: str) -> str:
        return name.replace("_", " ").casefold()

    for entry, row in zip(entries, rows, strict=True):
        label = int(photos.labels[row])
        name = photos.classes[label]
        if entry.label != label or words(entry.name) != words(name):
            message = f"{file} calls {entry.path} class {entry.label} ({entry.name!r})"
            raise DataError(f"{message}, in the data set it is {label} ({name!r}) — use shots of the same split file")
