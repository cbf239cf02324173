from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError, UsageError, VacsrError

WORDS = [
    "كلب يجري على الشاطئ",
    "一只狗在沙滩上奔跑",
    "👩‍👩‍👧 a family 🏖️",
    "é e\u0301 Z̸a̶l̷",
    "a\u2028b\x85c\x0bd",
    "x y " * 2_500,
]
"""Right to left, ideographs, joined emoji, combining marks, odd line ends, 10,000 characters."""
Rows = list[dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """Photos of three colours, one of them deeper down."""
    draw(tmp_path / "a.png", "red")
    draw(tmp_path / "b.png", "lime")
    draw(tmp_path / "deep" / "c.jpg", "blue")
    return tmp_path


def write(path: Path, rows: Rows) -> str:
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


def assert_refused(spec: str, *words: str, error: type[VacsrError] = DataError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        load_pairs(spec, **options)
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def photos_of(spec: str, **options: Any) -> PhotoSet:
    pairs = load_pairs(spec, **options)
    assert isinstance(pairs, PhotoSet)
    return pairs


TABLES = pytest.mark.parametrize("suffix", ["csv", "jsonl"])
PLAIN: Rows = [
    {"image": "a.png", "caption": "one"},
    {"image": "deep/c.jpg", "caption": "two, with a comma"},
    {"image": "a.png", "caption": "three"},
]


@TABLES
def test_a_table_beside_its_photos(root: Path, suffix: str) -> None:
    pairs = photos_of(write(root / f"t.{suffix}", PLAIN))
    assert pairs.image_ids == ("a.png", "deep/c.jpg")
    assert pairs.captions == ("one", "two, with a comma", "three")
    assert pairs.caption_ids == ("a.png#0", "deep/c.jpg#0", "a.png#1")
    assert pairs.caption_image.tolist() == [0, 1, 0]
    assert (pairs.split, pairs.skipped) == ("all", ())
    assert pairs.photos.open(0).getpixel((0, 0)) == (255, 0, 0)
    assert pairs.photos.open(1).getpixel((0, 0))[2] > 240  # type: ignore[index]


@TABLES
def test_a_table_elsewhere(root: Path, suffix: str) -> None:
    spec = write(root / "tables" / f"t.{suffix}", PLAIN)
    assert_refused(spec, "2 photos or captions", "a.png", "no such file")
    assert photos_of(f"{spec},root={root}").digest() == photos_of(write(root / f"t.{suffix}", PLAIN)).digest()


@TABLES
def test_ids_and_splits_of_its_own(root: Path, suffix: str) -> None:
    rows: Rows = [
        {"image": "a.png", "image_id": "7", "caption": "one", "caption_id": "x", "split": "train"},
        {"image": "a.png", "image_id": "8", "caption": "two", "caption_id": "y", "split": "dev"},
        {"image": "b.png", "image_id": "9", "caption": "three", "caption_id": "z", "split": "train"},
    ]
    spec = write(root / f"t.{suffix}", rows)
    train = photos_of(spec, split="train")
    assert (train.image_ids, train.caption_ids, train.split) == (("7", "9"), ("x", "z"), "train")
    assert Path(train.photos.name(1)).name == "b.png"
    assert photos_of(f"{spec},split=dev").captions == ("two",)
    assert photos_of(spec).image_ids == ("7", "8", "9")
    assert_refused(spec, "'test'", "train (2 images)", split="test")


@TABLES
def test_an_id_with_two_photos(root: Path, suffix: str) -> None:
    rows: Rows = [{"image": name, "image_id": "7", "caption": "one"} for name in ("a.png", "b.png")]
    assert_refused(write(root / f"t.{suffix}", rows), "'7'", "'b.png'", "'a.png'")


@TABLES
def test_columns_that_are_missing(root: Path, suffix: str) -> None:
    for rows in ([{"image": "a.png", "text": "x"}], [{"file": "a.png", "caption": "x"}]):
        assert_refused(write(root / f"t.{suffix}", rows), *rows[0], "image and caption", f"t.{suffix}")
    (root / f"t.{suffix}").write_text("")
    assert_refused(f"{suffix}:{root}/t.{suffix}", "no row at all")


@TABLES
def test_a_split_that_no_row_has(root: Path, suffix: str) -> None:
    assert_refused(write(root / f"t.{suffix}", PLAIN), "'train'", "has no splits", split="train")


@TABLES
def test_captions_of_all_scripts_stay_as_they_are(root: Path, suffix: str) -> None:
    pairs = photos_of(write(root / f"t.{suffix}", [{"image": "a.png", "caption": text} for text in WORDS]))
    assert list(pairs.captions) == WORDS


BAD: Rows = [
    {"image": "a.png", "caption": "one"},
    {"image": "a.png", "caption": " \t"},
    {"image": "b.png", "caption": ""},
    {"image": "lost.png", "caption": "two"},
    {"image": "deep/c.jpg", "caption": "three"},
]


@TABLES
def test_problems_stop_the_reading(root: Path, suffix: str) -> None:
    spec = write(root / f"t.{suffix}", BAD)
    words = ("4 photos or captions", "lost.png: no such file", "a.png#1", "b.png#0", "b.png: no caption")
    assert_refused(spec, *words, "data.on_error=skip")


@TABLES
def test_problems_are_left_out_and_told(root: Path, suffix: str) -> None:
    spec = write(root / f"t.{suffix}", BAD)
    with pytest.warns(
        UserWarning, match=r"4 left out: .*lost\.png: no such file; a\.png#1: .*; b\.png#0: .* …"
    ) as caught:
        pairs = photos_of(spec, on_error="skip")
    assert len(caught) == 1
    assert pairs.image_ids == ("a.png", "deep/c.jpg")
    assert pairs.caption_ids == ("a.png#0", "deep/c.jpg#0")
    assert pairs.caption_image.tolist() == [0, 1]
    assert [line.rpartition("/")[2] for line in pairs.skipped] == [
        "lost.png: no such file",
        "a.png#1: the caption has no text",
        "b.png#0: the caption has no text",
        "b.png: no caption",
    ]
    assert [Path(pairs.photos.name(row)).name for row in range(2)] == ["a.png", "c.jpg"]


def test_a_caption_that_is_null(root: Path) -> None:
    spec = write(root / "t.jsonl", [{"image": "a.png", "caption": "one"}, {"image": "a.png", "caption": None}])
    assert_refused(spec, "a.png#1: the caption has no text")
    with pytest.warns(UserWarning, match="1 left out"):
        assert photos_of(spec, on_error="skip").captions == ("one",)


def test_problems_of_another_split_do_not_matter(root: Path) -> None:
    rows: Rows = [
        {"image": "a.png", "caption": "one", "split": "train"},
        {"image": "lost.png", "caption": "two", "split": "dev"},
    ]
    spec = write(root / "t.csv", rows)
    assert photos_of(spec, split="train").image_ids == ("a.png",)
    assert_refused(spec, "lost.png", split="dev")
    assert_refused(spec, "none of 1 photos", "lost.png", split="dev", on_error="skip")


def test_a_policy_that_does_not_exist(root: Path) -> None:
    assert_refused(write(root / "t.csv", PLAIN), "'ignore'", "skip", error=UsageError, on_error="ignore")


def test_files_of_another_kind(root: Path) -> None:
    write(root / "t.csv", PLAIN)
    assert_refused(f"jsonl:{root / 't.csv'}", "t.csv", ".jsonl")
    assert_refused(f"csv:{root / 'absent.csv'}", "no such captions file", "absent.csv")


def test_features_and_generated_worlds_take_the_policy_too() -> None:
    assert len(load_pairs("synthetic:images=4", on_error="skip")) == len(load_pairs("synthetic:images=4"))


def beside(photo: Path, text: str) -> None:
    photo.with_suffix(".txt").write_bytes(text.encode())


def test_a_folder(root: Path) -> None:
    beside(root / "a.png", "one\n\n  \ntwo \r\n")
    beside(root / "b.png", "three")
    beside(root / "deep" / "c.jpg", "\ufefffour\n")
    (root / ".hidden.png").write_text("not looked at")
    (root / "table.csv").write_text("nor this")
    pairs = photos_of(f"folder:{root}")
    assert pairs.image_ids == ("a.png", "b.png", "deep/c.jpg")
    assert pairs.captions == ("one", "two ", "three", "four")
    assert pairs.caption_ids == ("a.png#0", "a.png#1", "b.png#0", "deep/c.jpg#0")
    assert pairs.photos.open(1).getpixel((0, 0)) == (0, 255, 0)
    assert_refused(f"folder:{root}", "has no splits", split="train")


def test_a_folder_by_splits(tmp_path: Path, draw: Callable[..., Path]) -> None:
    for name in ("train/x/a.png", "train/b.png", "val/a.png"):
        beside(draw(tmp_path / name), name)
    assert photos_of(f"folder:{tmp_path}", split="train").image_ids == ("train/b.png", "train/x/a.png")
    assert photos_of(f"folder:{tmp_path},split=val").captions == ("val/a.png",)
    assert photos_of(f"folder:{tmp_path}").image_ids == ("train/b.png", "train/x/a.png", "val/a.png")
    assert_refused(f"folder:{tmp_path}", "'dev'", "val (1 images)", split="dev")


def test_a_folder_with_gaps(root: Path) -> None:
    beside(root / "a.png", "one")
    beside(root / "b.png", " \n")
    beside(root / "lost.png", "two")
    assert_refused(f"folder:{root}", "3 photos or captions", "lost.txt: no photo", "b.png: no caption", "c.jpg: no")
    with pytest.warns(UserWarning, match="3 left out"):
        pairs = photos_of(f"folder:{root}", on_error="skip")
    assert pairs.image_ids == ("a.png",)
    assert len(pairs.skipped) == 3


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert_refused(f"folder:{tmp_path / 'absent'}", "is no folder", "a.jpg, a.txt")
    assert_refused(f"folder:{tmp_path}", "holds nothing", ".jpg")
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.txt").write_bytes("ß".encode("latin-1"))
    assert_refused(f"folder:{tmp_path}", "a.txt", "UTF-8")


def test_a_folder_keeps_all_scripts(root: Path) -> None:
    beside(root / "a.png", "\n".join(WORDS))
    with pytest.warns(UserWarning, match="2 left out"):
        assert list(photos_of(f"folder:{root}", on_error="skip").captions) == WORDS


def test_two_photos_beside_one_text(tmp_path: Path, draw: Callable[..., Path]) -> None:
    """Nothing says which of the two the text means."""
    beside(draw(tmp_path / "x.jpg"), "one")
    draw(tmp_path / "x.png")
    draw(tmp_path / "x.webp")
    beside(draw(tmp_path / "deep" / "x.png"), "two")
    words = "x.png: its text x.txt is that of x.jpg too"
    assert_refused(f"folder:{tmp_path}", "2 photos or captions", words, "x.webp: its text x.txt is that of x.jpg too")
    with pytest.warns(UserWarning, match="2 left out"):
        pairs = photos_of(f"folder:{tmp_path}", on_error="skip")
    assert pairs.image_ids == ("deep/x.png", "x.jpg")
    assert pairs.captions == ("two", "one")
    assert pairs.skipped[0] == f"{tmp_path}/{words}"
    (tmp_path / "x.txt").unlink()
    assert_refused(f"folder:{tmp_path}", "x.jpg: no caption", "x.png: no caption", "x.webp: no caption")
