"""The one file that says what an exact index holds. What it does not name is not in the index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vacsr.errors import DataError
from vacsr.files import write_json

SCHEMA = 1
MANIFEST = "manifest.json"
_OURS = ("vectors-", "dead-", ".vectors-", ".dead-", f".{MANIFEST}.")


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
        return Manifest(**{**raw, "parts": tuple(Part(**part) for part in raw["parts"])})
    except FileNotFoundError as error:
        message = f"no index in {folder} (no {MANIFEST})"
        action = f"fill one: vacsr index add exact:{folder} --run RUN --pairs SPEC"
        raise DataError(f"{message} — {action}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not an index's manifest ({error}) — copy the folder again, or fill anew") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace it: this is the moment at which a change counts. It is synced to outlast a power cut."""
    write_json(folder / MANIFEST, {"schema": SCHEMA, **asdict(manifest)})
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path, manifest: Manifest | None) -> None:
    """Remove what a killed writer left: files of ours that the manifest does not name. Only for who holds the lock."""
    named = manifest.files() if manifest else set()
    for path in folder.iterdir():
        if path.name.startswith(_OURS) and path.name not in named:
            path.unlink(missing_ok=True)


def others(folder: Path, *, lock: str) -> list[str]:
    """Files in a folder that no index wrote."""
    return sorted(path.name for path in folder.iterdir() if path.name != lock and not path.name.startswith(_OURS))
