"""ImageNet and the four sets that shift it: folders named by WordNet ids, and ``classnames.txt`` that names these.

Labels are places in the sorted list of folders. ImageNet-A and -R hold 200 folders and are 200-way over these; the
folders of ImageNet-V2 are the labels themselves. The public code trains and selects on files in the order of the disk
and uses ImageNet's ``val`` both to validate and to test; here files are sorted, and ``val`` is the test alone.
"""

from __future__ import annotations

from pathlib import Path

from vacsr.data.fewshot.entries import Entry, Splits
from vacsr.data.fewshot.listing import photos_in, subfolders
from vacsr.errors import DataError

CLASSNAMES = "classnames.txt"


def read_imagenet(folder: Path) -> Splits:
    """``images/train`` and ``images/val``, which is the test."""
    names, images = read_classnames(folder / CLASSNAMES), folder / "images"
    train, test = class_folders(images / "train"), class_folders(images / "val")
    differ = sorted(set(train) ^ set(test))
    if differ:
        where = "train" if differ[0] in train else "val"
        message = f"{images}: train and val hold other classes ({len(differ):,} differ), {differ[0]} is in {where} only"
        raise DataError(f"{message} — labels are places in the list of folders: make both lists the same")
    classes = _named(train, names, place=folder / CLASSNAMES)
    parts = [_entries(images, train, classes, inside=f"{part}/") for part in ("train", "val")]
    return Splits(parts[0], None, parts[1], classes)


def read_shifted(folder: Path, *, photos: str) -> Splits:
    """Test photos in ``photos/nXXXXXXXX``, labels over the folders that are there."""
    folders = class_folders(folder / photos)
    classes = _named(folders, read_classnames(folder / CLASSNAMES), place=folder / CLASSNAMES)
    return Splits((), None, _entries(folder / photos, folders, classes), classes)


def read_numbered(folder: Path, *, photos: str) -> Splits:
    """Test photos in ``photos/0``, ``photos/1``, …: the number is the place of the class among the sorted ids."""
    names = read_classnames(folder / CLASSNAMES)
    classes = tuple(names[wnid] for wnid in sorted(names))
    found = subfolders(folder / photos)
    wrong = [name for name in found if not name.isdecimal() or int(name) >= len(classes)]
    if wrong:
        message = f"{folder / photos / wrong[0]}: label out of range, expected folders 0 to {len(classes) - 1}"
        raise DataError(f"{message} — extract the matched-frequency set again, or mend {folder / CLASSNAMES}")
    entries = [
        Entry(path, int(name), classes[int(name)])
        for name in sorted(found, key=int)
        for path in photos_in(folder / photos, name)
    ]
    return Splits((), None, entries, classes)


def read_classnames(file: Path) -> dict[str, str]:
    """Lines of ``nXXXXXXXX class name``: id to name."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}) — copy it again") from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        wnid, _, name = line.strip().partition(" ")
        if not wnid:
            continue
        if not name.strip() or wnid in names:
            what = "has no class name" if not name.strip() else f"names {wnid} again"
            raise DataError(f"{file}, line {number} {what} — write one line per class: n01440764 tench")
        names[wnid] = name.strip()
    return names


def class_folders(folder: Path) -> list[str]:
    """The class folders, sorted; photos that were never sorted into such folders are refused."""
    folders = subfolders(folder)
    if not folders:
        loose = next((path.name for path in sorted(folder.iterdir()) if path.is_file()), None)
        held = "nothing" if loose is None else f"no folders, but files such as {loose}"
        raise DataError(f"{folder} holds {held} — sort the photos into one folder per class (n01440764, …)")
    return folders


def _named(folders: list[str], names: dict[str, str], *, place: Path) -> tuple[str, ...]:
    lost = [name for name in folders if name not in names]
    if lost:
        message = f"{place} does not name {len(lost):,} of {len(folders):,} folders, first {lost[0]}"
        raise DataError(f"{message} — use the file of CoOp's data instructions, or move other folders away")
    return tuple(names[name] for name in folders)


def _entries(root: Path, folders: list[str], classes: tuple[str, ...], *, inside: str = "") -> list[Entry]:
    return [
        Entry(path, label, classes[label])
        for label, name in enumerate(folders)
        for path in photos_in(root, f"{inside}{name}")
    ]
