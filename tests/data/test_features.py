"""Cached embeddings as pairs."""

import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.data import PairSet, load_pairs
from vacsr.data.features import write_features
from vacsr.data.pairs import Provenance
from vacsr.errors import DataError, NoSuchSplit, ShapeMismatch, UsageError, VacsrError
from vacsr.files import write_tensors

Refused = Callable[..., str]
IMAGE = torch.arange(12.0).reshape(3, 4)
TEXT = torch.arange(30.0).reshape(3, 2, 5)


def load(path: Path, *, text: object = None, **options: Any) -> PairSet:
    pairs = load_pairs(f"features:{path}" + (f",text={text}" if text else ""), **options)
    assert isinstance(pairs, PairSet)
    return pairs


@pytest.fixture
def refuse(refused: Refused) -> Refused:
    return partial(refused, load=load)


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


def test_without_names_ids_are_row_numbers(stored: Path) -> None:
    pairs = load(stored)
    assert pairs.image_ids == ("0", "1", "2")
    assert pairs.caption_ids == ("0#0", "0#1", "1#0", "1#1", "2#0", "2#1")
    assert pairs.caption_image.tolist() == [0, 0, 1, 1, 2, 2]
    assert (pairs.provenance, pairs.captions) == (Provenance("tiny:", revision="1"), None)
    assert torch.equal(pairs.texts, TEXT.reshape(6, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_comes_out_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    write_features(tmp_path / "f.safetensors", image=IMAGE.to(dtype), text=TEXT.to(dtype))
    pairs = load(tmp_path / "f.safetensors")
    assert torch.equal(pairs.images, IMAGE)
    assert torch.equal(pairs.texts, TEXT.reshape(6, 5))


def test_captions_file_names_and_splits(stored: Path) -> None:
    names = captions_json(stored.parent, {"a": 2, "b": 2, "c": 2}, splits=("train", "dev", "train"))
    train = load(stored, captions=names, split="train")
    assert train.image_ids == ("a", "c")
    assert train.caption_ids == ("a#0", "a#1", "c#0", "c#1")
    assert train.captions == ("a 0", "a 1", "c 0", "c 1")
    assert (train.caption_image.tolist(), train.split) == ([0, 0, 1, 1], "train")
    assert torch.equal(train.images, IMAGE[[0, 2]])
    assert torch.equal(train.texts, TEXT[[0, 2]].reshape(4, 5))
    for everything in (None, "all"):
        assert len(load(stored, captions=names, split=everything)) == 6
    assert load_pairs(f"features:{stored},captions={names},split=dev").image_ids == ("b",)
    keywords = load_pairs(f"features:{stored},captions=absent.json,split=train", captions=names, split="dev")
    assert keywords.image_ids == ("b",)
    with pytest.raises(UsageError, match="captions"):
        load_pairs("synthetic:", captions=names)


@pytest.mark.filterwarnings("ignore:.*comes back")
def test_captions_that_are_apart_are_warned_of(tmp_path: Path) -> None:
    """Unless a column or a stored caption_image answers for the order."""
    write_tensors(tmp_path / "f.safetensors", {"image": IMAGE, "text": TEXT.reshape(6, 5)})
    names = tmp_path / "c.csv"

    def image_ids(lines: list[str], header: str = "image") -> tuple[str, ...]:
        names.write_text("\n".join([header, *lines]))
        return load(tmp_path / "f.safetensors", captions=names).image_ids

    with pytest.warns(UserWarning, match=r"c\.csv: image 'b' has captions in two places.* — add a column image_row"):
        assert image_ids(list("baabca")) == ("b", "a", "c")
    pairs = load(tmp_path / "f.safetensors", captions=names)
    assert pairs.caption_image.tolist() == [0, 1, 1, 0, 2, 1]
    assert pairs.caption_ids == ("b#0", "a#0", "a#1", "b#1", "c#0", "a#2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert image_ids(["b,1", "c,2", "a,0", "b,1", "c,2", "a,0"], "image,image_row") == ("a", "b", "c")
        assert image_ids(list("bbccaa")) == ("b", "c", "a")
        rows = torch.tensor([0, 1, 0])
        write_features(tmp_path / "f.safetensors", image=IMAGE[:2], text=TEXT[:, 0], caption_image=rows)
        assert image_ids(list("bab")) == ("b", "a")


def test_flat_texts_with_caption_image_keep_a_distractor(tmp_path: Path) -> None:
    rows = torch.tensor([2, 0, 2], dtype=torch.int32)
    write_features(tmp_path / "f.safetensors", image=IMAGE, text=TEXT[:, 0], caption_image=rows)
    pairs = load(tmp_path / "f.safetensors")
    assert (pairs.caption_ids, pairs.caption_image.tolist()) == (("2#0", "0#0", "2#1"), [2, 0, 2])
    assert len(pairs.image_ids) == 3


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
def test_npy_in_two_files(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "image.npy", IMAGE.numpy().astype(dtype))
    np.save(tmp_path / "text.npy", TEXT.numpy().astype(dtype))
    pairs = load(tmp_path / "image.npy", text=tmp_path / "text.npy")
    assert torch.equal(pairs.images, IMAGE)
    assert (pairs.texts.dtype, pairs.provenance) == (torch.float32, Provenance())


def test_files_that_do_not_agree(stored: Path, refuse: Refused) -> None:
    folder = stored.parent
    names = captions_json(folder, {"a": 2, "b": 2, "c": 2})
    refuse(stored, "'dev'", "no splits", error=NoSuchSplit, split="dev")
    refuse(stored, "'dev'", "captions.json has no splits", error=NoSuchSplit, captions=names, split="dev")
    refuse(stored, "2 images", "3", error=ShapeMismatch, captions=captions_json(folder, {"a": 2, "b": 2}))
    uneven = captions_json(folder, {"a": 2, "b": 1, "c": 2})
    refuse(stored, "5 captions", "6", error=ShapeMismatch, captions=uneven)
    names = folder / "c.csv"
    names.write_text("image\na\nb\na\nb\nc\nc\n")
    refuse(stored, "caption 'b#0'", "image row 1", "row 0", "same order", captions=names)
    names.write_text("image,caption,split\na,x,dev\na,y,dev\nb,x,dev\nb,y,dev\nc,x,test\nc, ,test\n")
    assert len(load(stored, captions=names, split="dev")) == 4  # a blank caption matters only in its split
    refuse(stored, "caption 'c#1'", captions=names, split="test")
    write_tensors(stored, {"image": IMAGE, "text": TEXT.reshape(6, 5)})
    refuse(stored, "captions=FILE", "caption_image")


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"images": IMAGE}, DataError, ("holds images", "image and text")),
        ({"image": IMAGE.int(), "text": TEXT}, DataError, ("image", "torch.int32")),
        ({"image": IMAGE[0], "text": TEXT}, ShapeMismatch, ("image", "[4]", "[N, D]")),
        ({"image": IMAGE, "text": TEXT[0, 0]}, ShapeMismatch, ("text", "[5]", "[N, C, D]")),
        ({"image": IMAGE, "text": TEXT[:2]}, ShapeMismatch, ("[3, 4]", "[2, 2, 5]")),
        ({"image": IMAGE, "text": TEXT[:, :0]}, DataError, ("no captions",)),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(6)}, DataError, ("caption_image", "float32")),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(5).long()}, ShapeMismatch, ("[5]", "[6]")),
        ({"image": IMAGE, "text": TEXT, "caption_image": torch.zeros(6).long()}, DataError, ("contradicts",)),
        ({"image": IMAGE, "text": TEXT[:, 0], "caption_image": torch.tensor([0, 1, 9])}, DataError, ("row 9",)),
        ({"image": IMAGE.double() * 1e300, "text": TEXT}, DataError, ("image '0'", "infinite")),
    ],
)
def test_tensors_that_are_refused(
    tmp_path: Path, refuse: Refused, tensors: dict[str, Tensor], error: type[VacsrError], words: tuple[str, ...]
) -> None:
    write_tensors(tmp_path / "f.safetensors", tensors)
    refuse(tmp_path / "f.safetensors", *words, error=error)


def test_truncated_files(stored: Path, refuse: Refused) -> None:
    image, text = stored.parent / "image.npy", stored.parent / "text.npy"
    np.save(image, IMAGE.numpy())
    np.save(text, TEXT.numpy())
    whole, array = stored.read_bytes(), text.read_bytes()
    for size in (0, 7, 60, -1):
        stored.write_bytes(whole[:size])
        refuse(stored, "f.safetensors", "copy it again")
        text.write_bytes(array[:size])
        refuse(image, "text.npy", text=text)


def test_arrays_that_are_refused(tmp_path: Path, refuse: Refused) -> None:
    image, text = tmp_path / "image.npy", tmp_path / "text.npy"
    np.save(image, IMAGE.numpy())
    text.write_bytes(pickle.dumps(["anything"]))
    refuse(image, "text.npy", text=text)
    np.save(text, np.array([{}], dtype=object))
    refuse(image, "text.npy", text=text)
    np.save(text, np.ones((3, 2), dtype=np.int64))
    refuse(image, "text.npy", "int64", text=text)
    refuse(image, "absent.npy", text=tmp_path / "absent.npy")
    refuse(image, "image.npy", "text=FILE.npy", error=UsageError)
    refuse(tmp_path / "f.safetensors", "text=", error=UsageError, text="t.npy")
    refuse(tmp_path / "f.pt", "f.pt", ".safetensors")


def test_write_features_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with pytest.raises(DataError, match="pass caption_image="):
        write_features(path, image=IMAGE, text=TEXT[:, 0])
    assert not path.exists()


FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k"


@pytest.mark.shared
@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/data/flickr8k beside the checkout")
@pytest.mark.parametrize(("split", "images"), [("train", 6_000), ("test", 500), ("all", 7_500)])
def test_flickr8k_features(split: str, images: int) -> None:
    pairs = load(FOLDER / "features-tinyvit-minilm.safetensors", captions=FOLDER / "captions.json", split=split)
    assert (pairs.images.shape, pairs.texts.shape, pairs.split) == ((images, 320), (5 * images, 384), split)
    assert pairs.caption_ids[6] == f"{pairs.image_ids[1]}#1"
