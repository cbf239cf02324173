"""Pictures of scenes: the same at every size, with everything in them to be seen."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from vacsr.data.scenes import Scene, SceneRenderer, Thing, render_scene
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, SHAPES, SIZES, VARIANTS, draw_scene
from vacsr.data.scenes.sprites import PALETTE, draw_sprite
from vacsr.errors import UsageError

SCENES = [draw_scene(random.Random(seed)) for seed in range(60)]
SMALL = SceneRenderer(64)


def disc(thing: Thing, size: int, *, share: float = 1.0) -> npt.NDArray[np.bool_]:
    """The pixels around a thing's centre. [size, size]"""
    at = (np.arange(size) + 0.5) / size
    return np.hypot(at[None, :] - thing.x, at[:, None] - thing.y) < share * thing.radius


def change(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The largest difference of a channel. [H, W]"""
    return np.abs(one.astype(np.int64) - other).max(axis=2)


def test_a_picture_is_uint8_rgb_of_the_asked_size() -> None:
    for size in (16, 33, 64, 192):
        picture = render_scene(SCENES[0], size)
        assert picture.shape == (size, size, 3)
        assert picture.dtype == np.uint8


def test_a_renderer_that_has_painted_before_paints_the_same() -> None:
    for scene in SCENES[:8]:
        assert np.array_equal(SMALL.render(scene), render_scene(scene, 64))


def test_two_sizes_show_the_same_picture() -> None:
    large = SceneRenderer(192)
    for scene in SCENES[:15]:
        shrunk = large.render(scene).reshape(64, 3, 64, 3, 3).mean(axis=(1, 3))
        difference = np.abs(shrunk - SMALL.render(scene))
        assert difference.mean() < 2.5
        assert np.quantile(difference, 0.99) < 40  # edges, which fall on different pixels


def test_everything_can_be_seen() -> None:
    for scene in SCENES:
        picture, empty = SMALL.render(scene), SMALL.render(replace(scene, things=()))
        changed = change(picture, empty)
        for thing in scene.things:
            inside = disc(thing, 64)
            assert (changed[inside] > 25).mean() > 0.45, (scene.background, thing)
        nowhere = ~np.any([disc(thing, 64, share=1.8) for thing in scene.things], axis=0)
        assert changed[nowhere].max(initial=0) <= 3, "nothing is painted where no thing is"


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_every_thing_stands_out_and_has_its_colour(background: str) -> None:
    empty = render_scene(Scene(background, 0, ()), 64)
    for shape, colour, size in itertools.product(SHAPES, COLOURS, SIZES):
        thing = Thing(shape, colour, size, 0.5, 0.5)
        picture = SMALL.render(Scene(background, 0, (thing,)))
        inside = disc(thing, 64)
        changed = change(picture, empty)
        assert (changed[inside] > 25).mean() > 0.35, thing
        painted = picture[inside & (changed > 25)].astype(np.float64)
        distance = {name: np.abs(painted - rgb).sum(axis=1) for name, rgb in PALETTE.items()}
        nearest = np.array(list(distance)).take(np.argmin(list(distance.values()), axis=0))
        body = np.min(list(distance.values()), axis=0) < 70
        names, counts = np.unique(nearest[body], return_counts=True)
        assert names[counts.argmax()] == colour, (thing, dict(zip(names, counts, strict=True)))


def test_shapes_colours_sizes_tilts_and_mirrors_differ() -> None:
    base = Thing("fish", "red", "medium", 0.5, 0.5)
    others = [replace(base, shape=shape) for shape in SHAPES if shape != "fish"]
    others += [replace(base, colour=colour) for colour in COLOURS if colour != "red"]
    others += [replace(base, size="small"), replace(base, size="large"), replace(base, tilt=11)]
    others += [replace(base, mirrored=True), replace(base, x=0.55), replace(base, y=0.55)]
    pictures = [SMALL.render(Scene("snow", 0, (thing,))) for thing in (base, *others)]
    for one, other in itertools.combinations(pictures, 2):
        assert (change(one, other) > 25).sum() >= 15


def test_a_mirrored_thing_is_the_mirror_image() -> None:
    plain = draw_sprite("fish", PALETTE["red"], radius=0.17, canvas=256)
    mirrored = draw_sprite("fish", PALETTE["red"], radius=0.17, canvas=256, mirrored=True)
    difference = np.abs(np.asarray(plain, dtype=np.int64)[:, ::-1] - np.asarray(mirrored))
    assert difference.mean() < 4
    assert np.abs(np.asarray(plain, dtype=np.int64) - np.asarray(mirrored)).mean() > 8


def test_backgrounds_and_their_variants_differ() -> None:
    empty = [SMALL.render(Scene(name, variant, ())) for name in BACKGROUNDS for variant in range(VARIANTS)]
    for one, other in itertools.combinations(empty, 2):
        assert (change(one, other) > 8).mean() > 0.03
    means = [np.mean(empty[start : start + VARIANTS], axis=(0, 1, 2)) for start in range(0, len(empty), VARIANTS)]
    for first, second in itertools.combinations(means, 2):
        assert np.abs(first - second).max() > 15, "a background can be told by its colours alone"


def test_things_keep_apart_and_stay_inside() -> None:
    for seed in range(400):
        scene = draw_scene(random.Random(seed))
        assert scene.things
        for thing in scene.things:
            reach = thing.radius
            assert reach <= thing.x <= 1 - reach
            assert reach <= thing.y <= 1 - reach
        for one, other in itertools.combinations(scene.things, 2):
            assert math.dist((one.x, one.y), (other.x, other.y)) >= one.radius + other.radius


def test_little_of_a_thing_is_covered_by_others() -> None:
    for scene in SCENES[:40]:
        together = SMALL.render(scene)
        for thing in scene.things:
            alone = SMALL.render(replace(scene, things=(thing,)))
            assert (change(together, alone)[disc(thing, 64)] > 60).mean() < 0.2


@pytest.mark.parametrize("size", [0, 15, 1025])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="write size=64"):
        render_scene(SCENES[0], size)
