"""Captions files, tables of photos, folders with and without texts: what is read, what is refused, what is left out."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vacsr.data import PhotoSet, images_spec, load_images
from vacsr.data.tables import read_captions
from vacsr.errors import NoSuchSplit, UsageError

Draw, Load, Refused = Callable[..., Path], Callable[..., PhotoSet], Callable[..., str]
"""The fixtures `draw`, `photos_of` and `refused` of conftest.py."""
Rows = list[dict[str, Any]]
WORDS = ["كلب يجري", "一只狗在沙滩上", "👩‍👩‍👧 a family 🏖️", "é e\u0301 Z̸a̶l̷", "a\u2028b\x85c\x0bd", "x y " * 2_500]
"""Right to left, ideographs, joined emoji, combining marks, odd line ends, 10,000 characters."""
TABLES = pytest.mark.parametrize("suffix", ["csv", "jsonl"])


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def table(path: Path, rows: Rows) -> str:
    """The rows as the suffix says; the SPEC of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return f"{path.suffix[1:]}:{path}"


# Captions files


def test_captions_files_of_every_kind(tmp_path: Path) -> None:
    """Images in the order of the list, of first appearance, or of a column."""
    entries: list[dict[str, Any]] = [
        {"image": "b", "split": "dev", "captions": ["one, with a comma", "two"]},
        {"image": "a", "split": "train", "captions": ["three"]},
    ]
    rows = '\ufeffimage,caption,split\nb,"one, with a comma",dev\na,three,train\nb,two,dev\n'
    listed = read_captions(written(tmp_path, "c.json", json.dumps(entries)))
    tabled = read_captions(written(tmp_path, "c.csv", rows))
    for names, order in ((listed, [0, 1, 2]), (tabled, [0, 2, 1])):
        assert (names.image_ids, names.splits) == (("b", "a"), ("dev", "train"))
        assert [names.caption_ids[row] for row in order] == ["b#0", "b#1", "a#0"]
        assert names.caption_image[order].tolist() == [0, 0, 1]
        assert [(names.captions or ())[row] for row in order] == ["one, with a comma", "two", "three"]
    for entry, ids in zip(entries, ([12, "x"], [3]), strict=True):
        entry["caption_ids"] = ids
    named = read_captions(written(tmp_path, "c.json", json.dumps(entries)))
    assert (named.image_ids, named.caption_ids) == (("b", "a"), ("12", "x", "3"))
    numbered = [{"image": 7, "caption_id": "x", "image_row": 1}, {"image": "a", "caption_id": "y", "image_row": 0}]
    names = read_captions(written(tmp_path, "c.jsonl", "\n\n".join(map(json.dumps, numbered))))
    assert (names.image_ids, names.caption_ids, names.caption_image.tolist()) == (("a", "7"), ("x", "y"), [1, 0])
    assert (names.captions, names.splits) == (None, None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", '{"image": "a"}', ("not a list of images",)),
        ("c.json", "[]", ("names no image",)),
        ("c.json", '[{"image": "a", "captions": ["x"]}, {"captions": ["x"]}]', ("entry 1", "image (None)")),
        ("c.json", '[{"image": "a", "captions": [1]}]', ("image 'a'", "no list of texts")),
        ("c.json", '[{"image": "a", "captions": ["x"]}, {"image": "a", "captions": ["x"]}]', ("image id 'a'",)),
        ("c.json", '[{"image": "a", "captions": ["x"], "caption_ids": [1, 2]}]', ("image 'a'", "caption_ids [1, 2]")),
        ("c.json", '[{"image": "a", "captions": ["x"], "caption_ids": [[]]}]', ("image 'a'", "one id per caption")),
        ("c.csv", "", ("no row at all", "columns image")),
        ("c.csv", "name,caption\na,x\n", ("columns image", "name, caption")),
        ("c.csv", "image,caption\na,x,y\n", ("line 2", "image, caption")),
        ("c.csv", 'image,caption\na,"x"y\n', ("cannot be read",)),
        ("c.csv", "image,caption_id\na,x\nb,x\n", ("caption id 'x'", "2 times")),
        ("c.csv", "image,split\na,dev\na,test\n", ("line 3", "image 'a'", "'dev'", "'test'")),
        ("c.csv", "image,split\na,dev\nb,\n", ("line 3", "split ('')")),
        ("c.csv", "image,image_row\na,-1\n", ("'-1'", "0 to 0")),
        ("c.csv", "image,image_row\na,0\na,1\n", ("line 3", "image 'a'", "image_row '1'")),
        ("c.csv", "image,image_row\na,0\nb,0\n", ("image 'a'", "'0'", "each once")),
        ("c.csv", "image,image_row\na,0\nb,2\n", ("image 'b'", "'2'", "2 images", "0 to 1")),
        ("c.jsonl", '["a"]', ("line 1", "not an object")),
        ("c.jsonl", '{"image": "a"}\n{"image": "b", "image": "c"}', ("line 2: duplicate key 'image'",)),
        ("c.txt", "a", ("c.txt", ".jsonl")),
    ],
)
def test_captions_files_that_are_refused(
    tmp_path: Path, refused: Refused, name: str, text: str, words: tuple[str, ...]
) -> None:
    refused(written(tmp_path, name, text), *words, load=read_captions)


def test_files_that_cannot_be_read(tmp_path: Path, refused: Refused) -> None:
    refused(tmp_path / "absent.json", "no such file", "absent.json", load=read_captions)
    (tmp_path / "latin.csv").write_bytes("image\nß".encode("latin-1"))
    refused(tmp_path / "latin.csv", "latin.csv", "UTF-8", load=read_captions)


# Tables of photos


@pytest.fixture
def root(tmp_path: Path, draw: Draw) -> Path:
    """Photos of three colours, one of them deeper down."""
    draw(tmp_path / "a.png", "red")
    draw(tmp_path / "b.png", "lime")
    draw(tmp_path / "deep" / "c.jpg", "blue")
    return tmp_path


PLAIN: Rows = [
    {"image": "a.png", "caption": "one"},
    {"image": "deep/c.jpg", "caption": "two, with a comma"},
    {"image": "a.png", "caption": "three"},
]


@TABLES
def test_a_table_beside_its_photos_or_elsewhere(root: Path, photos_of: Load, refused: Refused, suffix: str) -> None:
    pairs = photos_of(table(root / f"t.{suffix}", PLAIN))
    assert pairs.image_ids == ("a.png", "deep/c.jpg")
    assert pairs.captions == ("one", "two, with a comma", "three")
    assert pairs.caption_ids == ("a.png#0", "deep/c.jpg#0", "a.png#1")
    assert pairs.caption_image.tolist() == [0, 1, 0]
    assert (pairs.split, pairs.skipped) == ("all", ())
    assert pairs.photos.open(0).getpixel((0, 0)) == (255, 0, 0)
    assert pairs.photos.open(1).getpixel((0, 0))[2] > 240  # type: ignore[index]
    spec = table(root / "tables" / f"t.{suffix}", PLAIN)
    refused(spec, "2 photos or captions", "a.png", "no such file")
    assert photos_of(f"{spec},root={root}").digest() == pairs.digest()


@TABLES
def test_ids_and_splits_of_its_own(root: Path, photos_of: Load, refused: Refused, suffix: str) -> None:
    rows: Rows = [
        {"image": "a.png", "image_id": "7", "caption": "one", "caption_id": "x", "split": "train"},
        {"image": "a.png", "image_id": "8", "caption": "two", "caption_id": "y", "split": "dev"},
        {"image": "b.png", "image_id": "9", "caption": "three", "caption_id": "z", "split": "train"},
    ]
    spec = table(root / f"t.{suffix}", rows)
    train = photos_of(spec, split="train")
    assert (train.image_ids, train.caption_ids, train.split) == (("7", "9"), ("x", "z"), "train")
    assert Path(train.photos.name(1)).name == "b.png"
    assert photos_of(f"{spec},split=dev").captions == ("two",)
    assert photos_of(spec).image_ids == ("7", "8", "9")
    refused(spec, "'test'", "train (2 images)", split="test")
    rows = [{"image": name, "image_id": "7", "caption": "one"} for name in ("a.png", "b.png")]
    refused(table(root / f"t.{suffix}", rows), "'7'", "'b.png'", "'a.png'")


@TABLES
def test_tables_that_are_refused(root: Path, refused: Refused, suffix: str) -> None:
    for rows in ([{"image": "a.png", "text": "x"}], [{"file": "a.png", "caption": "x"}]):
        refused(table(root / f"t.{suffix}", rows), *rows[0], "image and caption", f"t.{suffix}")
    refused(f"{suffix}:{written(root, f't.{suffix}', '')}", "no row at all")
    refused(table(root / f"t.{suffix}", PLAIN), "'ignore'", "skip", error=UsageError, on_error="ignore")


BAD: Rows = [
    {"image": "a.png", "caption": "one"},
    {"image": "a.png", "caption": None},
    {"image": "b.png", "caption": " \t"},
    {"image": "lost.png", "caption": "two"},
    {"image": "deep/c.jpg", "caption": "three"},
]


@TABLES
def test_problems_stop_the_reading_or_are_left_out(root: Path, photos_of: Load, refused: Refused, suffix: str) -> None:
    spec = table(root / f"t.{suffix}", BAD)
    lines = [
        "lost.png: no such file",
        "a.png#1: the caption has no text",
        "b.png#0: the caption has no text",
        "b.png: no caption",
    ]
    refused(spec, "4 photos or captions", *lines, "data.on_error=skip")
    with pytest.warns(UserWarning, match=r"4 left out: .*lost\.png: no such file; a\.png#1: .* …") as warned:
        pairs = photos_of(spec, on_error="skip")
    assert len(warned) == 1
    assert (pairs.image_ids, pairs.caption_ids) == (("a.png", "deep/c.jpg"), ("a.png#0", "deep/c.jpg#0"))
    assert pairs.caption_image.tolist() == [0, 1]
    assert [line.rpartition("/")[2] for line in pairs.skipped] == lines
    assert [Path(pairs.photos.name(row)).name for row in range(2)] == ["a.png", "c.jpg"]


def test_problems_of_another_split_do_not_matter(root: Path, photos_of: Load, refused: Refused) -> None:
    rows: Rows = [
        {"image": "a.png", "caption": "one", "split": "train"},
        {"image": "lost.png", "caption": "two", "split": "dev"},
    ]
    spec = table(root / "t.csv", rows)
    assert photos_of(spec, split="train").image_ids == ("a.png",)
    refused(spec, "lost.png", split="dev")
    refused(spec, "none of 1 photos", "lost.png", split="dev", on_error="skip")


# Folders


def beside(photo: Path, text: str) -> None:
    photo.with_suffix(".txt").write_bytes(text.encode())


def test_a_folder(root: Path, photos_of: Load, refused: Refused) -> None:
    beside(root / "a.png", "one\n\n  \ntwo \r\n" + "\n".join(WORDS))
    beside(root / "b.png", "three")
    beside(root / "deep" / "c.jpg", "\ufefffour\n")
    written(root, ".hidden.png", "skipped")
    written(root, "table.csv", "skipped")
    pairs = photos_of(f"folder:{root}")
    assert pairs.image_ids == ("a.png", "b.png", "deep/c.jpg")
    assert pairs.captions == ("one", "two ", *WORDS, "three", "four")
    assert pairs.caption_ids[:2] == ("a.png#0", "a.png#1")
    assert pairs.photos.open(1).getpixel((0, 0)) == (0, 255, 0)
    refused(f"folder:{root}", "has no splits", split="train")


@pytest.mark.parametrize("scheme", ["folder", "photos"])
def test_folders_without_photos(tmp_path: Path, refused: Refused, scheme: str) -> None:
    refused(f"{scheme}:{tmp_path / 'absent'}", "is not a folder", ".jpg .jpeg", load=load_images)
    refused(f"{scheme}:{tmp_path}", "holds nothing", ".jpg", load=load_images)


def test_a_folder_by_splits(tmp_path: Path, draw: Draw, photos_of: Load, refused: Refused) -> None:
    for name in ("train/x/a.png", "train/b.png", "val/a.png"):
        beside(draw(tmp_path / name), name)
    assert photos_of(f"folder:{tmp_path}", split="train").image_ids == ("train/b.png", "train/x/a.png")
    assert photos_of(f"folder:{tmp_path},split=val").captions == ("val/a.png",)
    assert photos_of(f"photos:{tmp_path},split=val").image_ids == ("val/a.png",)
    refused(f"folder:{tmp_path}", "'dev'", "val (1 images)", split="dev")
    draw(tmp_path / "c.png")
    refused(f"photos:{tmp_path}", "has no splits", error=NoSuchSplit, load=load_images, split="val")


def test_a_folder_with_gaps(root: Path, draw: Draw, photos_of: Load, refused: Refused) -> None:
    beside(root / "a.png", "one")
    beside(root / "b.png", " \n")
    beside(root / "lost.png", "two")
    draw(root / "a.webp")  # nothing says which of the two a.txt means
    advice = f"to index and search photos without captions, write photos:{root}"
    message = refused(f"folder:{root}", "4 photos or captions", "lost.txt: no photo", "b.png: no caption", "c.jpg: no")
    assert "a.webp: its text a.txt belongs to a.png too" in message
    assert message.endswith(f"; {advice}")
    with pytest.warns(UserWarning, match="4 left out"):
        pairs = photos_of(f"folder:{root}", on_error="skip")
    assert (pairs.image_ids, len(pairs.skipped)) == (("a.png",), 4)


@pytest.fixture
def album(tmp_path: Path, draw: Draw) -> Path:
    for name in ("b.png", "a.jpg", "trip/a.jpg", "trip/far away/c.webp", ".hidden.jpg", ".thumbs/a.jpg"):
        draw(tmp_path / name, "blue" if name == "trip/a.jpg" else "red")
    written(tmp_path, "a.txt", "ignored")
    written(tmp_path, "notes.md", "ignored")
    (tmp_path / "b.png").rename(tmp_path / "b.PNG")
    return tmp_path


def test_photos_of_a_folder_have_ids_and_no_captions(album: Path, photos_of: Load) -> None:
    pairs = photos_of(f"photos:{album}")
    assert pairs.image_ids == ("a.jpg", "b.PNG", "trip/a.jpg", "trip/far away/c.webp")
    assert (len(pairs), pairs.captions, pairs.caption_ids, pairs.skipped) == (0, (), (), ())
    red, _, blue = pairs.photos.open(2).getpixel((0, 0))  # type: ignore[misc]
    assert blue > red
    assert pairs.describe() == "all: 4 photos, 0 captions, 0 per photo"
    for name in ("a", "b", "trip/a", "trip/far away/c"):
        written(album, f"{name}.txt", "words")
    captioned = photos_of(f"folder:{album}")  # the same ids: captions may be written later
    assert (captioned.image_ids, captioned.photos.digest()) == (pairs.image_ids, pairs.photos.digest())


def test_a_plain_path_is_a_folder_of_photos(album: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(album)
    assert load_images("trip").image_ids == ("a.jpg", "far away/c.webp")
    (album / "folder").mkdir()
    assert images_spec("folder") == "photos:folder"  # a folder that is called like a format
    for spec in ("folder:trip", "lost", "a.jpg", "folder:", "scenes:"):
        assert images_spec(spec) == spec
    refused("lost", "no such folder: lost", error=UsageError, load=load_images)
    refused("trip/a.jpg", "its folder: trip", error=UsageError, load=load_images)


def test_a_folder_without_any_captions_says_so_whatever_the_split(album: Path, refused: Refused) -> None:
    for text in album.rglob("*.txt"):
        text.unlink()
    for spec in (f"folder:{album}", f"folder:{album},split=train"):
        refused(spec, "captions", f"photos:{album}")


def test_photos_are_refused_where_captions_are_needed(album: Path, refused: Refused) -> None:
    spec = f"photos:{album}"
    words = ("photos without captions", "a.txt", f"folder:{album}", f"vacsr index add INDEX --run RUN --pairs {spec}")
    refused(spec, *words, error=UsageError, on_error="skip")
    refused(str(album), f"folder:{album}", f"photos:{album}", error=UsageError)


def test_problems_of_a_folder_are_reported(
    album: Path, photos_of: Load, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead link, a name that no JSON file could hold, a closed folder (whose photos a pruned index would lose)."""
    (album / "a.jpg").rename(album.parent / "outside.jpg")
    (album / "a.jpg").symlink_to(album.parent / "outside.jpg")  # a photo, wherever it is
    (album / "link.jpg").symlink_to(album / "a.jpg")
    (album / "loop").symlink_to(album, target_is_directory=True)  # not followed
    (album / "dead.jpg").symlink_to(album / "nowhere.jpg")
    words, scan = ["dead.jpg: no such file", "trip: the folder cannot be read (Permission denied)"], os.scandir
    if sys.platform not in ("darwin", "win32"):  # where names are text
        (album / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"any")
        words.append("b'caf\\xe9.jpg': the name is not UTF-8")

    def closed(path: Any) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("trip"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    refused(f"photos:{album}", f"{len(words)} photos", *words, "--skip", load=load_images)
    with pytest.warns(UserWarning, match=f"{len(words)} left out"):
        pairs = photos_of(f"photos:{album}", on_error="skip")
    assert pairs.image_ids == ("a.jpg", "b.PNG", "link.jpg")
    assert all(line.encode() for line in pairs.skipped)


def test_kinds_that_cannot_be_decoded_are_reported(album: Path, photos_of: Load) -> None:
    for name in ("IMG_1.HEIC", "trip/2.dng"):
        (album / name).write_bytes(b"any")
    with pytest.warns(UserWarning, match=r"2, such as IMG_1\.HEIC — convert"):
        assert len(photos_of(f"photos:{album}").image_ids) == 4
