"""Photos inside a zip. Zips of photos are large, so the zip is opened once and its members are read where they lie."""

from __future__ import annotations

import copy
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vacsr.data.stored import AGAIN, StoredPhotos, digest_of
from vacsr.errors import DataError

_LOCAL_HEADER = 30  # bytes before the name of a zip member


class ZipMember(NamedTuple):
    """Where a zip keeps one photo."""

    offset: int
    """Of its local header."""
    packed: int
    """Bytes as stored."""
    size: int
    """Bytes as unpacked."""
    crc: int
    method: int
    encrypted: bool


class ZipPhotos(StoredPhotos):
    """Members of one zip, stored or deflated. The zip is opened once."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """``names`` of the photos, each the whole name of a member or its last part."""
        self.path, self.names = path, tuple(names)
        self.members: Mapping[str, ZipMember] = _zip_members(path, self.names)
        self._file = RandomFile(path)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        """Zip and member."""
        return f"{self.path}/{self.names[row]}"

    def has(self, row: int) -> bool:
        """Whether the zip lists it."""
        return self.names[row] in self.members

    def encoded(self, row: int) -> bytes:
        """The member, unpacked and checked."""
        member = self.members.get(self.names[row])
        if member is None:
            raise DataError(f"{self.name(row)} is not in the zip — {AGAIN}")
        try:
            data = self._read(member)
        except (OSError, zlib.error) as error:
            raise DataError(f"{self.name(row)} cannot be read ({error}) — {AGAIN}") from error
        if data is None:
            raise DataError(f"{self.name(row)} is encrypted or packed in a rare way — pack it again with zip -0")
        if len(data) != member.size or zlib.crc32(data) != member.crc:
            raise DataError(f"{self.name(row)} is damaged: its checksum does not fit — {AGAIN}")
        return data

    def _read(self, member: ZipMember) -> bytes | None:
        if member.encrypted or member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return None
        header = self._file.read(member.offset, _LOCAL_HEADER)
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        data = self._file.read(member.offset + _LOCAL_HEADER + skipped, member.packed)
        if member.method == zipfile.ZIP_STORED:
            return data
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)  # no more than it promised

    def take(self, rows: Sequence[int]) -> ZipPhotos:
        """Some of them."""
        taken = copy.copy(self)  # the same open file
        taken.names = tuple(self.names[row] for row in rows)
        return taken

    def digest(self) -> str:
        """Of names and checksums."""
        return digest_of((name, self.members[name].crc if name in self.members else -1) for name in self.names)


class RandomFile:
    """A file read at offsets: nobody moves a position that threads or forked processes would share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY) if hasattr(os, "pread") else -1

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``, fewer only at the end of the file."""
        if self._descriptor < 0:  # no such call on this system
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def __reduce__(self) -> tuple[type[RandomFile], tuple[Path]]:
        return type(self), (self.path,)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


def _zip_members(path: Path, names: Sequence[str]) -> dict[str, ZipMember]:
    """Where the named photos lie: by the full name in the zip, otherwise by the last part where only one has it."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"{path} is not a whole zip ({error}) — copy it again") from error
    lasts = Counter(name.rpartition("/")[2] for name in infos)
    by_last = {last: info for name, info in infos.items() if lasts[last := name.rpartition("/")[2]] == 1}
    found = {name: infos.get(name) or by_last.get(name) for name in names}
    return {name: _member(info) for name, info in found.items() if info is not None}


def _member(info: zipfile.ZipInfo) -> ZipMember:
    encrypted = bool(info.flag_bits & 1)
    return ZipMember(info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type, encrypted)
