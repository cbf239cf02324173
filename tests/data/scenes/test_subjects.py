"""Scenes with a subject: one thing stands out, and every caption is true of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data.scenes import SceneOptions, SceneWorld, holds, scene_world
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, RADIUS, SHAPES
from vacsr.data.scenes.subjects import draw_subject_scene, subject_of
from vacsr.errors import UsageError


@pytest.fixture(scope="module")
def world() -> SceneWorld:
    return scene_world(SceneOptions(images=300, held_out=1, size=16, subject=1), split="train")


@given(
    seed=st.integers(0, 2**40), shape=st.none() | st.sampled_from(SHAPES), colour=st.none() | st.sampled_from(COLOURS)
)
def test_the_subject_is_what_was_asked_for_and_stands_alone(seed: int, shape: str | None, colour: str | None) -> None:
    scene = draw_subject_scene(random.Random(seed), shape=shape, colour=colour)
    subject = subject_of(scene)
    assert subject.shape == (shape or subject.shape)
    assert subject.colour == (colour or subject.colour)
    for other in scene.things:
        assert other is subject or (other.shape != subject.shape and RADIUS[other.size] < RADIUS[subject.size])


def test_a_caption_is_true_of_its_scene_and_names_the_subject(world: SceneWorld) -> None:
    for row, statement in zip(world.pairs.caption_image.tolist(), world.statements, strict=True):
        assert all(holds(fact, world.scenes[row]) for fact in statement.facts)
        subject = subject_of(world.scenes[row])
        assert all(kind.shape == subject.shape for kind in (fact.kind for fact in statement.facts))  # type: ignore[union-attr]


def test_every_pair_of_attributes_and_every_background_occurs(world: SceneWorld) -> None:
    subjects = [subject_of(scene) for scene in world.scenes]
    assert len({(each.colour, each.shape) for each in subjects}) > 60  # of 70, in 300 scenes
    assert {scene.background for scene in world.scenes} == set(BACKGROUNDS)


def test_ordinary_scenes_are_another_world_and_anything_else_is_refused(world: SceneWorld) -> None:
    ordinary = scene_world(SceneOptions(images=300, held_out=1, size=16), split="train")
    assert ordinary.scenes != world.scenes
    with pytest.raises(UsageError, match="subject is 2, expected 0 or 1"):
        SceneOptions(subject=2)
