"""Draws as files: saved to be drawn again anywhere, and published ones.

``.json``: ``{"train": [[path, label, class name], …], "val": […]}``, with the hash of the draw where we wrote it.
``.pkl``: CoOp's cached draws, see :mod:`vacsr.data.fewshot.pickled`. ``.txt``: one path per line, all to train on.
Paths are those inside the data set; a path of another machine does too, if it ends in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vacsr.data.fewshot.entries import Entry, as_entries
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos
from vacsr.data.fewshot.paths import PathFinder
from vacsr.data.fewshot.pickled import read_pickled
from vacsr.data.fewshot.shots import Shots, entries_of, shots_of, val_split
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError
from vacsr.files import write_json


class _Index(NamedTuple):
    """What an index file lists."""

    train: Sequence[str]
    """Paths."""
    val: Sequence[str] = ()
    entries: Sequence[Entry] = ()
    """Of train and then val, where the file says labels."""
    hash: str | None = None


def save_shots(path: str | Path, shots: Shots, *, source: FewshotSource) -> None:
    """Write a draw as JSON that :func:`load_shots` reads back and checks."""
    value = {
        "source": source.name,
        "hash": shots.hash,
        "train": entries_of(source.train, shots.train),
        "val": entries_of(val_split(source), shots.val),
    }
    write_json(Path(path), value)


def load_shots(path: str | Path, source: FewshotSource) -> Shots:
    """A saved or published draw as rows of ``source``.

    Labels and class names must be those of the source, and a saved hash must fit. A published draw keeps the photos
    that it repeats; one that lists no ``val`` has no validation photos.
    """
    file = Path(path).expanduser()
    readers = {".json": _read_json, ".pkl": _read_pickle, ".txt": _read_text}
    if file.suffix.lower() not in readers:
        raise DataError(f"{file} is not an index file — give a file that ends in {', '.join(readers)}")
    if not file.is_file():
        raise DataError(f"no such index file: {file} — check the path, or leave it out to draw shots by seed")
    index = readers[file.suffix.lower()](file)
    if not index.train:
        raise DataError(f"{file} lists no photos to train on — give a draw, or leave it out to draw shots by seed")
    train = _find_rows(index.train, source.train, file=file)
    val = _find_rows(index.val, val_split(source), file=file)
    shots = shots_of(source, train=train, val=val)
    found = [*entries_of(source.train, shots.train), *entries_of(val_split(source), shots.val)]
    _check_classes(index.entries, found, file=file)
    if index.hash is not None and index.hash != shots.hash:
        message = f"{file} says that its draw has hash {index.hash[:12]}…, its photos have {shots.hash[:12]}…"
        raise DataError(f"{message} — the file was changed: draw the shots again, or take its hash out")
    return shots


def _read_json(file: Path) -> _Index:
    value = read_json(file, keys=("train",))
    if not isinstance(value.get("val", []), list):
        raise DataError(f"{file}: val is not a list — write [[path, label, class name], …] or leave it out")
    train = as_entries(value["train"], place=f"{file}, train")
    val = as_entries(value.get("val", []), place=f"{file}, val")
    mark = value.get("hash")
    return _index(train, val, mark=mark if isinstance(mark, str) else None)


def _read_pickle(file: Path) -> _Index:
    splits = read_pickled(file)
    return _index(splits["train"], splits.get("val", []), mark=None)


def _read_text(file: Path) -> _Index:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}) — save it as UTF-8 text, one path per line") from error
    return _Index([line.strip() for line in lines if line.strip()])


def _index(train: Sequence[Entry], val: Sequence[Entry], *, mark: str | None) -> _Index:
    return _Index([one.path for one in train], [one.path for one in val], [*train, *val], mark)


def _find_rows(paths: Sequence[str], photos: LabelledPhotos, *, file: Path) -> list[int]:
    finder = PathFinder(photos.ids()) if paths else None
    found = [finder.row(path) if finder else None for path in paths]
    lost = [path for path, row in zip(paths, found, strict=True) if row is None]
    if lost:
        message = f"{file}: {len(lost):,} of {len(paths):,} photos are not in {photos.name}, first {lost[0]}"
        raise DataError(f"{message} — use a draw of this data set, with paths that end as its own do")
    return [row for row in found if row is not None]


def _check_classes(listed: Sequence[Entry], found: Sequence[Entry], *, file: Path) -> None:
    """What the file says of each photo is what the data set says; underscores, spaces and case do not matter."""
    for said, known in zip(listed, found, strict=False):  # a list of paths says nothing
        if said.label != known.label or _words(said.name) != _words(known.name):
            message = f"{file} calls {said.path} class {said.label} ({said.name!r})"
            expected = f"in the data set it is {known.label} ({known.name!r})"
            raise DataError(f"{message}, {expected} — use a draw of the same split file")


def _words(name: str) -> str:
    return name.replace("_", " ").casefold()
