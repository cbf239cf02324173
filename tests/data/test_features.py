from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.data import load_pairs
from vacsr.data.features import load_features, write_features
from vacsr.data.pairs import Provenance
from vacsr.errors import DataError, ShapeMismatch, UsageError, VacsrError
from vacsr.files import write_tensors

IMAGE = torch.arange(12.0).reshape(3, 4)
TEXT = torch.arange(30.0).reshape(3, 2, 5)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_features(tmp_path / "f.safetensors", image=IMAGE, text=TEXT, provenance=Provenance("tiny:", revision="1"))
    return tmp_path / "f.safetensors"


def captions_json(folder: Path, counts: dict[str, int], *, splits: tuple[str, ...] = ()) -> Path:
    entries: list[dict[str, Any]] = [
        {"image": name, "captions": [f"{name} {index}" for index in range(count)]} for name, count in counts.items()
    ]
    for entry, split in zip(entries, splits, strict=False):
        entry["split"] = split
    path = folder / "captions.json"
    path.write_text(json.dumps(entries))
    return path


def assert_refused(error: type[VacsrError], *words: str, path: Path, **options: Any) -> None:
    with pytest.raises(error) as caught:
        load_features(path, **options)
    assert caught.value.exit_code == (2 if error is UsageError else 4)
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def test_without_names_ids_are_row_numbers(stored: Path) -> None:
    pairs = load_features(stored)
    assert pairs.image_ids == ("0", "1", "2")
    assert pairs.caption_ids == ("0#0", "0#1", "1#0", "1#1", "2#0", "2#1")
    assert pairs.caption_image.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.provenance == Provenance("tiny:", revision="1")
    assert pairs.captions is None
    assert torch.equal(pairs.texts, TEXT.reshape(6, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_comes_out_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    write_features(tmp_path / "f.safetensors", image=IMAGE.to(dtype), text=TEXT.to(dtype))
    pairs = load_features(tmp_path / "f.safetensors")
    assert pairs.images.dtype == pairs.texts.dtype == torch.float32
    assert torch.equal(pairs.images, IMAGE)


def test_captions_file_names_and_splits(stored: Path) -> None:
    names = captions_json(stored.parent, {"a": 2, "b": 2, "c": 2}, splits=("train", "dev", "train"))
    train = load_features(stored, captions=names, split="train")
    assert train.image_ids == ("a", "c")
    assert train.caption_ids == ("a#0", "a#1", "c#0", "c#1")
    assert train.captions == ("a 0", "a 1", "c 0", "c 1")
    assert train.caption_image.tolist() == [0, 0, 1, 1]
    assert train.split == "train"
    assert torch.equal(train.images, IMAGE[[0, 2]])
    assert torch.equal(train.texts, TEXT[[0, 2]].reshape(4, 5))
    for everything in (None, "all"):
        assert len(load_features(stored, captions=names, split=everything)) == 6


def test_spec_and_keywords_name_the_same_pairs(stored: Path) -> None:
    names = captions_json(stored.parent, {"a": 2, "b": 2, "c": 2}, splits=("train", "dev", "test"))
    assert load_pairs(f"features:{stored},captions={names},split=dev").image_ids == ("b",)
    assert load_pairs(f"features:{stored},captions=absent.json,split=dev", captions=names, split="test").split == "test"
    with pytest.raises(UsageError, match="captions"):
        load_pairs("synthetic:", captions=names)


def test_flat_texts_with_a_file_of_rows(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f.safetensors", {"image": IMAGE, "text": TEXT.reshape(6, 5)})
    names = tmp_path / "c.csv"
    names.write_text("image\nb\na\na\nb\nc\na\n")
    with pytest.warns(UserWarning, match="line 5: image 'b' comes back"):
        pairs = load_features(tmp_path / "f.safetensors", captions=names)
    assert pairs.image_ids == ("b", "a", "c")
    assert pairs.caption_image.tolist() == [0, 1, 1, 0, 2, 1]
    assert pairs.caption_ids == ("b#0", "a#0", "a#1", "b#1", "c#0", "a#2")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_captions_that_stand_apart_are_warned_of(tmp_path: Path, suffix: str) -> None:
    np.save(tmp_path / "image.npy", IMAGE.numpy())
    np.save(tmp_path / "text.npy", TEXT.reshape(6, 5).numpy())
    names = tmp_path / f"c.{suffix}"
    spec = f"features:{tmp_path / 'image.npy'},text={tmp_path / 'text.npy'},captions={names}"
    order = "bcabca"

    def write(images: str, rows: str = "") -> None:
        if suffix == "csv":
            lines = ["image,image_row", *map(",".join, zip(images, rows, strict=True))] if rows else ["image", *images]
        else:
            given = [{"image": n} | ({"image_row": int(rows[i])} if rows else {}) for i, n in enumerate(images)]
            lines = [json.dumps(row) for row in given]
        names.write_text("\n".join(lines))

    write(order)
    with pytest.warns(UserWarning, match=r"image 'b' comes back after other images; .* — add a column image_row"):
        assert load_pairs(spec).image_ids == ("b", "c", "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(order, "120120")
        assert load_pairs(spec).image_ids == ("a", "b", "c")
        write("bbccaa")
        assert load_pairs(spec).image_ids == ("b", "c", "a")


def test_a_stored_caption_image_answers_for_the_order(tmp_path: Path) -> None:
    rows = torch.tensor([0, 1, 0])
    write_features(tmp_path / "f.safetensors", image=IMAGE[:2], text=TEXT[:, 0], caption_image=rows)
    names = tmp_path / "c.csv"
    names.write_text("image\nb\na\nb\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_features(tmp_path / "f.safetensors", captions=names).image_ids == ("b", "a")


def test_flat_texts_with_caption_image_keep_a_distractor(tmp_path: Path) -> None:
    rows = torch.tensor([2, 0, 2], dtype=torch.int32)
    write_features(tmp_path / "f.safetensors", image=IMAGE, text=TEXT[:, 0], caption_image=rows)
    pairs = load_features(tmp_path / "f.safetensors")
    assert pairs.caption_ids == ("2#0", "0#0", "2#1")
    assert pairs.caption_image.tolist() == [2, 0, 2]
    assert len(pairs.image_ids) == 3


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", np.longdouble])
def test_npy_in_two_files(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "image.npy", IMAGE.numpy().astype(dtype))
    np.save(tmp_path / "text.npy", TEXT.numpy().astype(dtype))
    pairs = load_pairs(f"features:{tmp_path / 'image.npy'},text={tmp_path / 'text.npy'}")
    assert torch.equal(pairs.images, IMAGE)
    assert pairs.texts.dtype == torch.float32
    assert pairs.provenance == Provenance()


def test_a_split_that_does_not_exist(stored: Path) -> None:
    names = captions_json(stored.parent, {"a": 2, "b": 2, "c": 2}, splits=("train", "dev", "train"))
    assert_refused(
        DataError,
        "'val'",
        "train (2 images)",
        "dev (1 images)",
        "captions.json",
        path=stored,
        captions=names,
        split="val",
    )


def test_a_split_where_there_are_none(stored: Path) -> None:
    names = captions_json(stored.parent, {"a": 2, "b": 2, "c": 2})
    assert_refused(DataError, "'dev'", "no splits", "captions=FILE", path=stored, split="dev")
    assert_refused(DataError, "'dev'", "captions.json has no splits", path=stored, captions=names, split="dev")


def test_counts_that_do_not_agree(stored: Path) -> None:
    assert_refused(ShapeMismatch, "2 images", "3", path=stored, captions=captions_json(stored.parent, {"a": 2, "b": 2}))
    uneven = captions_json(stored.parent, {"a": 2, "b": 1, "c": 2})
    assert_refused(ShapeMismatch, "image 'b' has 1 captions", "2 in", path=stored, captions=uneven)


def test_flat_counts_that_do_not_agree(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f.safetensors", {"image": IMAGE, "text": TEXT.reshape(6, 5)})
    names = captions_json(tmp_path, {"a": 2, "b": 1, "c": 2})
    assert_refused(ShapeMismatch, "5 captions", "6", path=tmp_path / "f.safetensors", captions=names)


def test_orders_that_do_not_agree(stored: Path) -> None:
    names = stored.parent / "c.csv"
    names.write_text("image\na\nb\na\nb\nc\nc\n")
    assert_refused(DataError, "caption 'b#0'", "image row 1", "row 0", "same order", path=stored, captions=names)


def test_an_image_without_captions_in_json(stored: Path) -> None:
    assert_refused(
        DataError, "image 'b'", "empty", path=stored, captions=captions_json(stored.parent, {"a": 2, "b": 0, "c": 2})
    )


def test_flat_texts_of_nobody(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f.safetensors", {"image": IMAGE, "text": TEXT.reshape(6, 5)})
    assert_refused(DataError, "6 captions", "captions=FILE", "caption_image", path=tmp_path / "f.safetensors")


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"images": IMAGE}, DataError, ("holds images", "image and text")),
        ({"image": IMAGE.int(), "text": TEXT}, DataError, ("image", "torch.int32")),
        ({"image": IMAGE[0], "text": TEXT}, ShapeMismatch, ("image", "[4]", "[N, D]")),
        ({"image": IMAGE, "text": TEXT[0, 0]}, ShapeMismatch, ("text", "[5]", "[N, C, D]")),
        ({"image": IMAGE, "text": TEXT[:2]}, ShapeMismatch, ("2 images", "3")),
        ({"image": IMAGE[:0], "text": TEXT[:0]}, DataError, ("no images",)),
        ({"image": IMAGE, "text": TEXT[:, :0]}, DataError, ("no captions",)),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(6)}, DataError, ("caption_image", "float32")),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(5).long()}, ShapeMismatch, ("5 entries", "6")),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(6).long()}, DataError, ("contradicts",)),
        (
            {"image": IMAGE, "text": TEXT[:, 0], "caption_image": torch.tensor([0, 1, 9])},
            DataError,
            ("caption '9#0'", "row 9", "0 to 2"),
        ),
        ({"image": IMAGE / 0, "text": TEXT}, DataError, ("image '0'", "3 of 3")),
        ({"image": IMAGE.double() * 1e300, "text": TEXT}, DataError, ("image '0'", "infinite")),
    ],
)
def test_tensors_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], error: type[VacsrError], words: tuple[str, ...]
) -> None:
    write_tensors(tmp_path / "f.safetensors", tensors)
    assert_refused(error, *words, path=tmp_path / "f.safetensors")


def test_truncated_safetensors(stored: Path) -> None:
    whole = stored.read_bytes()
    for size in (0, 7, 60, len(whole) - 1):
        stored.write_bytes(whole[:size])
        assert_refused(DataError, "f.safetensors", "copy it again", path=stored)


def test_broken_npy(tmp_path: Path) -> None:
    image, text = tmp_path / "image.npy", tmp_path / "text.npy"
    np.save(image, IMAGE.numpy())
    np.save(text, TEXT.numpy())
    whole = text.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        text.write_bytes(whole[:size])
        assert_refused(DataError, "text.npy", "not a whole", path=image, text=text)
    text.write_bytes(pickle.dumps(["anything"]))
    assert_refused(DataError, "text.npy", path=image, text=text)
    np.save(text, np.array([{}], dtype=object))
    assert_refused(DataError, "text.npy", path=image, text=text)
    np.save(text, np.ones((3, 2), dtype=np.int64))
    assert_refused(DataError, "text.npy", "int64", path=image, text=text)
    with text.open("wb") as file:
        np.savez(file, x=np.ones(2))
    assert_refused(DataError, "text.npy", "archive", path=image, text=text)
    assert_refused(DataError, "absent.npy", path=image, text=tmp_path / "absent.npy")


def test_names_that_do_not_go_together(stored: Path) -> None:
    np.save(stored.parent / "image.npy", IMAGE.numpy())
    assert_refused(UsageError, "image.npy", "text=FILE.npy", path=stored.parent / "image.npy")
    assert_refused(UsageError, "text=", path=stored, text="t.npy")
    assert_refused(DataError, "f.pt", ".safetensors", path=stored.parent / "f.pt")


def test_a_blank_caption_matters_only_in_its_split(stored: Path) -> None:
    names = stored.parent / "c.csv"
    names.write_text("image,caption,split\na,x,dev\na,y,dev\nb,x,dev\nb,y,dev\nc,x,test\nc, ,test\n")
    assert len(load_features(stored, captions=names, split="dev")) == 4
    assert_refused(DataError, "caption 'c#1'", path=stored, captions=names, split="test")


def test_write_features_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with pytest.raises(DataError, match="pass caption_image="):
        write_features(path, image=IMAGE, text=TEXT[:, 0])
    with pytest.raises(DataError, match="row 9"):
        write_features(path, image=IMAGE, text=TEXT[:, 0], caption_image=torch.tensor([0, 1, 9]))
    assert not path.exists()
