from __future__ import annotations

from typing import Any

import pytest
import torch

from vacsr.data.pairs import PairSet, Provenance
from vacsr.errors import DataError, ProvenanceMismatch, ShapeMismatch, UsageError, VacsrError

Parts = dict[str, Any]


def assert_refused(parts: Parts, error: type[VacsrError], *words: str) -> None:
    with pytest.raises(error) as caught:
        PairSet(**parts)
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def test_a_valid_set_keeps_its_distractor(parts: Parts) -> None:
    pairs = PairSet(**parts)
    assert len(pairs) == 3
    assert pairs.describe() == "all: 3 images (4 dims), 3 captions (5 dims), 0–2 per image, backbone unknown"


@pytest.mark.parametrize(("name", "kind"), [("images", "image"), ("texts", "caption")])
def test_features_that_do_not_fit(parts: Parts, name: str, kind: str) -> None:
    whole = parts[name]
    assert_refused({**parts, name: whole[0]}, ShapeMismatch, kind, f"[{whole.shape[1]}]", "[rows, dims]")
    assert_refused({**parts, name: whole[:, :0]}, ShapeMismatch, kind, "[3, 0]")
    assert_refused({**parts, name: whole[:2]}, ShapeMismatch, f"2 rows of {kind} features", f"3 {kind} ids")
    assert_refused({**parts, name: whole.half()}, DataError, kind, "torch.float16", "torch.float32")
    assert_refused({**parts, name: whole[:0]}, DataError, f"no {kind}s")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite(parts: Parts, value: float) -> None:
    images, texts = parts["images"].clone(), parts["texts"].clone()
    images[1, 2] = value
    texts[1:, 0] = value
    assert_refused({**parts, "images": images}, DataError, "image 'b'", "1 of 3 images")
    assert_refused({**parts, "texts": texts}, DataError, "caption 'b#0'", "2 of 3 captions")


def test_ids_are_unique(parts: Parts) -> None:
    assert_refused({**parts, "image_ids": ("a", "c", "c")}, DataError, "image id 'c'", "2 times")
    assert_refused({**parts, "caption_ids": ("x", "y", "x")}, DataError, "caption id 'x'", "2 times")


@pytest.mark.parametrize("row", [-1, 3])
def test_a_caption_of_no_image(parts: Parts, row: int) -> None:
    assert_refused({**parts, "caption_image": torch.tensor([0, row, 0])}, DataError, "'b#0'", f"row {row}", "0 to 2")


def test_an_assignment_that_does_not_fit(parts: Parts) -> None:
    assert_refused({**parts, "caption_image": torch.tensor([0, 1])}, ShapeMismatch, "[2]", "[3]")
    assert_refused({**parts, "caption_image": torch.tensor([0, 1, 0]).int()}, DataError, "torch.int32", "torch.int64")


@pytest.mark.parametrize("blank", ["", " \t\n"])
def test_a_blank_caption(parts: Parts, blank: str) -> None:
    assert_refused({**parts, "captions": ("one", "two", blank)}, DataError, "'a#1'", "no text")


def test_texts_and_ids_disagree(parts: Parts) -> None:
    assert_refused({**parts, "captions": ("one", "two")}, ShapeMismatch, "2 caption texts", "3 caption ids")


def test_subset_takes_images_in_order_and_captions_along(parts: Parts) -> None:
    chosen = PairSet(**parts).subset([2, 0])
    assert chosen.image_ids == ("c", "a")
    assert chosen.caption_ids == ("a#0", "a#1")
    assert chosen.captions == ("one", "three")
    assert chosen.caption_image.tolist() == [1, 1]
    assert torch.equal(chosen.images, parts["images"][[2, 0]])
    assert torch.equal(chosen.texts, parts["texts"][[0, 2]])


def test_subset_by_mask_is_subset_by_rows(parts: Parts) -> None:
    pairs = PairSet(**parts)
    assert pairs.subset(torch.tensor([True, False, True])).image_ids == pairs.subset([0, 2]).image_ids


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([3], "row 3"),
        ([-1], "row -1"),
        ([], "no images"),
        ([0, 0], "image id 'a'"),
        ([2], "no captions"),
        ([0.5], "float32"),
        (torch.tensor([True]), "mask has 1"),
    ],
)
def test_subset_refuses(parts: Parts, rows: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        PairSet(**parts).subset(rows)


def test_with_caption_image_changes_labels_only(parts: Parts) -> None:
    pairs = PairSet(**parts)
    moved = pairs.with_caption_image(torch.tensor([2, 1, 0]))
    assert moved.caption_image.tolist() == [2, 1, 0]
    assert pairs.caption_image.tolist() == [0, 1, 0]
    assert moved.caption_ids == pairs.caption_ids
    with pytest.raises(DataError, match="'b#0'"):
        pairs.with_caption_image(torch.tensor([0, 7, 0]))


def many(count: int) -> PairSet:
    ids = tuple(str(row) for row in range(count))
    return PairSet(torch.ones(count, 2), torch.ones(count, 2), ids, ids, torch.arange(count))


def test_split_images_parts_the_images() -> None:
    pairs = many(50)
    train, dev = pairs.split_images(0.2, 3)
    assert (train.split, dev.split) == ("train", "dev")
    assert len(dev.image_ids) == 10
    assert set(train.image_ids) | set(dev.image_ids) == set(pairs.image_ids)
    assert not set(train.image_ids) & set(dev.image_ids)
    assert pairs.split_images(0.2, 3).dev.image_ids == dev.image_ids
    assert pairs.split_images(0.2, 4).dev.image_ids != dev.image_ids


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_split_images_leaves_no_side_empty(share: float) -> None:
    train, dev = many(5).split_images(share, 0)
    assert min(len(train), len(dev)) == 1


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 1.5, float("nan")])
def test_split_images_refuses_a_share(share: float) -> None:
    with pytest.raises(UsageError, match="share") as caught:
        many(5).split_images(share, 0)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("field", ["backbone", "preprocessing", "revision"])
def test_provenance_names_the_field_and_both_values(field: str) -> None:
    with pytest.raises(ProvenanceMismatch) as caught:
        Provenance(**{field: "old"}).check(Provenance(**{field: "new"}))
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in (field, "'old'", "'new'", "embed the data"))


def test_unknown_provenance_matches_anything() -> None:
    known = Provenance("a", "b", "c")
    known.check(Provenance())
    Provenance().check(known)
    known.check(known)
    assert Provenance.from_metadata(known.as_metadata()) == known
