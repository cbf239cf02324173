"""The generated picture world as a data set: options, seeds, splits, captions."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.scenes import (
    SPLITS,
    SceneOptions,
    SceneWorld,
    load_scenes,
    pair_kinds,
    scene_grades,
    scene_world,
)
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, MOST, SHAPES, SIZES
from vacsr.data.spec import parse_spec
from vacsr.errors import DataError, UsageError

TINY = {"images": 6, "held_out": 2, "size": 16}


@pytest.fixture(scope="module")
def unseen() -> SceneWorld:
    """500 scenes, small on the screen: the text and the truth do not depend on the size."""
    return scene_world(SceneOptions(images=1, held_out=500, size=16), split="test")


def same(one: SceneWorld, other: SceneWorld) -> bool:
    """To the byte."""
    alike = one.pairs.digest() == other.pairs.digest()
    return alike and one.scenes == other.scenes and one.statements == other.statements


@settings(max_examples=12, deadline=None)
@given(
    images=st.integers(1, 6),
    held_out=st.none() | st.integers(1, 4),
    per_image=st.integers(1, 7),
    size=st.integers(16, 24),
    seed=st.integers(0, 2**40),
    split=st.sampled_from([*SPLITS, None, "all"]),
)
def test_any_options_give_a_whole_world(
    images: int, held_out: int | None, per_image: int, size: int, seed: int, split: str | None
) -> None:
    options = SceneOptions(images=images, held_out=held_out, per_image=per_image, size=size, seed=seed)
    world = scene_world(options, split=split)
    sizes = options.sizes()
    wanted = [f"{part}-{row:04d}" for part in SPLITS if split in (part, None, "all") for row in range(sizes[part])]
    assert list(world.pairs.image_ids) == wanted
    assert list(world.pairs.caption_ids) == [f"{image}#{index}" for image in wanted for index in range(per_image)]
    assert world.pairs.caption_image.tolist() == [row for row in range(len(wanted)) for _ in range(per_image)]
    assert [statement.text for statement in world.statements] == list(world.pairs.captions)
    assert len(world.scenes) == len(wanted)
    assert world.pairs.photos.open(0).size == (size, size)
    own = scene_grades(world)[world.pairs.caption_image, torch.arange(len(world.pairs))]
    assert torch.equal(own, torch.ones(len(own)))


def test_the_seed_decides_everything() -> None:
    one = scene_world(SceneOptions(**TINY, seed=3))
    assert same(one, scene_world(SceneOptions(**TINY, seed=3)))
    other = scene_world(SceneOptions(**TINY, seed=4))
    assert not set(one.scenes) & set(other.scenes)
    assert one.pairs.digest() != other.pairs.digest()


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    world = scene_world(SceneOptions(**TINY))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(1)
    assert same(world, scene_world(SceneOptions(**TINY)))


def test_splits_have_scenes_of_their_own() -> None:
    worlds = {split: scene_world(SceneOptions(images=30, held_out=30, size=16), split=split) for split in SPLITS}
    drawn = [scene for world in worlds.values() for scene in world.scenes]
    assert len(set(drawn)) == len(drawn) == 90
    together = scene_world(SceneOptions(images=30, held_out=30, size=16))
    assert list(together.scenes) == drawn
    assert together.pairs.split == "all"


def test_a_larger_world_begins_with_the_smaller_one() -> None:
    small = scene_world(SceneOptions(images=3, per_image=2, size=16), split="train")
    large = scene_world(SceneOptions(images=5, per_image=4, size=24), split="train")
    assert large.scenes[:3] == small.scenes
    kept = [large.statements[4 * row + index] for row in range(3) for index in range(2)]
    assert kept == list(small.statements)


def test_every_word_of_the_vocabulary_occurs(unseen: SceneWorld) -> None:
    things = [thing for scene in unseen.scenes for thing in scene.things]
    assert {scene.background for scene in unseen.scenes} == set(BACKGROUNDS)
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {thing.size for thing in things} == set(SIZES)
    assert {len(scene.things) for scene in unseen.scenes} == set(range(1, MOST + 1))


def test_captions_of_one_image_say_different_things(unseen: SceneWorld) -> None:
    meanings = [statement.facts for statement in unseen.statements]
    distinct = [len(set(meanings[start : start + 5])) for start in range(0, len(meanings), 5)]
    assert distinct == [5] * len(unseen.scenes)
    assert all(len(set(facts)) == len(facts) for facts in meanings)


def test_labels_miss_much_but_not_everything(unseen: SceneWorld) -> None:
    grades = scene_grades(unseen)
    kinds = pair_kinds(grades, unseen.pairs.caption_image)
    true_of = (kinds.positives | kinds.false_negatives).sum(dim=0)
    assert 3 < float(true_of.float().mean()) < 12
    assert 2 <= int(true_of.median()) <= 5
    assert 0.2 < float((true_of == 1).float().mean()) < 0.5
    assert 0.02 < float((true_of > 50).float().mean()) < 0.1
    share = int(kinds.false_negatives.sum()) / int(true_of.sum())
    assert 0.8 < share < 0.97
    assert 0.03 < float(kinds.hard.float().mean()) < 0.15
    assert 0.5 < float(kinds.easy.float().mean()) < 0.9
    assert len(grades.unique()) > 20


def test_captions_vary_in_detail_and_wording(unseen: SceneWorld) -> None:
    lengths = {len(text.split()) for text in unseen.pairs.captions}
    assert min(lengths) <= 2
    assert max(lengths) >= 14
    facts = {len(statement.facts) for statement in unseen.statements}
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= facts
    wordings: dict[Any, set[str]] = {}
    for statement in unseen.statements:
        wordings.setdefault(statement.facts, set()).add(statement.text)
    assert max(len(texts) for texts in wordings.values()) >= 5
    meanings: dict[str, set[Any]] = {}
    for statement in unseen.statements:
        meanings.setdefault(statement.text, set()).add(frozenset(statement.facts))
    assert all(len(facts) == 1 for facts in meanings.values()), "one text, two meanings"


ONE_WORDS = r"(?:a|an|a single|just one|only one)"
PLURALS = r"(?:balls|gifts|presents|stars|hearts|moons|houses|cottages|trees|boats|mushrooms|toadstools|things|objects)"
SINGULARS = r"(?:ball|gift|present|star|heart|moon|house|cottage|tree|boat|mushroom|toadstool|thing|object)"
ADJECTIVES = (
    r"(?:(?:small|little|large|big|red|orange|yellow|green|blue|purple|violet|pink|beach|crescent|fir|sailing) )*"
)


@pytest.mark.parametrize(
    "wrong",
    [
        r"\ba [aeiou]",
        r"\ban [^aeiou]",
        r"  |^ | $|[A-Z]|\.$| ,|,[^ ]|,$",
        r"[^a-z ,-]",
        r"\bfishs|\bfishes|\bboxs",
        rf"\b{ONE_WORDS} {ADJECTIVES}{PLURALS}\b",
        rf"\b(?:two|three|four|five|six|more) {ADJECTIVES}{SINGULARS}\b",
        r"there is (?:at least|two|three|four|five|six)\b",
        r"there are (?:a|an|just|only)\b",
        r"\b(\w+) \1\b",
        r"\band [^,]* and [^,]* and\b",
        r"a scene with [^,]* with ",
        r"\b(?:house|houses)\b.*\bcottages?\b|\bcottages?\b.*\bhouses?\b",
        r"\b(?:none|one things|zero|no)\b",
    ],
)
def test_grammar(unseen: SceneWorld, wrong: str) -> None:
    found = [text for text in unseen.pairs.captions if re.search(wrong, text)]
    assert not found, found[:5]


def test_the_grammar_checks_can_fail() -> None:
    assert re.search(rf"\b{ONE_WORDS} {ADJECTIVES}{PLURALS}\b", "just one small red fir trees")
    assert re.search(rf"\b(?:two|three|four|five|six|more) {ADJECTIVES}{SINGULARS}\b", "two big sailing boat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images is 0"),
        ({"held_out": 0}, "held_out is 0"),
        ({"per_image": -1}, "per_image is -1"),
        ({"size": 8}, "size is 8, expected 16 to 1024"),
        ({"size": 5000}, "size is 5000"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SceneOptions(**options)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises((DataError, UsageError), match="val"):
        scene_world(SceneOptions(**TINY), split="val")


def test_a_spec_names_a_world() -> None:
    loaded = load_scenes(parse_spec("scenes:images=4,held_out=3,per_image=2,size=16,seed=7,split=dev"))
    options = SceneOptions(images=4, held_out=3, per_image=2, size=16, seed=7)
    assert same(loaded, scene_world(options, split="dev"))


def test_a_spec_with_words_for_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"scenes:images=many.*write whole numbers"):
        load_scenes(parse_spec("scenes:images=many"))
