"""FGVC-Aircraft: its own lists of variants and of images, no split file of CoOp's."""

from __future__ import annotations

from pathlib import Path

from vacsr.data.fewshot.entries import Entry, Splits
from vacsr.errors import DataError

VARIANTS = "variants.txt"
IMAGE_LISTS = {part: f"images_variant_{part}.txt" for part in ("train", "val", "test")}


def read_aircraft(folder: Path) -> Splits:
    """Labels are lines of ``variants.txt``; the lists hold lines of ``image variant``, the image without ``.jpg``."""
    classes = tuple(_lines(folder / VARIANTS))
    labels = {name: label for label, name in enumerate(classes)}
    if len(labels) < len(classes):
        twice = next(name for label, name in enumerate(classes) if labels[name] != label)
        raise DataError(f"{folder / VARIANTS} names {twice!r} twice — copy it again")
    parts = {part: _entries(folder / name, labels) for part, name in IMAGE_LISTS.items()}
    return Splits(parts["train"], parts["val"], parts["test"], classes)


def _entries(file: Path, labels: dict[str, int]) -> list[Entry]:
    entries = []
    for number, line in enumerate(_lines(file), start=1):
        image, _, name = line.partition(" ")
        if name not in labels:
            message = f"{file}, line {number}: variant {name!r} is not in {VARIANTS}"
            raise DataError(f"{message} — copy both files again, or write lines of: 0034309 707-320")
        entries.append(Entry(f"{image}.jpg", labels[name], name))
    return entries


def _lines(file: Path) -> list[str]:
    """Lines that are not blank."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}) — copy it again") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
