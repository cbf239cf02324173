from collections.abc import Callable
from typing import Any

import pytest
import torch

from vacsr.data.pairs import PairSet, Provenance
from vacsr.errors import DataError, ProvenanceMismatch, ShapeMismatch, UsageError, VacsrError

Parts = dict[str, Any]


def spoiled(kind: str, row: slice, value: float) -> Callable[[Parts], Any]:
    def change(parts: Parts) -> torch.Tensor:
        features = parts[kind].clone()
        features[row, 0] = value
        return features

    return change


@pytest.mark.parametrize(
    ("field", "change", "error", "words"),
    [
        ("images", lambda parts: parts["images"][0], ShapeMismatch, "image features have shape .4."),
        ("texts", lambda parts: parts["texts"][:, :0], ShapeMismatch, "caption features have shape .3, 0."),
        ("texts", lambda parts: parts["texts"][:2], ShapeMismatch, "for 3 ids"),
        ("images", lambda parts: parts["images"].half(), DataError, "torch.float16"),
        ("images", spoiled("images", slice(1, 2), float("nan")), DataError, "1 of 3 images .* image 'b'"),
        ("texts", spoiled("texts", slice(1, 3), float("-inf")), DataError, "2 of 3 captions .* caption 'b#0'"),
        ("image_ids", lambda _: ("a", "c", "c"), DataError, "duplicate image id 'c'"),
        ("caption_ids", lambda _: ("x", "y", "x"), DataError, "duplicate caption id 'x'"),
        ("caption_image", lambda _: torch.tensor([0, -1, 0]), DataError, "'b#0' points to image row -1"),
        ("caption_image", lambda _: torch.tensor([0, 3, 0]), DataError, "'b#0' points to image row 3, .* 0 to 2"),
        ("caption_image", lambda _: torch.tensor([0, 1]), ShapeMismatch, "shape .2., expected .3."),
        ("caption_image", lambda _: torch.tensor([0, 1, 0]).int(), DataError, "torch.int32"),
        ("captions", lambda _: ("one", "two", " \t\n"), DataError, "'a#1' has no text"),
        ("captions", lambda _: ("one", "two"), ShapeMismatch, "2 captions and 3 caption ids"),
    ],
)
def test_parts_that_do_not_fit(
    parts: Parts, field: str, change: Callable[[Parts], Any], error: type[VacsrError], words: str
) -> None:
    with pytest.raises(error, match=f"{words}.* — ") as caught:
        PairSet(**{**parts, field: change(parts)})
    assert caught.value.exit_code == 4


def test_subset_takes_images_in_order_and_captions_along(parts: Parts) -> None:
    pairs = PairSet(**parts)
    assert pairs.describe() == "all: 3 images (4 dims), 3 captions (5 dims), 0–2 per image, backbone unknown"
    chosen = pairs.subset([2, 0])
    assert (chosen.image_ids, chosen.caption_ids, chosen.captions) == (("c", "a"), ("a#0", "a#1"), ("one", "three"))
    assert chosen.caption_image.tolist() == [1, 1]
    assert torch.equal(chosen.images, parts["images"][[2, 0]])
    assert torch.equal(chosen.texts, parts["texts"][[0, 2]])
    assert pairs.subset(torch.tensor([True, False, True])).image_ids == ("a", "c")
    for rows in ([3], [-1], [], [0, 0], [2], [0.5], torch.tensor([True])):
        with pytest.raises(DataError, match=" — "):
            pairs.subset(rows)


def many(count: int) -> PairSet:
    ids = tuple(str(row) for row in range(count))
    return PairSet(torch.ones(count, 2), torch.ones(count, 2), ids, ids, torch.arange(count))


def test_split_images_parts_the_images() -> None:
    pairs = many(50)
    train, dev = pairs.split_images(0.2, 3)
    assert (train.split, dev.split, len(dev.image_ids)) == ("train", "dev", 10)
    assert sorted((*train.image_ids, *dev.image_ids)) == sorted(pairs.image_ids)
    assert pairs.split_images(0.2, 3)[1].image_ids == dev.image_ids
    assert pairs.split_images(0.2, 4)[1].image_ids != dev.image_ids
    for share in (0.0001, 0.9999):
        assert min(map(len, many(5).split_images(share, 0))) == 1
    for share in (-0.1, 0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="try share="):
            many(5).split_images(share, 0)


def test_provenance_must_agree_where_it_is_known() -> None:
    for field in ("backbone", "preprocessing", "revision"):
        with pytest.raises(ProvenanceMismatch, match=f"{field} 'old', these have 'new' — embed the data"):
            Provenance(**{field: "old"}).check(Provenance(**{field: "new"}))
    known = Provenance("a", "b", "c")
    known.check(Provenance())
    Provenance().check(known)
    known.check(known)
    assert Provenance.from_metadata(known.as_metadata()) == known
