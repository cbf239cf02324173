"""Photos in files, zips and tar shards: the same in threads and processes, damaged ones named."""

import multiprocessing
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vacsr.data.archives import StoredPhotos, TarPhoto, file_photos, zip_photos
from vacsr.errors import DataError

COLOURS = [(number, 255 - number, 7) for number in range(0, 250, 10)]
NAMES = [f"{row:02d}.png" for row in range(len(COLOURS))]


@pytest.fixture
def data(encode: Callable[..., bytes]) -> list[bytes]:
    return [encode(colour) for colour in COLOURS]


@pytest.fixture
def photos(request: pytest.FixtureRequest, tmp_path: Path, data: list[bytes]) -> StoredPhotos:
    """25 photos of known colours, in each kind of storage."""
    return {"files": in_files, "zip": in_zip, "tar": in_tar, "mixed": in_all}[request.param](tmp_path, data)


def in_files(folder: Path, data: list[bytes]) -> StoredPhotos:
    for name, content in zip(NAMES, data, strict=True):
        (folder / name).write_bytes(content)
    return file_photos(folder, NAMES)


def in_zip(folder: Path, data: list[bytes]) -> StoredPhotos:
    """Every other member deflated, some in a folder."""
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for row, (name, content) in enumerate(zip(NAMES, data, strict=True)):
            kind = zipfile.ZIP_DEFLATED if row % 2 else zipfile.ZIP_STORED
            archive.writestr(f"inner/{name}" if row % 3 else name, content, compress_type=kind)
    return zip_photos(folder / "photos.zip", NAMES)


def in_tar(folder: Path, data: list[bytes]) -> StoredPhotos:
    in_files(folder, data)
    members = []
    for number, shard in enumerate((folder / "0.tar", folder / "1.tar")):
        with tarfile.open(shard, "w") as tar:
            for name in NAMES[number::2]:
                tar.add(folder / name, name)
        with tarfile.open(shard) as tar:
            members += [TarPhoto(shard, member.name, member.offset_data, member.size) for member in tar]
    return StoredPhotos(tuple(sorted(members, key=lambda member: member.id)))


def in_all(folder: Path, data: list[bytes]) -> StoredPhotos:
    parts = [make(folder, data) for make in (in_files, in_zip, in_tar)]
    return StoredPhotos(tuple(parts[row % 3].items[row] for row in range(len(data))))


EVERYWHERE = pytest.mark.parametrize("photos", ["files", "zip", "tar", "mixed"], indirect=True)


def colours(photos: StoredPhotos) -> list[tuple[int, ...]]:
    return [photos.open(row).getpixel((0, 0)) for row in range(len(photos))]  # type: ignore[misc]


@EVERYWHERE
def test_every_photo_under_its_name_and_some_of_them(photos: StoredPhotos) -> None:
    assert colours(photos) == COLOURS
    assert all(item.exists() and photos.name(row).endswith(NAMES[row]) for row, item in enumerate(photos.items))
    taken = photos.take([3, 1, 3]).take([0, 1])
    assert [name[-6:] for name in map(taken.name, range(2))] == ["03.png", "01.png"]
    assert colours(taken) == [COLOURS[3], COLOURS[1]]
    again = pickle.loads(pickle.dumps(photos))
    assert (colours(again), again.digest()) == (COLOURS, photos.digest())
    assert len({photos.take(rows).digest() for rows in ([0, 1], [1, 0], [0], [0, 1, 2])}) == 4


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_many_threads_and_processes_at_once(photos: StoredPhotos) -> None:
    rows = np.random.default_rng(0).integers(0, len(COLOURS), 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda row: photos.open(row).getpixel((0, 0)), rows)) == [COLOURS[row] for row in rows]

    def read_all() -> bool:
        return all(colours(photos) == COLOURS for _ in range(4))

    workers = [multiprocessing.get_context("fork").Process(target=lambda: exit(not read_all())) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert read_all()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


def test_the_digest_depends_on_content_and_not_on_time(tmp_path: Path, draw: Callable[..., Path]) -> None:
    draw(tmp_path / "a.jpg", size=(640, 480))
    assert file_photos(tmp_path, ["a.jpg"]).open(0, side=200).size == (320, 240)  # the side reaches the decoder
    photos, digests = file_photos(tmp_path, ["a.png"]), set()
    for size in ((8, 6), (40, 30)):
        draw(tmp_path / "a.png", size=size)
        digests.add(photos.digest())
    for name, year, content in (("1.zip", 1990, b"one"), ("2.zip", 2020, b"one"), ("3.zip", 1990, b"two")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(zipfile.ZipInfo("a.png", (year, 1, 1, 0, 0, 0)), content)
        digests.add(zip_photos(tmp_path / name, ["a.png"]).digest())
    assert len(digests) == 4


def test_missing_photos_are_named(tmp_path: Path, data: list[bytes]) -> None:
    in_zip(tmp_path, data)
    for photos in (file_photos(tmp_path, ["lost.png"]), zip_photos(tmp_path / "photos.zip", ["lost.png"])):
        assert not photos.items[0].exists()
        with pytest.raises(DataError, match=r"lost\.png.* — check .*, or skip .*--skip, .*on_error=skip"):
            photos.open(0)
    (tmp_path / "folder.png").mkdir()
    assert not file_photos(tmp_path, ["folder.png"]).items[0].exists()
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("one/a.png", b"one")
        archive.writestr("two/a.png", b"two")
    # a name that two folders of a zip have is not guessed
    either, second = zip_photos(tmp_path / "two.zip", ["a.png", "two/a.png"]).items
    assert (either.exists(), second.read()) == (False, b"two")


def test_a_damaged_zip(tmp_path: Path, data: list[bytes]) -> None:
    path = tmp_path / "photos.zip"
    in_zip(tmp_path, data)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        offsets = [info.header_offset + 60 for info in archive.infolist()]
    broken = bytearray(whole)
    for offset in offsets[:2]:
        broken[offset] ^= 255
    path.write_bytes(bytes(broken))
    photos = zip_photos(path, NAMES)
    for row in (0, 1):  # stored, deflated
        with pytest.raises(DataError, match=NAMES[row]):
            photos.open(row)
    assert colours(photos.take([2])) == [COLOURS[2]]
    path.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="not a complete zip"):
        zip_photos(path, NAMES)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", b"x" * 100)
    with pytest.raises(DataError, match="zip -0"):
        zip_photos(path, ["a.png"]).open(0)


def test_a_shard_that_was_cut(tmp_path: Path, data: list[bytes]) -> None:
    photos = in_tar(tmp_path, data)
    (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:600])
    with pytest.raises(DataError, match=r"0\.tar/00\.png is truncated"):
        photos.open(0)
    assert colours(photos.take([1])) == [COLOURS[1]]
    (tmp_path / "0.tar").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        photos.open(0)
