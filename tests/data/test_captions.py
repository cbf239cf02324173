from __future__ import annotations

import json
from pathlib import Path

import pytest

from vacsr.data.captions import choose_split, read_captions
from vacsr.errors import DataError, NoSuchSplit


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_captions(path)
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def test_json_in_the_order_of_its_images(tmp_path: Path) -> None:
    entries = [
        {"image": "b.jpg", "split": "dev", "captions": ["one", "two"]},
        {"image": "a.jpg", "split": "train", "captions": ["three"]},
    ]
    table = read_captions(written(tmp_path, "c.json", json.dumps(entries)))
    assert table.image_ids == ("b.jpg", "a.jpg")
    assert table.caption_ids == ("b.jpg#0", "b.jpg#1", "a.jpg#0")
    assert table.caption_image == (0, 0, 1)
    assert table.captions == ("one", "two", "three")
    assert table.splits == ("dev", "train")


def test_csv_in_order_of_first_appearance(tmp_path: Path) -> None:
    text = '\ufeffimage,caption,split\nb,"one, with a comma",dev\na,two,train\nb,three,dev\n'
    table = read_captions(written(tmp_path, "c.csv", text))
    assert table.image_ids == ("b", "a")
    assert table.caption_ids == ("b#0", "a#0", "b#1")
    assert table.caption_image == (0, 1, 0)
    assert table.captions == ("one, with a comma", "two", "three")
    assert table.splits == ("dev", "train")


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("image\na\na\nb\n", None),
        ("image\nb\nc\nb\nc\n", "line 4: image 'b' comes back after other images"),
        ("image\na\nc\nb\nb\nc\n", "line 6: image 'c' comes back after other images"),
        ("image,image_row\nb,1\nc,0\nb,1\n", None),
    ],
)
def test_captions_of_an_image_that_stand_apart(tmp_path: Path, text: str, apart: str | None) -> None:
    path = written(tmp_path, "c.csv", text)
    assert read_captions(path).apart == (None if apart is None else f"{path}, {apart}")


def test_jsonl_with_ids_and_rows_of_its_own(tmp_path: Path) -> None:
    rows = [{"image": 7, "caption_id": "x", "image_row": 1}, {"image": "a", "caption_id": "y", "image_row": 0}]
    table = read_captions(written(tmp_path, "c.jsonl", "\n\n".join(map(json.dumps, rows))))
    assert table.image_ids == ("a", "7")
    assert table.caption_ids == ("x", "y")
    assert table.caption_image == (1, 0)
    assert table.captions is None
    assert table.splits is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{", ("cannot be read", "c.json")),
        ('{"image": "a"}', ("not a list of images",)),
        ("[]", ("names no image",)),
        ('[{"captions": ["x"]}]', ("names no image",)),
        ('[{"image": "a", "captions": ["x"]}, {"captions": ["x"]}]', ("entry 1", "image (None)")),
        ('[{"image": " ", "captions": ["x"]}]', ("entry 0", "image (' ')")),
        ('[{"image": "a", "captions": ["x"], "captions": ["y"]}]', ("c.json: duplicate key 'captions'",)),
        ('[{"image": "a"}]', ("image 'a'", "no list of texts")),
        ('[{"image": "a", "captions": "x"}]', ("image 'a'", "no list of texts")),
        ('[{"image": "a", "captions": [1]}]', ("image 'a'", "no list of texts")),
        ('[{"image": "a", "captions": []}]', ("image 'a'", "empty list of captions")),
        ('[{"image": "a", "captions": ["x"]}, {"image": "a", "captions": ["x"]}]', ("image id 'a'", "2 times")),
        (
            '[{"image": "a", "split": "dev", "captions": ["x"]}, {"image": "b", "captions": ["x"]}]',
            ("entry 1", "split (None)"),
        ),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    assert_refused(written(tmp_path, "c.json", text), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("names no image", "columns: none")),
        ("name,caption\na,x\n", ("names no image", "name, caption")),
        ("image,caption\na,x,y\n", ("line 2", "image, caption")),
        ("image,caption\na\n", ("line 2", "image, caption")),
        ('image,caption\na,"x"y\n', ("cannot be read",)),
        ("image,caption_id\na,x\nb,x\n", ("caption id 'x'", "2 times")),
        ("image,split\na,dev\na,test\n", ("line 3", "image 'a'", "'dev'", "'test'")),
        ("image,split\na,dev\nb,\n", ("line 3", "split ('')")),
        ("image,image_row\na,zero\n", ("line 2", "'zero'")),
        ("image,image_row\na,-1\n", ("line 2", "'-1'")),
        ("image,image_row\na,0\na,1\n", ("line 3", "image 'a'", "image_row '1'")),
        ("image,image_row\na,0\nb,0\n", ("'a'", "'b'", "image_row 0")),
        ("image,image_row\na,0\nb,2\n", ("image_row 1", "2 images")),
    ],
)
def test_csv_that_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    assert_refused(written(tmp_path, "c.csv", text), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image": "a"}\n{', ("line 2", "not JSON")),
        ('["a"]', ("line 1", "not an object")),
        ('{"image": "a"}\n{"image": "b", "image": "c"}', ("c.jsonl, line 2: duplicate key 'image'",)),
        ('{"image": "a", "caption": "x"}\n{"image": "b"}', ("line 2", "caption (None)")),
        ('{"image": true}', ("line 1", "image (True)")),
    ],
)
def test_jsonl_that_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    assert_refused(written(tmp_path, "c.jsonl", text), *words)


def test_files_that_are_no_captions_files(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent.json", "no such captions file", "absent.json")
    assert_refused(written(tmp_path, "c.txt", "a"), "c.txt", ".jsonl")
    latin = tmp_path / "latin.csv"
    latin.write_bytes("image\nß".encode("latin-1"))
    assert_refused(latin, "latin.csv", "UTF-8")


@pytest.mark.parametrize(("column", "words"), [(",split", "no split 'dev'"), ("", "has no splits")])
def test_an_absent_split_is_an_error_of_its_own(tmp_path: Path, column: str, words: str) -> None:
    table = read_captions(written(tmp_path, "c.csv", f"image{column}\na{',train' if column else ''}\n"))
    with pytest.raises(NoSuchSplit, match=words) as caught:
        choose_split(table, "dev")
    assert caught.value.exit_code == DataError.exit_code
