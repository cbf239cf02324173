"""The one file that says what an exact index holds. What it does not name is not in the index."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.files import disk_errors, lock_file, make_folder, write_json

SCHEMA = 1
MANIFEST = "manifest.json"
LOCK = "writer.lock"
DTYPES = {"float32": torch.float32, "float16": torch.float16}
_DATA = re.compile(r"(vectors|dead)-\d{8,}-\d+\.safetensors")
_TEMPORARY = re.compile(rf"\.({_DATA.pattern}|{re.escape(MANIFEST)})\.\d+\.tmp")


@dataclass(frozen=True)
class Part:
    """One file of vectors that never changes, and which of its rows are dead."""

    name: str
    rows: int
    bytes: int
    longest: float = 0.0
    """Length of the longest vector: bounds how far products may be rounded."""
    dead: str = ""
    """The file of the dead rows' marks; "" where all live."""
    dead_rows: int = 0

    @property
    def live(self) -> int:
        """Rows that a search can find."""
        return self.rows - self.dead_rows

    def files(self) -> Iterator[str]:
        """Of vectors, and of marks."""
        yield self.name
        if self.dead:
            yield self.dead


@dataclass(frozen=True)
class Manifest:
    """An index at one moment."""

    dim: int
    dtype: str
    provenance: str
    generation: int = 0
    """Grows by one with every change."""
    parts: tuple[Part, ...] = ()
    """Older rows first."""
    id: str = ""
    """Drawn when the index is made, so that one made anew in its place is not taken for it."""
    sources: tuple[str, ...] = ()
    """SPECs, in the order of their first use."""

    def files(self) -> set[str]:
        """All that belongs to it."""
        return {name for part in self.parts for name in part.files()}


def read_manifest(folder: Path) -> Manifest:
    """A manifest is replaced as a whole, so that a reader sees one state or the next."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("schema") != SCHEMA:
            raise DataError(
                f"{path} was not written by this version of vacsr (schema {SCHEMA} expected) — fill it anew"
            )
        parts, sources = tuple(Part(**part) for part in raw["parts"]), tuple(raw.get("sources", ()))
        return Manifest(**{**raw, "parts": parts, "sources": sources})
    except FileNotFoundError as error:
        message = f"no index in {folder} (no {MANIFEST})"
        action = f"fill one: vacsr index add exact:{folder} --run RUN --pairs SPEC"
        raise DataError(f"{message} — {action}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not an index's manifest ({error}) — copy the folder again, or fill anew") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace it: this is the moment at which a change counts.

    To outlast a power cut the names of the files that it tells of are synced before, its own after.
    """
    sync_folder(folder)
    write_json(folder / MANIFEST, {"schema": SCHEMA, **asdict(manifest)})
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Push the names in a folder to the disk."""
    try:
        with disk_errors(folder):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise EnvironmentProblem(f"cannot sync {folder} ({error.strerror}) — check the folder and its disk") from error


def writer_lock(folder: Path, *, patience: float) -> AbstractContextManager[None]:
    """One writer at a time; wait up to ``patience`` seconds for another."""
    return lock_file(
        folder / LOCK,
        wait="wait until it is done, then run the same again",
        elsewhere="check the permissions, or use a local disk of Linux or macOS, or a Milvus server: milvus:URI",
        patience=patience,
        required=True,
    )


def create_exact(folder: Path, *, dim: int, provenance: str = "", dtype: str = "float32") -> None:
    """Make an empty index, unless there is one. A folder with other things in it is refused."""
    if dtype not in DTYPES or dim < 1:
        raise UsageError(f"dtype {dtype!r}, dimension {dim} — use float32 or float16, and 1 or more")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, an exact index is a folder — choose another name")
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    strangers = _strangers(folder)
    if strangers and MANIFEST not in strangers:
        message = f"{folder} holds other files, such as {strangers[0]!r}, and no index"
        raise UsageError(f"{message} — give a new or empty folder")
    with writer_lock(folder, patience=30.0):
        if not (folder / MANIFEST).exists():
            _refuse_orphans(folder)
            write_manifest(folder, Manifest(dim, dtype, provenance, id=uuid.uuid4().hex))
    for path in {folder, *new}:
        with suppress(EnvironmentProblem):  # a parent that may be passed through and not read
            sync_folder(path.parent)


def sweep(folder: Path, manifest: Manifest) -> None:
    """Remove what a killed writer left: files of ours that the manifest does not name. Only for who holds the lock."""
    named = manifest.files()
    for path in folder.iterdir():
        if _is_ours(path) and path.name not in named:
            path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """A plain file under a name that only an index gives: whatever else lies in the folder is somebody's."""
    named = _DATA.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
    return bool(named) and path.is_file() and not path.is_symlink()


def _strangers(folder: Path) -> list[str]:
    """Files in a folder that no index wrote, and the manifest."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK and not _is_ours(path))


def _refuse_orphans(folder: Path) -> None:
    """Vectors without a manifest are an index that lost it, and a new manifest would have them swept away."""
    found = sorted(path.name for path in folder.iterdir() if _DATA.fullmatch(path.name))
    if found:
        message = f"{folder} holds an index's files, such as {found[0]!r}, but no {MANIFEST}"
        raise DataError(f"{message} — copy {MANIFEST} back, or fill another folder, or remove these files first")
