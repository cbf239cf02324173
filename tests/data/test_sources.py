from __future__ import annotations

import multiprocessing
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vacsr.data.photos import Photos
from vacsr.data.sources import (
    FilePhotos,
    JoinedPhotos,
    StoredPhotos,
    TarMember,
    TarPhotos,
    ZipPhotos,
    find_photos,
)
from vacsr.errors import DataError

COLOURS = [(number, 255 - number, 7) for number in range(0, 250, 10)]
NAMES = [f"{row:02d}.png" for row in range(len(COLOURS))]
Make = Callable[[Path], StoredPhotos]


@pytest.fixture
def photos(request: pytest.FixtureRequest, tmp_path: Path, encode: Callable[..., bytes]) -> StoredPhotos:
    """25 photos of known colours, in each kind of place."""
    data = [encode(colour) for colour in COLOURS]
    return {"files": in_files, "zip": in_zip, "tar": in_tar, "joined": in_both}[request.param](tmp_path, data)


def in_files(folder: Path, data: list[bytes]) -> StoredPhotos:
    for name, content in zip(NAMES, data, strict=True):
        (folder / name).write_bytes(content)
    return FilePhotos(folder, tuple(NAMES))


def in_zip(folder: Path, data: list[bytes]) -> StoredPhotos:
    """Every other member deflated, some after a long name in front."""
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for row, (name, content) in enumerate(zip(NAMES, data, strict=True)):
            kind = zipfile.ZIP_DEFLATED if row % 2 else zipfile.ZIP_STORED
            archive.writestr(f"inner/{name}" if row % 3 else name, content, compress_type=kind)
    return ZipPhotos(folder / "photos.zip", NAMES)


def in_tar(folder: Path, data: list[bytes]) -> StoredPhotos:
    shards, members = (folder / "0.tar", folder / "1.tar"), []
    for name, content in zip(NAMES, data, strict=True):
        (folder / name).write_bytes(content)
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w") as tar:
            for name in NAMES[number::2]:
                tar.add(folder / name, name)
        with tarfile.open(shard) as tar:
            members += [TarMember(number, member.name, member.offset_data, member.size) for member in tar]
    return TarPhotos(shards, tuple(sorted(members, key=lambda member: member.name)))


def in_both(folder: Path, data: list[bytes]) -> StoredPhotos:
    parts = (in_files(folder, data), in_zip(folder, data))
    return JoinedPhotos(parts, tuple((row % 2, row) for row in range(len(data))))


EVERYWHERE = pytest.mark.parametrize("photos", ["files", "zip", "tar", "joined"], indirect=True)


def colours(photos: Photos, rows: list[int] | None = None) -> list[tuple[int, ...]]:
    return [photos.open(row).getpixel((0, 0)) for row in rows or range(len(photos))]  # type: ignore[misc]


@EVERYWHERE
def test_every_photo_under_its_name(photos: StoredPhotos) -> None:
    assert len(photos) == len(COLOURS)
    assert colours(photos) == COLOURS
    assert all(photos.has(row) and photos.name(row).endswith(NAMES[row]) for row in range(len(photos)))


@EVERYWHERE
def test_some_of_them(photos: StoredPhotos) -> None:
    taken = photos.take([3, 1, 3]).take([0, 1])
    assert [name[-6:] for name in map(taken.name, range(2))] == ["03.png", "01.png"]
    assert colours(taken, [0, 1]) == [COLOURS[3], COLOURS[1]]
    assert len(photos) == len(COLOURS)


@EVERYWHERE
def test_many_threads_at_once(photos: StoredPhotos) -> None:
    rows = np.random.default_rng(0).integers(0, len(COLOURS), 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: photos.open(row).getpixel((0, 0)), rows))
    assert found == [COLOURS[row] for row in rows]


@EVERYWHERE
def test_pickled(photos: StoredPhotos) -> None:
    again = pickle.loads(pickle.dumps(photos))
    assert colours(again) == COLOURS
    assert again.digest() == photos.digest()


def read_all(photos: StoredPhotos) -> bool:
    return all(colours(photos) == COLOURS for _ in range(4))


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_read_at_the_same_time(photos: StoredPhotos) -> None:
    assert colours(photos) == COLOURS
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=lambda: exit(0 if read_all(photos) else 1)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert read_all(photos)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


@EVERYWHERE
def test_the_digest_tells_order_and_choice(photos: StoredPhotos) -> None:
    marks = {photos.take(rows).digest() for rows in ([0, 1], [1, 0], [0], [0, 1, 2])}
    assert len(marks) == 4
    assert photos.take([0, 1]).digest() == photos.take([0, 1, 2]).take([0, 1]).digest()


def test_the_digest_tells_another_content(tmp_path: Path, draw: Callable[..., Path]) -> None:
    draw(tmp_path / "a.png")
    photos = FilePhotos(tmp_path, ("a.png",))
    before = photos.digest()
    draw(tmp_path / "a.png", size=(40, 30))
    assert photos.digest() != before
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("a.png", b"one")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.png", b"two")
    assert len({ZipPhotos(tmp_path / name, ["a.png"]).digest() for name in ("one.zip", "two.zip")}) == 2


def test_the_digest_does_not_tell_the_time(tmp_path: Path) -> None:
    for name, year in (("one.zip", 1990), ("two.zip", 2020)):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(zipfile.ZipInfo("a.png", (year, 1, 1, 0, 0, 0)), b"one")
    assert len({ZipPhotos(tmp_path / name, ["a.png"]).digest() for name in ("one.zip", "two.zip")}) == 1


def test_photos_that_are_not_there(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    data = [encode(colour) for colour in COLOURS]
    in_zip(tmp_path, data)
    for photos in (FilePhotos(tmp_path, ("lost.png",)), ZipPhotos(tmp_path / "photos.zip", ["lost.png"])):
        assert not photos.has(0)
        assert photos.digest()
        with pytest.raises(DataError, match=r"lost\.png") as caught:
            photos.open(0)
        assert "data.on_error=skip" in str(caught.value)


def test_a_name_that_two_folders_of_a_zip_have_is_not_guessed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("one/a.png", b"one")
        archive.writestr("two/a.png", b"two")
    photos = ZipPhotos(tmp_path / "two.zip", ["a.png", "two/a.png"])
    assert [photos.has(0), photos.has(1)] == [False, True]
    assert photos.encoded(1) == b"two"


def test_a_damaged_zip(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    path = tmp_path / "photos.zip"
    in_zip(tmp_path, [encode(colour) for colour in COLOURS])
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        offsets = [info.header_offset + 60 for info in archive.infolist()]
    broken = bytearray(whole)
    for offset in offsets[:2]:
        broken[offset] ^= 255
    path.write_bytes(bytes(broken))
    photos = ZipPhotos(path, NAMES)
    for row in (0, 1):  # stored, deflated
        with pytest.raises(DataError, match=NAMES[row]):
            photos.open(row)
    assert colours(photos, [2]) == [COLOURS[2]]
    path.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="not a whole zip"):
        ZipPhotos(path, NAMES)


def test_a_zip_packed_in_a_rare_way(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", b"x" * 100)
    with pytest.raises(DataError, match="zip -0"):
        ZipPhotos(tmp_path / "a.zip", ["a.png"]).open(0)


def test_a_shard_that_was_cut(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    photos = in_tar(tmp_path, [encode(colour) for colour in COLOURS])
    (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:600])
    with pytest.raises(DataError, match=r"0\.tar/00\.png is cut short"):
        photos.open(0)
    assert colours(photos, [1]) == [COLOURS[1]]
    (tmp_path / "0.tar").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        photos.open(0)


def test_the_first_place_that_exists(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    in_zip(tmp_path, [encode(colour) for colour in COLOURS])
    places = [tmp_path / "absent", tmp_path / "photos.zip", tmp_path]
    assert isinstance(find_photos(places, NAMES), ZipPhotos)
    assert isinstance(find_photos(places[::-1], NAMES), FilePhotos)
    assert find_photos(places[:1], NAMES) is None


def test_the_side_reaches_the_decoder(tmp_path: Path, draw: Callable[..., Path]) -> None:
    draw(tmp_path / "a.jpg", size=(640, 480))
    photos = FilePhotos(tmp_path, ("a.jpg",))
    assert photos.open(0, side=200).size == (320, 240)
    assert photos.open(0).size == (640, 480)
