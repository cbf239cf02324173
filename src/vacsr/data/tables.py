"""Your own data: captions files, photos with a table (``csv:``, ``jsonl:``), and folders (``folder:``, ``photos:``).

A captions file goes with cached features. ``.json``: ``[{"image": …, "split": …, "captions": [text, …]}, …]``, images
in the order of the features; a caption's id is ``image#index``, counted from 0, unless every image lists
``caption_ids``. ``.csv`` and ``.jsonl``: one row per
caption in the order of the text features, with ``image`` and, optionally, ``caption`` (the text), ``caption_id``,
``split`` and ``image_row``. An image's row in the features is its ``image_row`` (counted from 0); without that column,
images are in the order in which they first appear, and a warning is given if captions of an image are apart: the file
may have been shuffled. A column exists for every row or for none.
"""

import csv
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from vacsr.data.archives import file_photos, missing
from vacsr.data.captions import CaptionTable, number_captions, photo_set, table_of
from vacsr.data.decode import PHOTO_SUFFIXES
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.photos import PhotoSet
from vacsr.errors import DataError
from vacsr.files import JSON_BYTES, load_json, read_lines, read_text, reading

SPLIT_FOLDERS = ("train", "dev", "val", "test")
_UNREAD = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")  # from cameras
_JSON = 'write [{"image": …, "split": …, "captions": […]}, …]'


@register("csv", path="FILE", options=("split",), path_options=("root",), suffix=".csv")
@register("jsonl", path="FILE", options=("split",), path_options=("root",), suffix=".jsonl")
def load_table(spec: Spec, on_error: OnError) -> PhotoSet:
    """``csv:FILE`` or ``jsonl:FILE[,root=DIR][,split=S]``: columns ``image`` and ``caption``, one row per caption.

    ``image`` is a path relative to the file, or to ``root``. Optional columns: ``image_id`` (otherwise the path is the
    id), ``caption_id`` (otherwise ``image#index``) and ``split``.
    """
    file, split = spec.location, spec.option("split")
    table = read_captions(file, photos=True)
    photos = file_photos(spec.path_option("root") or file.parent, table.files or table.image_ids)
    return photo_set(table, photos, split=split, on_error=on_error)


@register("folder", path="DIR", options=("split",))
def load_folder(spec: Spec, on_error: OnError) -> PhotoSet:
    """``folder:DIR[,split=S]``: photos, each with a ``.txt`` of the same name that has one caption per line.

    Sub-folders are read too; an image's id is its path inside ``DIR``. A text belongs to one photo: where ``x.jpg`` and
    ``x.png`` share one ``x.txt``, the second is a problem. Where every photo is under a sub-folder named train, dev,
    val or test, that is its split. Names that start with a dot are skipped.
    """
    root = spec.location
    expected = f"photos ({' '.join(PHOTO_SUFFIXES)}) with texts beside them (a.jpg, a.txt)"
    photos, listed, problems = list_folder(root, expected=expected)
    texts = {_stem(name): root / name for name in listed}
    owners: dict[str, str] = {}
    names = []
    for name in photos:
        owner = owners.setdefault(_stem(name), name)
        if owner == name or _stem(name) not in texts:
            names.append(name)
        else:
            problems.append(f"{root / name}: its text {texts[_stem(name)].name} belongs to {owner} too")
    problems += [f"{path}: no photo beside it" for stem, path in texts.items() if stem not in owners]
    if not texts:
        message = f"no photo in {root} has captions: expected a text file beside each, such as {_stem(names[0])}.txt"
        raise DataError(f"{message} — write them, or index and search the photos alone: photos:{spec.path}")
    captions = [read_lines(texts[_stem(name)]) if _stem(name) in texts else [] for name in names]
    return photo_set(
        _folder_table(root, names, captions),
        file_photos(root, names),
        split=spec.option("split"),
        on_error=on_error,
        problems=problems,
        uncaptioned=f"to index and search photos without captions, write photos:{spec.path}",
    )


@register("photos", path="DIR", options=("split",), captioned=False)
def load_photos(spec: Spec, on_error: OnError) -> PhotoSet:
    """``photos:DIR[,split=S]``: the photos of a folder and its sub-folders, without captions.

    Ids and splits are those of ``folder:``, so that captions may be written later; texts are ignored.
    """
    root, split = spec.location, spec.option("split")
    names, _, problems = list_folder(root, expected=f"photos ({' '.join(PHOTO_SUFFIXES)})")
    table, photos = _folder_table(root, names, [()] * len(names)), file_photos(root, names)
    return photo_set(table, photos, split=split, on_error=on_error, problems=problems, captioned=False)


def list_folder(root: Path, *, expected: str) -> tuple[list[str], list[str], list[str]]:
    """The photos of a folder and its sub-folders, at least one; its texts; and problems, one line each.

    Paths inside the folder, with slashes, sorted. Links to folders are not followed. A sub-folder that may not be read
    and a name that is not UTF-8 are problems; photos of a kind that cannot be decoded bring a warning.
    """
    problems: list[str] = []

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: the folder cannot be read ({error.strerror})")

    names = walk_files(root, onerror=unreadable)
    # Python represents bytes of a name that are not UTF-8 as lone surrogates, which no JSON file can hold.
    odd = {name for name in names if any("\ud800" <= letter <= "\udfff" for letter in name)}
    problems += [f"{root}/{os.fsencode(name)!r}: the name is not UTF-8" for name in odd]
    names = sorted(set(names) - odd)
    unread = [name for name in names if name.lower().endswith(_UNREAD)]
    if unread:
        message = f"{root}: left out, because the format cannot be decoded: {len(unread):,}, such as {unread[0]}"
        warnings.warn(f"{message} — convert to JPEG to include them", stacklevel=3)
    photos, texts = ([name for name in names if name.lower().endswith(kind)] for kind in (PHOTO_SUFFIXES, ".txt"))
    if not photos:
        raise missing(root, expected=expected)
    return photos, texts, sorted(problems)


def walk_files(
    root: Path, *, follow_links: bool = False, onerror: Callable[[OSError], None] | None = None
) -> list[str]:
    """Files in a folder and its sub-folders as paths inside it, with slashes, without hidden ones."""
    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=onerror, followlinks=follow_links):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return names


def _folder_table(root: Path, names: Sequence[str], captions: Sequence[Sequence[str]]) -> CaptionTable:
    firsts = [name.partition("/")[0] if "/" in name else "" for name in names]
    splits = firsts if all(first in SPLIT_FOLDERS for first in firsts) else None
    return table_of(root, names, captions, splits=splits)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


@dataclass(frozen=True)
class Rows:
    source: Path
    rows: list[dict[str, Any]]
    locations: list[str]  # of each row, for messages

    def column(self, name: str, *, blank: bool = False) -> tuple[str, ...] | None:
        """One value per row as text, or None where no row has the column. Blank values only where ``blank``."""
        if all(row.get(name) is None for row in self.rows):
            return None
        for row, location in zip(self.rows, self.locations, strict=True):
            value = row.get(name)
            if not isinstance(value, str | int) or isinstance(value, bool) or (not blank and not str(value).strip()):
                raise DataError(f"{location} has no usable {name} ({value!r}) — give every row one, or none")
        return tuple(str(row[name]) for row in self.rows)

    def per_image(self, images: Sequence[str], name: str) -> dict[str, str] | None:
        """The one value that each image has in a column, or None where no row has the column."""
        values, value_of = self.column(name), dict[str, str]()
        for image, value, location in zip(images, values or (), self.locations, strict=False):
            if value_of.setdefault(image, value) != value:
                raise DataError(f"{location}: image {image!r} has {name} {value!r} and {value_of[image]!r} — keep one")
        return value_of if values else None


def read_captions(path: str | Path, *, photos: bool = False) -> CaptionTable:
    """Read a ``.json``, ``.csv`` or ``.jsonl`` captions file.

    ``photos``: it goes with photos, not features. Then ``.csv`` and ``.jsonl`` must have captions (the caller handles
    blank ones), and their column ``image_id``, if any, gives the ids of images.
    """
    file = Path(path).expanduser()
    return _read_json(file) if file.suffix.lower() == ".json" else table_of_rows(read_rows(file), photos=photos)


def _read_json(path: Path) -> CaptionTable:
    entries = load_json(read_text(path, limit=JSON_BYTES, action="save it as UTF-8 JSON"), source=path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{path} is not a list of images — {_JSON}")
    rows = Rows(path, entries, [f"{path}, entry {number}" for number in range(len(entries))])
    images = rows.column("image")
    if images is None:
        raise DataError(f"{path} names no image — {_JSON}")
    captions = [entry.get("captions") for entry in entries]
    for image, texts in zip(images, captions, strict=True):
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f'image {image!r} in {path} has no list of texts — write "captions": ["…"] or leave it out')
    return table_of(path, images, captions, caption_ids=_caption_ids(entries, path), splits=rows.column("split"))


def _caption_ids(entries: Sequence[Mapping[str, Any]], path: Path) -> list[list[str]] | None:
    """The caption ids of each image of a ``.json`` file, or None where no image lists any."""
    if all(entry.get("caption_ids") is None for entry in entries):
        return None
    for entry in entries:
        names = entry.get("caption_ids")
        whole = isinstance(names, list) and len(names) == len(entry["captions"])
        if not whole or not all(isinstance(name, str | int) and str(name).strip() for name in names or ()):
            message = f"image {entry['image']!r} in {path} has caption_ids {str(names)[:60]}"
            raise DataError(f"{message} — give one id per caption in every entry, or none")
    return [[str(name) for name in entry["caption_ids"]] for entry in entries]


def read_rows(path: Path) -> Rows:
    """The rows of a ``.csv`` or ``.jsonl`` file."""
    read = {".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{path} is not a table — give a file that ends in .csv or .jsonl, or captions in .json")
    table = Rows(path, [], [])
    action = f"save it as UTF-8 {path.suffix[1:].upper()}"
    with reading(path, action=action), path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in read(file, path):
            table.locations.append(f"{path}, line {line}")
            table.rows.append(row)
    return table


def caption_lines(spec: Spec) -> dict[str, int]:
    """The line of each caption, by its id, in the ``.csv`` or ``.jsonl`` file that a SPEC reads; {} without one."""
    photos = spec.scheme in ("csv", "jsonl")
    file = spec.location if photos else spec.path_option("captions") if "captions" in spec.format.path_options else None
    if file is None or file.suffix.lower() == ".json":
        return {}
    table = read_rows(file)
    images = (table.column("image_id") if photos else None) or table.column("image") or ()
    lines = (int(location.rpartition(" ")[2]) for location in table.locations)
    return dict(zip(table.column("caption_id") or number_captions(images), lines, strict=True))


def _read_csv(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file, strict=True)
    for row in reader:
        if None in row or None in row.values():
            columns = ", ".join(reader.fieldnames or ())
            raise DataError(f"{path}, line {reader.line_num} does not fit the columns {columns} — quote commas")
        yield reader.line_num, row


def _read_jsonl(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            row = load_json(line, source=f"{path}, line {number}")
            if not isinstance(row, dict):
                raise DataError(f'{path}, line {number} is not an object — write {{"image": …, "caption": …}}')
            yield number, row


def table_of_rows(table: Rows, *, photos: bool) -> CaptionTable:
    """Gather caption rows by image."""
    columns = list(dict.fromkeys(str(name) for row in table.rows for name in row))
    needed = ("image", "caption") if photos else ("image",)
    if not set(needed) <= set(columns):
        held = ", ".join(columns) or "no row at all"
        raise DataError(f"{table.source} has {held}, expected the columns {' and '.join(needed)} — add or rename them")
    if photos:
        filled = [{**row, "caption": ""} if row.get("caption") is None else row for row in table.rows]
        table = replace(table, rows=filled)
    images = (table.column("image_id") if photos else None) or table.column("image") or ()
    file_of, split_of, number_of = (table.per_image(images, name) for name in ("image", "split", "image_row"))
    row_of = {image: row for row, image in enumerate(dict.fromkeys(images))}
    if number_of is not None:
        row_of = _image_rows(number_of, source=table.source)
    image_ids = sorted(row_of, key=row_of.__getitem__)
    starts = Counter(image for before, image in zip(("", *images), images, strict=False) if image != before)
    return CaptionTable(
        source=str(table.source),
        image_ids=tuple(image_ids),
        caption_ids=table.column("caption_id") or number_captions(images),
        caption_image=torch.tensor([row_of[image] for image in images], dtype=torch.int64),
        captions=table.column("caption", blank=True),
        splits=tuple(split_of[image] for image in image_ids) if split_of else None,
        files=tuple(file_of[image] for image in image_ids) if file_of else None,
        apart=next((image for image in starts if starts[image] > 1 and number_of is None), None),
    )


def _image_rows(number_of: Mapping[str, str], *, source: Path) -> dict[str, int]:
    """Image rows from the column ``image_row``: every row 0 … N - 1 once."""
    row_of = {
        image: int(number) if number.strip().isdecimal() and len(number) < 20 else -1
        for image, number in number_of.items()
    }
    times = Counter(row_of.values())
    wrong = next((image for image, row in row_of.items() if not 0 <= row < len(row_of) or times[row] > 1), None)
    if wrong is not None:
        message = f"{source}: image {wrong!r} has image_row {number_of[wrong][:20]!r}"
        raise DataError(f"{message} — number {len(row_of):,} images from 0 to {len(row_of) - 1}, each once")
    return row_of
