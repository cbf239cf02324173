import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vacsr.data import PhotoSet, write_shards
from vacsr.data.archives import file_photos
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import DataError, UsageError

Load, Refused = Callable[..., PhotoSet], Callable[..., str]
"""The fixtures `photos_of` and `refused` of conftest.py."""
WORDS = ("كلب يجري", "一只狗\nفي 沙滩", "👩‍👩‍👧 e\u0301", "a\u2028b\x85c", "x" * 10_000, "half a pair: \ud83d")
Members = list[tuple[str, bytes]]


def pack(path: Path, members: Members) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return f"shards:{path}"


@pytest.fixture
def drawn() -> PhotoSet:
    """Five photos in memory, with two captions, one, none, two and one."""
    pixels = np.random.default_rng(0).integers(0, 255, (5, 6, 8, 3), dtype=np.uint8)
    return PhotoSet(
        photos=ArrayPhotos(pixels, tuple("abcde")),
        image_ids=("a.b/c", "b", "c", "d", "é"),
        captions=WORDS,
        caption_ids=tuple(f"c{number}" for number in range(6)),
        caption_image=torch.tensor([0, 1, 0, 3, 4, 3]),
        split="dev",
    )


@pytest.mark.parametrize("per_shard", [1, 3, 1000])
def test_what_is_written_is_read(
    tmp_path: Path, drawn: PhotoSet, photos_of: Load, refused: Refused, per_shard: int
) -> None:
    paths = write_shards(drawn.subset([0, 1, 3, 4]), tmp_path / "out", per_shard=per_shard)
    assert [path.name for path in paths] == [f"{number:05d}.tar" for number in range(-(-4 // per_shard))]
    spec = f"shards:{tmp_path}/out/*.tar"
    pairs = photos_of(spec)
    assert pairs.image_ids == ("a.b/c", "b", "d", "é")
    texts = dict(zip(pairs.caption_ids, pairs.captions, strict=True))
    assert texts == dict(zip(drawn.caption_ids, drawn.captions, strict=True))
    owner = {name: pairs.image_ids[row] for name, row in zip(pairs.caption_ids, pairs.caption_image, strict=True)}
    assert owner == {"c0": "a.b/c", "c1": "b", "c2": "a.b/c", "c3": "d", "c4": "é", "c5": "d"}
    assert all(np.array_equal(pairs.photos.open(new), drawn.photos.open(old)) for new, old in enumerate([0, 1, 3, 4]))
    assert photos_of(spec, split="dev").digest() == pairs.digest()
    refused(spec, "dev (4 images)", split="train")


def test_the_same_pairs_give_the_same_bytes(tmp_path: Path, drawn: PhotoSet, photos_of: Load, refused: Refused) -> None:
    one, two = (write_shards(drawn, tmp_path / name, per_shard=2) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    with tarfile.open(one[0]) as tar:
        headers = {(member.mtime, member.uid, member.uname, member.mode) for member in tar}
        assert headers == {(0, 0, "", 0o644)}
        assert tar.getnames()[:3] == ["000000000.png", "000000000.json", "000000000.txt"]
    refused(f"shards:{tmp_path}/one/*.tar", "1 photo or caption", "000000002.png: no caption")
    with pytest.warns(UserWarning, match="1 left out"):
        assert len(photos_of(f"shards:{tmp_path}/one/*.tar", on_error="skip").image_ids) == 4


@pytest.fixture
def filed(tmp_path: Path, draw: Callable[..., Path], encode: Callable[..., bytes]) -> PhotoSet:
    """A JPEG, a PNG, a WebP and a GIF in files."""
    for name in ("a.jpg", "b.png", "c.webp"):
        draw(tmp_path / name)
    (tmp_path / "d.gif").write_bytes(encode("red", format="GIF"))
    names = ("a.jpg", "b.png", "c.webp", "d.gif")
    ids = tuple(f"{name}#0" for name in names)
    return PhotoSet(file_photos(tmp_path, names), names, ids, ids, torch.arange(4))


@pytest.mark.parametrize(
    ("kind", "kinds", "passed"),
    [
        ("same", ["jpg", "png", "webp", "png"], [True, True, True, False]),
        ("jpg", ["jpg"] * 4, [True, False, False, False]),
        ("png", ["png"] * 4, [False, True, False, False]),
        ("webp", ["webp"] * 4, [False, False, True, False]),
    ],
)
def test_encoded_photos_are_passed_on(
    tmp_path: Path, filed: PhotoSet, photos_of: Load, kind: Any, kinds: list[str], passed: list[bool]
) -> None:
    (path,) = write_shards(filed, tmp_path / "out", format=kind)
    with tarfile.open(path) as tar:
        names = [name for name in tar.getnames() if not name.endswith((".json", ".txt"))]
        stored = [tar.extractfile(name).read() for name in names]  # type: ignore[union-attr]
    assert [name.partition(".")[2] for name in names] == kinds
    original = [(tmp_path / name).read_bytes() for name in filed.image_ids]
    assert [new == old for new, old in zip(stored, original, strict=True)] == passed
    pairs = photos_of(f"shards:{path}")
    for row in range(4):
        assert np.abs(np.asarray(pairs.photos.open(row), dtype=int)[2, 2] - (255, 0, 0)).max() < 8


def test_patterns(tmp_path: Path, drawn: PhotoSet, photos_of: Load, refused: Refused) -> None:
    for number, path in enumerate(write_shards(drawn.subset([0, 1, 3]), tmp_path, per_shard=1)):
        path.rename(tmp_path / f"dev-{98 + number:03d}.tar")
    assert photos_of(f"shards:{tmp_path}/dev-{{098..100}}.tar").image_ids == ("a.b/c", "b", "d")
    assert photos_of(f"shards:{tmp_path}/dev-{{099..099}}.tar").image_ids == ("b",)
    refused(f"shards:{tmp_path}/dev-{{098..101}}.tar", "1 of 4 shards are missing", "dev-101.tar")
    refused(f"shards:{tmp_path}/dev-{{101..098}}.tar", "backwards", error=UsageError)
    refused(f"shards:{tmp_path}/test-*.tar", "no shard")


def test_shards_that_would_not_be_written_well(tmp_path: Path, drawn: PhotoSet) -> None:
    write_shards(drawn, tmp_path, per_shard=2)
    assert len(write_shards(drawn, tmp_path, per_shard=2)) == 3
    with pytest.raises(UsageError, match=r"00002\.tar is there already"):
        write_shards(drawn, tmp_path, per_shard=3)
    for options in ({"per_shard": 0}, {"format": "gif"}):
        with pytest.raises(UsageError, match="give at least 1"):
            write_shards(drawn, tmp_path / "other", **options)  # type: ignore[arg-type]


def test_a_photo_that_fails_leaves_no_shard(tmp_path: Path, filed: PhotoSet) -> None:
    (tmp_path / "d.gif").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"d\.gif"):
        write_shards(filed, tmp_path / "out", per_shard=1)
    assert list((tmp_path / "out").iterdir()) == []


def test_where_captions_and_ids_come_from(
    tmp_path: Path, photos_of: Load, refused: Refused, encode: Callable[..., bytes]
) -> None:
    photo = encode("red", format="JPEG")
    members: Members = [
        ("x/a.jpg", photo), ("x/a.txt", "one\r\n\ntwo\n".encode("utf-8-sig")),
        ("b.JPEG", photo), ("b.json", b'{"captions": ["three", "four"], "id": 7}'), ("b.txt", b"not this"),
        ("c.seg.png", photo), ("c.png", encode()), ("c.json", b'{"caption": "five", "url": "u"}'),
        ("d.webp", encode(format="WEBP")), ("d.json", b'{"caption": "not this"}'), ("d.txt", b"six"),
        ("README", b"no key"), ("e.txt", b"no photo"),
    ]  # fmt: skip
    spec = pack(tmp_path / "a.tar", members)
    refused(spec, "sample 'e' has no photo")
    with pytest.warns(UserWarning, match="1 left out"):
        pairs = photos_of(spec, on_error="skip")
    assert pairs.image_ids == ("x/a", "7", "c", "d")
    assert pairs.captions == ("one", "two", "three", "four", "five", "six")
    assert pairs.caption_ids == ("x/a#0", "x/a#1", "7#0", "7#1", "c#0", "d#0")
    assert all(pairs.photos.open(row).size == (8, 6) for row in range(4))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], ("holds no photo",)),
        ([("a.png", b""), ("a.json", b"{")], ("a.json", "not JSON")),
        ([("a.png", b""), ("a.json", b"[]")], ("a.json", "not an object")),
        ([("a.png", b""), ("a.json", b'{"id": "x", "id": "y"}')], ("a.tar/a.json: duplicate key 'id'",)),
        ([("a.png", b""), ("a.json", b'{"captions": "x"}')], ("'a'", "not a list of texts")),
        ([("a.png", b""), ("a.json", b'{"captions": ["x"], "caption_ids": []}')], ("'a'", "does not fit")),
        ([("a.png", b""), ("a.txt", "ß".encode("latin-1"))], ("/a", "UTF-8")),
        ([("a.png", b""), ("a.txt", b"x"), ("b.png", b""), ("b.txt", b"x"), ("a.png", b"")], ("image id 'a'",)),
    ],
)
def test_shards_that_are_refused(tmp_path: Path, refused: Refused, members: Members, words: tuple[str, ...]) -> None:
    refused(pack(tmp_path / "a.tar", members), *words)


def test_shards_that_are_no_whole_tar(tmp_path: Path, drawn: PhotoSet, refused: Refused) -> None:
    (path,) = write_shards(drawn.subset([0]), tmp_path)
    whole = path.read_bytes()
    for data, words in ((gzip.compress(whole), "uncompressed"), (whole[:700], "copy it again")):
        path.write_bytes(data)
        refused(f"shards:{path}", "00000.tar", words)


def test_webdataset_reads_what_we_write(tmp_path: Path, drawn: PhotoSet) -> None:
    webdataset = pytest.importorskip("webdataset")
    paths = write_shards(drawn, tmp_path, per_shard=2)
    samples = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).decode("rgb8"))
    assert [sample["__key__"] for sample in samples] == [f"{row:09d}" for row in range(5)]
    assert [sample["json"]["id"] for sample in samples] == list(drawn.image_ids)
    assert samples[0]["json"]["captions"] == [WORDS[0], WORDS[2]]
    assert samples[1]["txt"] == WORDS[1].replace("\n", " ")
    assert all(np.array_equal(sample["png"], drawn.photos.open(row)) for row, sample in enumerate(samples))


def test_we_read_what_webdataset_writes(tmp_path: Path, drawn: PhotoSet, photos_of: Load) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for row, text in enumerate(WORDS[:2]):
            pixels = np.asarray(drawn.photos.open(row))
            writer.write({"__key__": f"sample{row}", "png": pixels, "json": {"captions": [text, "more"]}})
        writer.write({"__key__": "last", "png": np.asarray(drawn.photos.open(3)), "txt": "one\ntwo"})
    pairs = photos_of(f"shards:{tmp_path}/a.tar")
    assert pairs.image_ids == ("sample0", "sample1", "last")
    assert pairs.captions == (WORDS[0], "more", WORDS[1], "more", "one", "two")
    assert all(np.array_equal(pairs.photos.open(new), drawn.photos.open(old)) for new, old in enumerate([0, 1, 3]))
