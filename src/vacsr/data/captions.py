"""Captions files: which image and which captions each row of the features stands for.

``.json``: ``[{"image": …, "split": …, "captions": [text, …]}, …]``, images in the order of the features; a caption's id
is ``image#index``, the index counted from 0.

``.csv`` and ``.jsonl``: one row per caption in the order of the text features, with ``image`` and, optionally,
``caption`` (the text), ``caption_id``, ``split`` and ``image_row``. An image's row in the features is its ``image_row``
(counted from 0); without that column, images stand in the order in which they first appear, and captions of an image
that stand apart are warned of: the file may have been shuffled. A column is there for every row or for none.

A file that goes with photos instead of features has ``image`` as the photo's path, and may have ``image_id``.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vacsr.config.io import load_json
from vacsr.data.checks import check_split, check_unique
from vacsr.errors import DataError, NoSuchSplit

Row = dict[str, Any]


@dataclass(frozen=True)
class CaptionTable:
    """Names for N image rows and M caption rows."""

    source: str
    """The file, for messages."""
    image_ids: tuple[str, ...]
    """[N]"""
    caption_ids: tuple[str, ...]
    """[M]"""
    caption_image: tuple[int, ...]
    """[M], the image row of each caption."""
    captions: tuple[str, ...] | None = None
    """[M]"""
    splits: tuple[str, ...] | None = None
    """[N], the split of each image."""
    files: tuple[str, ...] | None = None
    """[N], the photo of each image, where the ids are not its name."""
    apart: str | None = None
    """Where an image comes back after others, in words, if no ``image_row`` says which rows are whose."""


def read_captions(path: str | Path, *, photos: bool = False) -> CaptionTable:
    """Read a ``.json``, ``.csv`` or ``.jsonl`` captions file.

    ``photos``: it goes with photos, not features. Then ``.csv`` and ``.jsonl`` must have captions (a blank one is for
    the caller to judge), and their column ``image_id``, if any, gives the ids of images.
    """
    file = Path(path).expanduser()
    readers = {".json": _read_json, ".csv": _read_csv, ".jsonl": _read_jsonl}
    if file.suffix.lower() not in readers:
        raise DataError(f"{file} is not a captions file — give a file that ends in {', '.join(readers)}")
    if not file.is_file():
        raise DataError(f"no such captions file: {file} — check the path")
    try:
        table = readers[file.suffix.lower()](file, photos)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error}) — save it as UTF-8 {file.suffix[1:].upper()}") from error
    check_unique(table.image_ids, kind="image")
    check_unique(table.caption_ids, kind="caption")
    return table


def choose_split(table: CaptionTable, split: str | None) -> CaptionTable:
    """The images of one split with their captions; None or "all" for everything."""
    if split is None or split == "all":
        return table
    if table.splits is None:
        raise NoSuchSplit(
            f"split {split!r} was asked for, {table.source} has no splits — "
            "name one for every image, or take all: --split all; to train, data.train=all and data.dev_share=0.1"
        )
    check_split(split, Counter(table.splits), source=table.source)
    return take_images(table, [row for row, name in enumerate(table.splits) if name == split])


def take_images(table: CaptionTable, rows: Sequence[int]) -> CaptionTable:
    """These images [K], with all their captions in the order they had."""
    new_row = {row: new for new, row in enumerate(rows)}
    kept = [row for row, image in enumerate(table.caption_image) if image in new_row]
    return replace(
        take_captions(table, kept),
        image_ids=tuple(table.image_ids[row] for row in rows),
        caption_image=tuple(new_row[table.caption_image[row]] for row in kept),
        splits=None if table.splits is None else tuple(table.splits[row] for row in rows),
        files=None if table.files is None else tuple(table.files[row] for row in rows),
    )


def take_captions(table: CaptionTable, rows: Sequence[int]) -> CaptionTable:
    """All images, and these captions [J]."""
    return replace(
        table,
        caption_ids=tuple(table.caption_ids[row] for row in rows),
        caption_image=tuple(table.caption_image[row] for row in rows),
        captions=None if table.captions is None else tuple(table.captions[row] for row in rows),
    )


def number_captions(images: Sequence[str]) -> tuple[str, ...]:
    """Caption ids from each caption's image id [M]: the image and a count.

    >>> number_captions(["a", "b", "a"])
    ('a#0', 'b#0', 'a#1')
    """
    seen: dict[str, int] = {}
    names = []
    for image in images:
        index = seen.get(image, 0)
        seen[image] = index + 1
        names.append(f"{image}#{index}")
    return tuple(names)


def _read_json(path: Path, _photos: bool) -> CaptionTable:
    entries = load_json(path.read_text(encoding="utf-8-sig"), source=path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'{path} is not a list of images — write [{{"image": …, "split": …, "captions": […]}}, …]')
    places = [f"{path}, entry {number}" for number in range(len(entries))]
    images = _column(entries, "image", places=places)
    if images is None:
        raise DataError(f'{path} names no image — write [{{"image": …, "split": …, "captions": […]}}, …]')
    texts = [_texts_of(image, entry, path=path) for image, entry in zip(images, entries, strict=True)]
    rows = [row for row, captions in enumerate(texts) for _ in captions]
    return CaptionTable(
        source=str(path),
        image_ids=tuple(images),
        caption_ids=number_captions([images[row] for row in rows]),
        caption_image=tuple(rows),
        captions=tuple(text for captions in texts for text in captions),
        splits=_column(entries, "split", places=places),
    )


def _texts_of(image: str, entry: Row, *, path: Path) -> list[str]:
    """The captions of one JSON entry: a list of texts, not empty."""
    texts = entry.get("captions")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f'image {image!r} in {path} has no list of texts — write "captions": ["…", "…"]')
    if not texts:
        raise DataError(f"image {image!r} in {path} has an empty list of captions — give it one or leave it out")
    return texts


def _read_csv(path: Path, photos: bool) -> CaptionTable:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows, places = [], []
        for row in reader:
            places.append(f"{path}, line {reader.line_num}")
            if None in row or None in row.values():
                columns = ", ".join(reader.fieldnames or ())
                raise DataError(f"{places[-1]} does not fit the columns {columns} — quote texts that hold commas")
            rows.append(row)
    return _table_of_rows(rows, places=places, source=path, photos=photos)


def _read_jsonl(path: Path, photos: bool) -> CaptionTable:
    rows, places = [], []
    for number, line in _lines(path):
        places.append(f"{path}, line {number}")
        try:
            row = load_json(line, source=places[-1])
        except json.JSONDecodeError as error:
            raise DataError(f"{places[-1]} is not JSON ({error}) — write one object per line") from error
        if not isinstance(row, dict):
            raise DataError(f'{places[-1]} is not an object — write {{"image": …, "caption": …}}')
        rows.append(row)
    return _table_of_rows(rows, places=places, source=path, photos=photos)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _table_of_rows(rows: list[Row], *, places: list[str], source: Path, photos: bool) -> CaptionTable:
    """Gather caption rows by image."""
    if photos:
        rows = _with_captions(rows, source=source)
    files = _column(rows, "image", places=places)
    if files is None:
        columns = ", ".join(map(str, rows[0])) if rows else "none"
        raise DataError(f"{source} names no image (columns: {columns}) — add a column image with one id per caption")
    images = (_column(rows, "image_id", places=places) if photos else None) or files
    file_of = _one_per_image(images, files, name="image", places=places)
    numbers = _column(rows, "image_row", places=places)
    row_of = {image: row for row, image in enumerate(dict.fromkeys(images))}
    if numbers is not None:
        row_of = _rows_from_column(images, numbers, places=places)
    splits = _column(rows, "split", places=places)
    split_of = _one_per_image(images, splits, name="split", places=places) if splits else None
    image_ids = sorted(row_of, key=row_of.__getitem__)
    return CaptionTable(
        source=str(source),
        image_ids=tuple(image_ids),
        caption_ids=_column(rows, "caption_id", places=places) or number_captions(images),
        caption_image=tuple(row_of[image] for image in images),
        captions=_column(rows, "caption", places=places, blank=True),
        splits=None if split_of is None else tuple(split_of[image] for image in image_ids),
        files=tuple(file_of[image] for image in image_ids),
        apart=_first_apart(images, places) if numbers is None else None,
    )


def _with_captions(rows: list[Row], *, source: Path) -> list[Row]:
    """Rows that go with photos: they have both columns, and a caption that is null is blank."""
    columns = list(dict.fromkeys(str(name) for row in rows for name in row))
    if not {"image", "caption"} <= set(columns):
        found = ", ".join(columns) or "no row at all"
        raise DataError(f"{source} has {found}, expected the columns image and caption — add or rename them")
    return [{**row, "caption": ""} if row.get("caption") is None else row for row in rows]


def _first_apart(images: Sequence[str], places: Sequence[str]) -> str | None:
    """The first place where an image comes back after others, in words.

    >>> _first_apart(["a", "a", "b", "a"], ["line 2", "line 3", "line 4", "line 5"])
    "line 5: image 'a' comes back after other images"
    """
    seen: set[str] = set()
    last: str | None = None
    for image, place in zip(images, places, strict=True):
        if image != last and image in seen:
            return f"{place}: image {image!r} comes back after other images"
        seen.add(image)
        last = image
    return None


def _column(rows: list[Row], name: str, *, places: list[str], blank: bool = False) -> tuple[str, ...] | None:
    """One value per row as text, or None where no row has the column. Blank values only where ``blank``."""
    if all(row.get(name) is None for row in rows):
        return None
    for row, place in zip(rows, places, strict=True):
        value = row.get(name)
        if not isinstance(value, str | int) or isinstance(value, bool) or (not blank and not str(value).strip()):
            raise DataError(f"{place} has no usable {name} ({value!r}) — give every row one, or none")
    return tuple(str(row[name]) for row in rows)


def _one_per_image(images: Sequence[str], values: Sequence[str], *, name: str, places: Sequence[str]) -> dict[str, str]:
    """The one value of each image."""
    found: dict[str, str] = {}
    for image, value, place in zip(images, values, places, strict=True):
        if found.setdefault(image, value) != value:
            message = f"{place}: image {image!r} has {name} {value!r}, before it had {found[image]!r}"
            raise DataError(f"{message} — give an image one {name}")
    return found


def _rows_from_column(images: Sequence[str], numbers: Sequence[str], *, places: Sequence[str]) -> dict[str, int]:
    """Image rows from the column ``image_row``: every row 0 … N - 1 once."""
    for number, place in zip(numbers, places, strict=True):
        if not (number.isascii() and number.strip().isdigit()):
            raise DataError(f"{place}: image_row is {number!r}, expected a number — count rows from 0")
    row_of = {
        image: int(row) for image, row in _one_per_image(images, numbers, name="image_row", places=places).items()
    }
    taken: dict[int, str] = {}
    for image, row in row_of.items():
        if taken.setdefault(row, image) != image:
            raise DataError(f"images {taken[row]!r} and {image!r} both have image_row {row} — give each its own")
    gap = next((row for row in range(len(row_of)) if row not in taken), None)
    if gap is not None:
        message = f"no caption names image_row {gap}; {len(row_of):,} images need the rows 0 to {len(row_of) - 1}"
        raise DataError(f"{message} — number them without gaps, or leave uncaptioned images out of the features")
    return row_of
