"""Exact relevance against a second reading of what facts mean, written from the fields alone."""

import random
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.scenes import SceneOptions, scene_grades, scene_world
from vacsr.data.scenes.captions import Claim, Mention, facts_of
from vacsr.data.scenes.facts import (
    AtLeast,
    Exactly,
    Fact,
    IsBackground,
    Kind,
    Related,
    SceneTable,
    Statement,
    share_true,
)
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene, Thing


def words_of(thing: Thing) -> set[str]:
    """All that can be said of one thing, as a set of words."""
    distances = {"left": thing.x, "right": 1 - thing.x, "top": thing.y, "bottom": 1 - thing.y}
    return {thing.shape, thing.colour, thing.size} | {side for side, away in distances.items() if away < 0.36}


def wanted(kind: Kind) -> set[str]:
    return {word for word in (kind.shape, kind.colour, kind.size, kind.side) if word}


def slow_holds(fact: Fact, scene: Scene) -> bool:
    """By sets of words and all ordered pairs of things."""
    said = [words_of(thing) for thing in scene.things]
    if isinstance(fact, IsBackground):
        return fact.name == scene.background
    if isinstance(fact, Related):
        for one, other in permutations(range(len(said)), 2):
            if wanted(fact.first) <= said[one] and wanted(fact.second) <= said[other]:
                dx = scene.things[other].x - scene.things[one].x
                dy = scene.things[other].y - scene.things[one].y
                direction = "left of" if dx > abs(dy) and dx > 0.12 else "above" if dy > abs(dx) and dy > 0.12 else ""
                if direction == fact.way:
                    return True
        return False
    fitting = [words for words in said if not wanted(fact.kind) - words]
    return len(fitting) == fact.count if isinstance(fact, Exactly) else not len(fitting) < fact.count


def test_grades_agree_with_the_slow_reading_on_random_pairs() -> None:
    world = scene_world(SceneOptions(images=250, size=16), split="train")
    grades = scene_grades(world)
    assert (grades.shape, grades.dtype) == ((250, 1250), torch.float32)
    assert torch.equal(grades, share_true(world.scenes, world.statements, block=60))
    rng = random.Random(0)
    partly = (grades > 0) & (grades < 1)
    pairs = [(rng.randrange(250), rng.randrange(1250)) for _ in range(1500)]
    pairs += rng.sample(partly.nonzero().tolist(), 1500) + rng.sample((grades == 1).nonzero().tolist(), 1500)
    for image, caption in pairs:
        scene, facts = world.scenes[image], world.statements[caption].facts
        true = [slow_holds(fact, scene) for fact in facts]
        assert float(grades[image, caption]) == pytest.approx(sum(true) / len(facts), abs=1e-6)


def some(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=1, max_size=4)


def option(words: tuple[str, ...]) -> st.SearchStrategy[str | None]:
    return st.none() | st.sampled_from(words[:2])


positions = st.sampled_from([0.1, 0.2, 0.3, 0.35, 0.42, 0.5, 0.55, 0.7, 0.9]) | st.floats(0, 1)
things = st.builds(
    Thing, st.sampled_from(SHAPES[:2]), st.sampled_from(COLOURS[:2]), st.sampled_from(SIZES[:2]), positions, positions
)
scenes = st.builds(Scene, st.sampled_from(BACKGROUNDS[:2]), st.just(0), st.lists(things, max_size=5).map(tuple))
sides = st.none() | st.sampled_from(["left", "right", "top", "bottom"])
kinds = st.builds(Kind, option(SHAPES), option(COLOURS), option(SIZES), sides)
facts = st.one_of(
    st.builds(IsBackground, st.sampled_from(BACKGROUNDS[:2])),
    st.builds(AtLeast, kinds, st.integers(1, 3)),
    st.builds(Exactly, kinds, st.integers(0, 3)),
    st.builds(Related, kinds, st.sampled_from(["left of", "above"]), kinds),
)


@settings(max_examples=150, deadline=None)
@given(some(scenes), some(some(facts)))
def test_any_facts_of_any_scenes_agree(drawn: list[Scene], said: list[list[Fact]]) -> None:
    grades = share_true(drawn, [Statement("", tuple(facts)) for facts in said])
    for row, scene in enumerate(drawn):
        for column, facts in enumerate(said):
            slow = [slow_holds(fact, scene) for fact in facts]
            assert slow == [bool(SceneTable([scene]).true(fact)) for fact in facts]
            assert float(grades[row, column]) == pytest.approx(sum(slow) / len(slow), abs=1e-6)


def scene(*things: Thing, background: str = "beach") -> Scene:
    return Scene(background, 0, things)


RED_STAR, BLUE_STAR = Thing("star", "red", "large", 0.2, 0.2), Thing("star", "blue", "large", 0.2, 0.2)
SMALL_RED_STAR = Thing("star", "red", "small", 0.5, 0.2)
BOAT_BELOW, BOAT_ABOVE = Thing("boat", "blue", "small", 0.25, 0.8), Thing("boat", "blue", "small", 0.25, 0.01)


@pytest.mark.parametrize(
    ("claim", "pictured", "grade"),
    [
        (Claim((Mention(Kind("star", "red")),), background="beach"), scene(BLUE_STAR), 2 / 3),
        (Claim((Mention(Kind("star", "red")),), background="beach"), scene(BOAT_BELOW), 1 / 3),
        (Claim((Mention(Kind("star", "red", "large")),)), scene(BLUE_STAR), 2 / 4),
        (Claim((Mention(Kind("star", "red", "large")),)), scene(BLUE_STAR, SMALL_RED_STAR), 3 / 4),
        (Claim((Mention(Kind("star"), number=2),)), scene(RED_STAR), 1 / 3),
        (Claim((Mention(Kind("star"), number=2),)), scene(RED_STAR, BLUE_STAR), 1),
        (Claim((Mention(Kind("star"), number=2),)), scene(RED_STAR, BLUE_STAR, SMALL_RED_STAR), 2 / 3),
        (Claim((Mention(Kind("star"), number=2, exact=False),)), scene(RED_STAR, BLUE_STAR, SMALL_RED_STAR), 1),
        (Claim((Mention(Kind("star", "red")), Mention(Kind("boat"))), "above"), scene(RED_STAR, BOAT_BELOW), 1),
        (Claim((Mention(Kind("star", "red")), Mention(Kind("boat"))), "above"), scene(RED_STAR, BOAT_ABOVE), 3 / 5),
        (Claim((Mention(Kind("star", "red")), Mention(Kind("boat"))), "above"), scene(BLUE_STAR, BOAT_BELOW), 3 / 5),
        (Claim(background="beach"), scene(), 1),
        (Claim((Mention(Kind(colour="red"), number=1),)), scene(RED_STAR, SMALL_RED_STAR), 1 / 2),
    ],
)
def test_partly_true_claims_earn_what_a_person_would_give(claim: Claim, pictured: Scene, grade: float) -> None:
    assert float(share_true([pictured], [Statement("", facts_of(claim))])) == pytest.approx(grade)
