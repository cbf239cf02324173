"""The generated picture world as a data set: options, seeds, splits, captions, subjects."""

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.formats import parse_spec
from vacsr.data.scenes import SceneOptions, load_scenes, scene_grades, scene_world
from vacsr.data.synthetic import SPLITS
from vacsr.errors import NoSuchSplit, UsageError


@pytest.mark.parametrize(("subject", "expected"), [(0, "a32e225cd162c4df"), (1, "074d890c7fce6e26")])
def test_worlds_stay_what_they_were(subject: int, expected: str) -> None:
    """Published results are of these scenes, captions and facts, which depend on nothing but Python's generator."""
    world = scene_world(SceneOptions(images=400, held_out=1, size=16, seed=3, subject=subject), split="train")
    assert hashlib.sha256(repr((world.scenes, world.statements)).encode()).hexdigest()[:16] == expected


OPTIONS = st.builds(
    SceneOptions,
    images=st.integers(1, 6),
    held_out=st.none() | st.integers(1, 4),
    per_image=st.integers(1, 7),
    size=st.integers(16, 24),
    seed=st.integers(0, 2**40),
    subject=st.integers(0, 1),
)


@settings(max_examples=12, deadline=None)
@given(OPTIONS, st.sampled_from([*SPLITS, None, "all"]))
def test_any_options_give_a_whole_world(options: SceneOptions, split: str | None) -> None:
    world = scene_world(options, split=split)
    sizes, per_image, size = options.sizes(), options.per_image, options.size
    wanted = [f"{part}-{row:04d}" for part in SPLITS if split in (part, None, "all") for row in range(sizes[part])]
    assert list(world.pairs.image_ids) == wanted
    assert list(world.pairs.caption_ids) == [f"{image}#{index}" for image in wanted for index in range(per_image)]
    assert world.pairs.caption_image.tolist() == [row for row in range(len(wanted)) for _ in range(per_image)]
    assert [statement.text for statement in world.statements] == list(world.pairs.captions)
    assert len(world.scenes) == len(wanted)
    assert world.pairs.photos.open(0).size == (size, size)
    labelled = scene_grades(world)[world.pairs.caption_image, torch.arange(len(world.pairs))]
    assert torch.equal(labelled, torch.ones(len(labelled)))


def test_the_seed_decides_everything() -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    one, again, other = (scene_world(SceneOptions(images=6, held_out=2, size=16, seed=seed)) for seed in (3, 3, 4))
    assert (one.pairs.digest(), one.scenes, one.statements) == (again.pairs.digest(), again.scenes, again.statements)
    assert not set(one.scenes) & set(other.scenes)
    assert states() == before


def test_splits_have_scenes_of_their_own() -> None:
    options = SceneOptions(images=30, held_out=30, size=16)
    drawn = [scene for split in SPLITS for scene in scene_world(options, split=split).scenes]
    assert len(set(drawn)) == len(drawn) == 90
    together = scene_world(options)
    assert (list(together.scenes), together.pairs.split) == (drawn, "all")


def test_a_larger_world_begins_with_the_smaller_one() -> None:
    small = scene_world(SceneOptions(images=3, per_image=2, size=16), split="train")
    large = scene_world(SceneOptions(images=5, per_image=4, size=24), split="train")
    assert large.scenes[:3] == small.scenes
    assert [large.statements[4 * row + index] for row in range(3) for index in range(2)] == list(small.statements)


def test_a_spec_names_a_world() -> None:
    loaded = load_scenes(parse_spec("scenes:images=4,held_out=3,per_image=2,size=16,seed=7,split=dev"))
    world = scene_world(SceneOptions(images=4, held_out=3, per_image=2, size=16, seed=7), split="dev")
    assert (loaded.pairs.digest(), loaded.statements) == (world.pairs.digest(), world.statements)
    with pytest.raises(NoSuchSplit, match=r"scenes: has no split 'val'"):
        load_scenes(parse_spec("scenes:split=val"))


@pytest.mark.parametrize("option", ["images=0", "images=many", "held_out=0", "per_image=-1", "size=15", "subject=2"])
def test_impossible_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"scenes:{option}: {option.partition('=')[0]}: "):
        load_scenes(parse_spec(f"scenes:{option}"))
