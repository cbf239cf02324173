"""Where photos are stored: files in a folder, members of a zip, members of tar shards, or some of each.

Several threads may read at once. Photos travel to other processes by fork and by pickle, and share no file position.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from vacsr.data.decode import PHOTO_BYTES, decode_photo
from vacsr.data.photos import SKIP
from vacsr.errors import DataError
from vacsr.files import reading

_ZIP_LISTING = 1 << 27  # bytes; a zip of ImageNet lists its photos in 110 MB


class BoundedReader(io.BufferedReader):
    """A file of any size, of which one read gives at most ``limit`` bytes, whatever its headers ask for."""

    def __init__(self, path: Path, *, limit: int) -> None:
        super().__init__(io.FileIO(path))
        self._path, self._limit = path, limit

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = max(0, os.fstat(self.fileno()).st_size - self.tell())
        if size > self._limit:
            message = f"{self._path} asks to read {size:,} bytes at once, {self._limit:,} are the limit"
            raise DataError(f"{message} — the file is damaged or harmful: copy it again")
        return super().read(size)


class StoredPhoto(ABC):
    """One photo that exists as encoded bytes."""

    __slots__ = ()  # a data set may have millions
    id: str  # its path inside the data set

    @abstractmethod
    def name(self) -> str:
        """The path, or the archive and the member."""

    def exists(self) -> bool:
        """Whether the file or member is there, readable or not."""
        return self.version() >= 0

    @abstractmethod
    def read(self) -> bytes:
        """The file as it is, of at most :data:`.PHOTO_BYTES`."""

    @abstractmethod
    def version(self) -> int:
        """Its size, or a checksum where one is stored; -1 if it does not exist. Does not depend on times."""

    @abstractmethod
    def fingerprint(self) -> str:
        """By size and time, or checksum, without reading it; "" if it does not exist."""


@dataclass(frozen=True, eq=False)
class StoredPhotos:
    """Photos in files and archives. Satisfies :class:`.Photos`."""

    items: tuple[StoredPhoto, ...]
    otherwise: str = SKIP  # what else the user can do about a photo that cannot be read

    def __len__(self) -> int:
        return len(self.items)

    def name(self, row: int) -> str:
        return self.items[row].name()

    def open(self, row: int, *, side: int = 0) -> Image.Image:
        try:
            return decode_photo(self.items[row].read(), name=self.name(row), side=side)
        except DataError as error:
            raise DataError(f"{error}, or {self.otherwise}") from error

    def take(self, rows: Sequence[int]) -> StoredPhotos:
        return replace(self, items=tuple(self.items[row] for row in rows))

    def digest(self) -> str:
        """Of ids, and sizes or checksums; where the photos are does not matter."""
        data = hashlib.sha256()
        for item in self.items:
            data.update(f"{item.id}\0{item.version()}\n".encode(errors="surrogatepass"))
        return data.hexdigest()

    def fingerprint(self, row: int) -> str:
        return self.items[row].fingerprint()


@dataclass(frozen=True, slots=True)
class FilePhoto(StoredPhoto):
    """A file of its own."""

    root: Path
    id: str  # relative to root, or absolute

    def name(self) -> str:
        return str(self.root / self.id)

    def read(self) -> bytes:
        path = self.root / self.id
        with reading(path, limit=PHOTO_BYTES, action="copy it again"):
            return path.read_bytes()

    def version(self) -> int:
        path = self.root / self.id
        return path.stat().st_size if os.path.isfile(path) else -1

    def fingerprint(self) -> str:
        return _file_fingerprint(self.root / self.id)


def file_photos(root: Path, names: Iterable[str]) -> StoredPhotos:
    """Photos by their paths, relative to ``root`` or absolute."""
    return StoredPhotos(tuple(FilePhoto(root, name) for name in names))


@dataclass(frozen=True, slots=True)
class TarPhoto(StoredPhoto):
    """A member of an uncompressed tar. Each read opens the tar: there may be more than a process may keep open."""

    shard: Path
    id: str
    offset: int  # of its first byte
    size: int

    def name(self) -> str:
        return f"{self.shard}/{self.id}"

    def read(self) -> bytes:
        try:
            with BoundedReader(self.shard, limit=PHOTO_BYTES) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.name()} cannot be read ({error}) — copy the shard again") from error
        if len(data) != self.size:
            raise DataError(f"{self.name()} is truncated: its shard has changed — copy the shard again")
        return data

    def version(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        """Offset and size of the member, size and time of the shard."""
        return f"{self.offset}+{self.size} {_file_fingerprint(self.shard)}"


@dataclass(frozen=True, slots=True)
class ZipPhoto(StoredPhoto):
    """A member of a zip, stored or deflated."""

    zip: _Zip
    id: str
    member: zipfile.ZipInfo | None  # None if the zip does not have it

    def name(self) -> str:
        return f"{self.zip.path}/{self.id}"

    def read(self) -> bytes:
        if self.member is None:
            raise DataError(f"{self.name()} is not in the zip — check its name, copy the zip again")
        if self.member.file_size > PHOTO_BYTES:
            message = f"{self.name()} has {self.member.file_size:,} bytes, the limit for a photo is {PHOTO_BYTES:,}"
            raise DataError(f"{message} — make it smaller")
        if self.member.flag_bits & 1 or self.member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{self.name()} is encrypted or has another compression — pack it again with zip -0")
        try:
            with self.zip.open().open(self.member) as file:
                return file.read(self.member.file_size)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
            raise DataError(f"{self.name()} is damaged ({error}) — copy the zip again") from error

    def version(self) -> int:
        return -1 if self.member is None else self.member.CRC

    def fingerprint(self) -> str:
        return "" if self.member is None else f"{self.member.file_size} {self.member.CRC:08x}"


class _Zip:
    """One open zip per process: forked processes would share its file position.

    Its threads share it, for zipfile locks each read; a handle per thread was slower (4,000 photos: 0.6 s, not 0.33 s).
    """

    def __init__(self, path: Path) -> None:
        self.path, self._process = path, -1
        self._file: zipfile.ZipFile | None = None

    def open(self) -> zipfile.ZipFile:
        """The zip, opened when this process first asks."""
        if self._file is None or self._process != os.getpid():
            self._file, self._process = zipfile.ZipFile(BoundedReader(self.path, limit=PHOTO_BYTES)), os.getpid()
        return self._file

    def __reduce__(self) -> tuple[type[_Zip], tuple[Path]]:
        return type(self), (self.path,)


def zip_photos(path: Path, names: Sequence[str]) -> StoredPhotos:
    """Photos by the full names of members, otherwise by the last part where only one member has it."""
    try:
        with BoundedReader(path, limit=_ZIP_LISTING) as file, zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"{path} is not a complete zip file ({error}) — copy it again") from error
    counts = Counter(name.rpartition("/")[2] for name in members)
    by_last = {last: info for name, info in members.items() if counts[last := name.rpartition("/")[2]] == 1}
    source = _Zip(path)
    return StoredPhotos(tuple(ZipPhoto(source, name, members.get(name) or by_last.get(name)) for name in names))


def find_photos(candidates: Sequence[Path], names: Sequence[str], *, root: Path) -> StoredPhotos:
    """The photos ``names`` in the first candidate that exists, a folder or a zip, of a data set in ``root``."""
    for path in candidates:
        if path.is_dir():
            return file_photos(path, names)
        if path.is_file():
            return zip_photos(path, names)
    raise missing(root, expected=f"the photos in {' or '.join(map(str, candidates))}")


def missing(root: Path, *, expected: str) -> DataError:
    """The error for a folder that does not hold what a data set needs."""
    if not root.is_dir():
        return DataError(f"{root} is not a folder; expected {expected} — correct the path")
    names = sorted(path.name + "/" * path.is_dir() for path in root.iterdir())
    held = ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"
    return DataError(f"{root} holds {held}; expected {expected} — put the files there or correct the path")


def _file_fingerprint(path: Path) -> str:
    return f"{path.stat().st_size} {path.stat().st_mtime_ns}" if os.path.isfile(path) else ""
