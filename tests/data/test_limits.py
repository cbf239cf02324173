"""Prepared files end in a DataError that says what to do, before they cost memory or time.

Every read is bounded by a stated limit, so each test counts what is read or asserts the error; none measures time.
"""

import os
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from vacsr.data import load_pairs
from vacsr.data.archives import BoundedReader, FilePhoto, TarPhoto, zip_photos
from vacsr.data.decode import PHOTO_BYTES
from vacsr.data.noise import load_noise
from vacsr.data.shards import MAX_SHARDS, MEMBER_BYTES
from vacsr.errors import DataError
from vacsr.files import JSON_BYTES, TABLE_BYTES, read_npy


def sparse(path: Path, size: int = 20 << 30) -> Path:
    """A file of many GiB that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("name", "spec", "size"),
    [
        ("t.csv", "csv:{}/t.csv", TABLE_BYTES + 1),
        ("t.jsonl", "jsonl:{}/t.jsonl", TABLE_BYTES + 1),
        ("captions.json", "flickr8k:{}", JSON_BYTES + 1),
        ("Flickr8k.token.txt", "flickr8k:{}", TABLE_BYTES + 1),
        ("dataset_coco.json", "coco:{}", JSON_BYTES + 1),
        ("f.safetensors", "features:{}/f.safetensors", 1 << 42),
        ("t.parquet", "parquet:{}/t.parquet", 1 << 42),
        ("i.npy", "features:{}/i.npy,text={}/i.npy", 1 << 42),
    ],
)
@pytest.mark.parametrize("endless", [False, True])
def test_files_that_are_too_large_or_endless(tmp_path: Path, name: str, spec: str, size: int, endless: bool) -> None:
    if endless:
        os.symlink("/dev/zero", tmp_path / name)
    else:
        sparse(tmp_path / name, size)
    with pytest.raises(DataError, match=" — " if endless else "are the limit — "):
        load_pairs(spec.format(tmp_path, tmp_path))


@pytest.mark.parametrize("name", ["noise.txt", "noise.json"])
def test_lists_of_noise_that_are_too_large(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="are the limit — "):
        load_noise(sparse(tmp_path / name, JSON_BYTES + 1), caption_image=torch.arange(4))


def test_one_read_of_an_archive_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    with BoundedReader(tmp_path / "a", limit=60) as file:
        assert len(file.read(60)) == 60
        assert len(file.read()) == 40
        file.seek(0)
        for size in (61, -1, None):
            with pytest.raises(DataError, match="60 are the limit"):
                file.read(size)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_member_unpacks_to_no_more_than_a_photo(tmp_path: Path, method: int) -> None:
    """Its listing says 3 GiB: refused. It says less than it has: no more than that is unpacked."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("a.png", b"x" * 1000)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    listing = data.index(b"PK\1\2")
    for size, error in ((3 << 30, "bytes"), (10, "damaged")):
        data[listing + 24 : listing + 28] = struct.pack("<I", size)
        (tmp_path / "a.zip").write_bytes(data)
        with pytest.raises(DataError, match=error):
            zip_photos(tmp_path / "a.zip", ["a.png"]).items[0].read()


def test_a_listing_of_a_zip_is_bounded(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 1 << 30, 0, 0)
    with sparse(tmp_path / "a.zip", 1 << 30).open("ab") as file:
        file.write(end)
    with pytest.raises(DataError, match="limit"):
        zip_photos(tmp_path / "a.zip", ["a.png"])


def test_photos_of_many_gigabytes(tmp_path: Path) -> None:
    sparse(tmp_path / "a.png")
    for photo in (FilePhoto(tmp_path, "a.png"), TarPhoto(tmp_path / "a.png", "a", 0, 1 << 34)):
        with pytest.raises(DataError, match=f"{PHOTO_BYTES:,}"):
            photo.read()


def tar_of(path: Path, *headers: tarfile.TarInfo) -> str:
    """Headers only; what they describe is a hole of the file."""
    path.write_bytes(b"".join(header.tobuf(tarfile.PAX_FORMAT) for header in headers))
    sparse(path)
    return f"shards:{path}"


@pytest.mark.parametrize("name", ["a.txt", "a.json", "long"])
def test_texts_and_headers_of_a_shard_are_bounded(tmp_path: Path, name: str) -> None:
    header = tarfile.TarInfo(name)
    header.size = MEMBER_BYTES + 1
    header.type = tarfile.GNUTYPE_LONGNAME if name == "long" else tarfile.REGTYPE
    with pytest.raises(DataError, match="limit"):
        load_pairs(tar_of(tmp_path / "a.tar", header))


def test_a_sparse_member_of_a_shard(tmp_path: Path) -> None:
    header, facts = tarfile.TarInfo("a.txt"), {"major": "0", "minor": "1", "map": "0,0", "size": str(9 << 30)}
    header.pax_headers = {f"GNU.sparse.{name}": value for name, value in facts.items()}
    with pytest.raises(DataError, match="sparse"):
        load_pairs(tar_of(tmp_path / "a.tar", header))


@pytest.mark.parametrize("pattern", ["{0..1000000000}", "{0..9999}-{0..9999}", "{0..%s}" % ("9" * 5000)])
def test_ranges_of_shards_are_bounded(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(DataError, match=f"more than {MAX_SHARDS:,} shards"):
        load_pairs(f"shards:{tmp_path}/{pattern}.tar")


DIGITS, DEEP = "9" * 5000, "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "spec"),
    [
        ("t.jsonl", f'{{"image": {DIGITS}, "caption": "a"}}', "jsonl:{}/t.jsonl"),
        ("t.jsonl", f'{{"image": {DEEP}}}', "jsonl:{}/t.jsonl"),
        ("captions.json", DEEP, "flickr8k:{}"),
        ("dataset_coco.json", '{"images": [{"cocoid": 1e999, "filename": "a", "split": "val"}]}', "coco:{}"),
        ("Flickr8k.token.txt", f"a.jpg#{DIGITS}\tone", "flickr8k:{}"),
        ("c.csv", f"image,image_row\na,{DIGITS}", "features:{}/f.safetensors,captions={}/c.csv"),
    ],
)
def test_numbers_and_nesting_beyond_reason(tmp_path: Path, name: str, text: str, spec: str) -> None:
    from safetensors.torch import save_file

    save_file({"image": torch.ones(1, 2), "text": torch.ones(1, 2)}, tmp_path / "f.safetensors")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=" — "):
        load_pairs(spec.format(tmp_path, tmp_path))


def npy(header: bytes, *, length: int | None = None, version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header


SHAPE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }\n"


@pytest.mark.parametrize(
    "data",
    [
        npy(SHAPE % b"1000000000000"),
        npy(SHAPE % b"4611686018427387904, 4"),
        npy(b"{", length=(1 << 32) - 1, version=2),
        npy(SHAPE % (b"9" * 9000)),
        npy(b"(" * 9000),
        b"PK\3\4" + bytes(100),
        b"",
    ],
    ids=["terabytes", "overflow", "endless header", "long number", "nested", "a zip", "nothing"],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_arrays_that_ask_for_more_than_the_file_holds(tmp_path: Path, data: bytes) -> None:
    sparse(tmp_path / "a.npy", 1 << 33)
    with (tmp_path / "a.npy").open("r+b") as file:
        file.write(data)
    for read in (read_npy, lambda path: load_noise(path, caption_image=torch.arange(4))):
        with pytest.raises(DataError, match=" — "):
            read(tmp_path / "a.npy")
