from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.data import load_pairs
from vacsr.data.synthetic import (
    ATTRIBUTES,
    GROUPS,
    SyntheticOptions,
    caption_text,
    synthetic_grades,
    synthetic_world,
    true_share,
)
from vacsr.errors import DataError, UsageError


def slow_share(present: Tensor, mentioned: Tensor) -> list[list[float]]:
    """The definition, pair by pair, with sets."""
    have = [{name for name, there in zip(ATTRIBUTES, row, strict=True) if there} for row in present.tolist()]
    said = [{name for name, there in zip(ATTRIBUTES, row, strict=True) if there} for row in mentioned.tolist()]
    return [[len(image & caption) / len(caption) for caption in said] for image in have]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 12), st.integers(1, 4), st.sampled_from(["train", "dev", "test", None]))
def test_grades_are_the_share_of_the_captions_attributes(seed: int, images: int, each: int, split: str | None) -> None:
    world = synthetic_world(SyntheticOptions(images=images, per_image=each, seed=seed), split=split)
    grades = synthetic_grades(f"synthetic:images={images},per_image={each},seed={seed}", split=split)
    assert grades.shape == (len(world.pairs.image_ids), len(world.pairs))
    assert torch.allclose(grades, torch.tensor(slow_share(world.present, world.mentioned)))
    assert torch.equal(grades, true_share(world.present, world.mentioned))
    own = grades[world.pairs.caption_image, torch.arange(len(world.pairs))]
    assert torch.equal(own, torch.ones(len(own)))


def test_images_and_captions_have_the_promised_attributes() -> None:
    world = synthetic_world(split="train")
    start = 0
    for group in GROUPS.values():
        count = world.present[:, start : start + len(group.names)].sum(dim=1)
        assert (int(count.min()), int(count.max())) == (group.low, group.high)
        start += len(group.names)
    assert start == len(ATTRIBUTES) == 24
    assert float(world.present.sum(dim=1).float().mean()) == pytest.approx(6, abs=0.2)
    assert set(world.mentioned.sum(dim=1).tolist()) == {2, 3, 4}


def test_captions_say_what_they_mention() -> None:
    world = synthetic_world(SyntheticOptions(images=100), split="train")
    assert world.pairs.captions is not None
    for text, row in zip(world.pairs.captions, world.mentioned.tolist(), strict=True):
        assert {name for name in ATTRIBUTES if name in text} == {ATTRIBUTES[k] for k, said in enumerate(row) if said}
        assert "  " not in text


def test_captions_are_often_true_of_several_images() -> None:
    true = synthetic_grades("synthetic:split=test") == 1
    assert float(true.sum(dim=0).float().mean()) > 3


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["beach"], "a scene"),
        (["dog", "cat", "boat"], "a dog, a cat and a boat"),
        (["red", "white", "car", "at night"], "a red and white car at night"),
        (["on a beach", "by a lake", "in the fog"], "a scene on a beach and by a lake in the fog"),
    ],
)
def test_caption_text(names: list[str], text: str) -> None:
    assert caption_text(names) == text


def test_the_same_seed_gives_the_same_world_quickly() -> None:
    before = torch.get_rng_state()
    started = time.perf_counter()
    first = load_pairs("synthetic:seed=3")
    assert time.perf_counter() - started < 1
    second = load_pairs("synthetic:seed=3")
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.texts, second.texts)
    assert first.captions == second.captions
    assert not torch.equal(first.images, load_pairs("synthetic:seed=4").images)
    assert torch.get_rng_state().equal(before)


def test_splits_are_parts_of_the_whole_and_differ() -> None:
    whole = load_pairs("synthetic:images=60,held_out=20")
    parts = [load_pairs("synthetic:images=60,held_out=20", split=split) for split in ("train", "dev", "test")]
    assert [len(part.image_ids) for part in parts] == [60, 20, 20]
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert whole.caption_ids == tuple(name for part in parts for name in part.caption_ids)
    assert not torch.equal(parts[1].images, parts[2].images)
    assert {part.provenance for part in parts} == {whole.provenance}


def test_splits_share_the_maps() -> None:
    """Without noise, images with the same attributes have the same features, whatever their split."""
    train, test = (synthetic_world(SyntheticOptions(images=2000, noise=0), split=split) for split in ("train", "test"))
    same = (train.present.float() @ test.present.float().T) == train.present.float().sum(1, keepdim=True)
    same &= train.present.sum(1, keepdim=True) == test.present.sum(1)
    left, right = same.nonzero(as_tuple=True)
    assert len(left) > 10
    assert torch.allclose(train.pairs.images[left], test.pairs.images[right], atol=1e-5)


def test_the_features_hold_the_attributes() -> None:
    """A linear map learnt on train reads most of them off test."""
    train, test = synthetic_world(split="train"), synthetic_world(split="test")
    weights = torch.linalg.lstsq(train.pairs.images, train.present.float() - 0.25).solution
    right = ((test.pairs.images @ weights + 0.25 > 0.5) == test.present).float().mean()
    assert float(right) > 0.9


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("synthetic:images=many", "many"),
        ("synthetic:noise=x", "'x'"),
        ("synthetic:images=0", "images is 0"),
        ("synthetic:held_out=0", "held_out is 0"),
        ("synthetic:per_image=-1", "per_image is -1"),
        ("synthetic:noise=-1", "noise is -1"),
        ("synthetic:noise=nan", "noise is nan"),
    ],
)
def test_options_that_make_no_world(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_pairs(spec)
    assert caught.value.exit_code == 2


def test_a_split_that_does_not_exist() -> None:
    with pytest.raises(DataError, match=r"no split 'val'; it has train \(800 images\), dev \(200 images\)") as caught:
        load_pairs("synthetic:", split="val")
    assert caught.value.exit_code == 4


def test_grades_of_something_else() -> None:
    with pytest.raises(UsageError, match="no known truth"):
        synthetic_grades("features:x")
