"""Folders of photos, listed in one order on every file system."""

from __future__ import annotations

import os
from pathlib import Path

from vacsr.data.folders import PHOTO_SUFFIXES


def subfolders(root: Path) -> list[str]:
    """Names of the folders in ``root``, sorted; hidden ones and files (a README) are passed over."""
    with os.scandir(root) as found:
        return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))


def photos_in(root: Path, folder: str) -> list[str]:
    """Photos in ``root/folder`` and below as paths inside ``root``, sorted; hidden and other files are passed over."""
    found: list[str] = []
    for place, folders, files in os.walk(root / folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(root).as_posix()
        found += [f"{inside}/{name}" for name in files if _is_photo(name)]
    return sorted(found)


def _is_photo(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(PHOTO_SUFFIXES)
