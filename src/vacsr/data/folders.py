"""What lies in a folder and its sub-folders: photos, texts, and what could not be looked at."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

PHOTO_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")
_UNREAD = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")  # from cameras


class FolderFiles(NamedTuple):
    """Paths inside a folder, with slashes, in the order of their names."""

    photos: list[str]
    texts: list[str]
    problems: list[str]
    """Sub-folders that may not be read, and names that are no text, one line each."""


def list_folder(root: Path) -> FolderFiles:
    """Look through a folder. Names that start with a dot are left out, links to folders are not followed.

    Photos of a kind that nothing here can decode bring a warning: who put them there expects to find them again.
    """
    names: list[str] = []
    problems: list[str] = []

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: the folder cannot be read ({error.strerror})")

    for place, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(root)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    strange = [name for name in names if not _is_text(name)]
    problems += [f"{root}/{os.fsencode(name)!r}: the name is not UTF-8" for name in strange]
    names = sorted(set(names).difference(strange))
    _warn_of_unread(root, [name for name in names if name.lower().endswith(_UNREAD)])
    return FolderFiles(
        photos=[name for name in names if name.lower().endswith(PHOTO_SUFFIXES)],
        texts=[name for name in names if name.lower().endswith(".txt")],
        problems=sorted(problems),
    )


def _is_text(name: str) -> bool:
    """Python keeps bytes of a name that are no text as lone surrogates, which no JSON file can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _warn_of_unread(root: Path, names: list[str]) -> None:
    if names:
        message = f"{root}: {len(names):,} photos of kinds that are not read are left out, such as {names[0]}"
        warnings.warn(f"{message} — convert them to JPEG to have them", stacklevel=4)
