"""Short words that change when an image or a text does, so that it is embedded again.

A photo in a file of its own is known by the file's size and time, as other tools do: nothing is read. One in a shard by
its place and the shard's time, one in a zip by the checksum there. What lies in memory is known by its content.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from vacsr.data.photos import ArrayPhotos, Photos
from vacsr.data.sources import FilePhotos, JoinedPhotos, TarPhotos, ZipPhotos


def photo_mark(photos: Photos, row: int) -> str:
    """Of one photo; "" where nothing is known of its kind, or it is not there."""
    if isinstance(photos, JoinedPhotos):
        part, inner = photos.places[row]
        return photo_mark(photos.parts[part], inner)
    if isinstance(photos, FilePhotos):
        return _file_mark(photos.root / photos.paths[row])
    if isinstance(photos, TarPhotos):
        member = photos.members[row]
        return f"{member.offset}+{member.size} {_file_mark(photos.shards[member.shard])}"
    if isinstance(photos, ZipPhotos):
        found = photos.members.get(photos.names[row])
        return "" if found is None else f"{found.size} {found.crc:08x}"
    if isinstance(photos, ArrayPhotos):
        return content_mark(photos.pixels[row].tobytes())
    return ""


def features_mark(features: Tensor) -> str:
    """Of one image or text [D]."""
    return content_mark(features.cpu().contiguous().numpy().tobytes())


def content_mark(*parts: str | bytes) -> str:
    """A hash of some words or bytes."""
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _file_mark(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"
