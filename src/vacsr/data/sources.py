"""Where photos lie: files in a folder, members of a zip or of tar shards, or some of each.

All of them read by path or by offset and share no file position, so that several threads may read at once; they travel
to other processes by fork and by pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vacsr.data.stored import AGAIN, StoredPhotos, digest_of
from vacsr.data.zips import ZipPhotos
from vacsr.errors import DataError

__all__ = ["FilePhotos", "JoinedPhotos", "StoredPhotos", "TarMember", "TarPhotos", "ZipPhotos", "find_photos"]


@dataclass(frozen=True, eq=False)
class FilePhotos(StoredPhotos):
    """One file per photo."""

    root: Path
    paths: tuple[str, ...]
    """Relative to ``root``, or absolute."""

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, row: int) -> str:
        """The path."""
        return str(self.root / self.paths[row])

    def has(self, row: int) -> bool:
        """Whether the file exists."""
        return (self.root / self.paths[row]).is_file()

    def encoded(self, row: int) -> bytes:
        """The whole file."""
        try:
            return (self.root / self.paths[row]).read_bytes()
        except OSError as error:
            raise DataError(f"{self.name(row)} cannot be read ({error.strerror}) — {AGAIN}") from error

    def take(self, rows: Sequence[int]) -> FilePhotos:
        """Some of them."""
        return FilePhotos(self.root, tuple(self.paths[row] for row in rows))

    def digest(self) -> str:
        """Of paths and sizes; a file that is gone counts as size -1."""
        return digest_of((path, _size(self.root / path)) for path in self.paths)


class TarMember(NamedTuple):
    """Where a shard keeps one photo."""

    shard: int
    """Which shard."""
    name: str
    offset: int
    """Of its first byte."""
    size: int


@dataclass(frozen=True, eq=False)
class TarPhotos(StoredPhotos):
    """Members of uncompressed tar shards. Each read opens its shard: there may be more than a process may keep open."""

    shards: tuple[Path, ...]
    members: tuple[TarMember, ...]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, row: int) -> str:
        """Shard and member."""
        return f"{self.shards[self.members[row].shard]}/{self.members[row].name}"

    def has(self, row: int) -> bool:
        """Always: the members come from the shards themselves."""
        return True

    def encoded(self, row: int) -> bytes:
        """The member."""
        member = self.members[row]
        try:
            with self.shards[member.shard].open("rb") as file:
                file.seek(member.offset)
                data = file.read(member.size)
        except OSError as error:
            raise DataError(f"{self.name(row)} cannot be read ({error}) — {AGAIN}") from error
        if len(data) != member.size:
            raise DataError(f"{self.name(row)} is cut short, its shard has changed — copy the shard again")
        return data

    def take(self, rows: Sequence[int]) -> TarPhotos:
        """Some of them."""
        return TarPhotos(self.shards, tuple(self.members[row] for row in rows))

    def digest(self) -> str:
        """Of names and sizes."""
        return digest_of((member.name, member.size) for member in self.members)


@dataclass(frozen=True, eq=False)
class JoinedPhotos(StoredPhotos):
    """Photos of several places as one list."""

    parts: tuple[StoredPhotos, ...]
    places: tuple[tuple[int, int], ...]
    """[N], part and row in it of each photo."""

    def __len__(self) -> int:
        return len(self.places)

    def name(self, row: int) -> str:
        """As its part calls it."""
        part, inner = self.places[row]
        return self.parts[part].name(inner)

    def has(self, row: int) -> bool:
        """As its part says."""
        part, inner = self.places[row]
        return self.parts[part].has(inner)

    def encoded(self, row: int) -> bytes:
        """From its part."""
        part, inner = self.places[row]
        return self.parts[part].encoded(inner)

    def take(self, rows: Sequence[int]) -> JoinedPhotos:
        """Some of them."""
        return JoinedPhotos(self.parts, tuple(self.places[row] for row in rows))

    def digest(self) -> str:
        """Of the parts' own, each over what is used of it, and of the order."""
        used = [[inner for part, inner in self.places if part == number] for number in range(len(self.parts))]
        digests = [part.take(rows).digest() for part, rows in zip(self.parts, used, strict=True)]
        return digest_of([(digest, 0) for digest in digests] + [("", part) for part, _ in self.places])


def find_photos(places: Iterable[Path], names: Sequence[str]) -> StoredPhotos | None:
    """The photos ``names`` in the first of the places that exists, a folder or a zip; None where none exists."""
    for place in places:
        if place.is_dir():
            return FilePhotos(place, tuple(names))
        if place.is_file():
            return ZipPhotos(place, names)
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
