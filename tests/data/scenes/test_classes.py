"""The picture world as labelled photos: which classes, what they show, and in which words they are asked for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.backbones.tokenizers import WordTokenizer, split_words
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos, check_source
from vacsr.data.fewshot.specs import parse_class_spec
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes import SceneOptions, render_scene, scene_world
from vacsr.data.scenes.class_list import FEWEST, MOST_CLASSES, scene_class_list
from vacsr.data.scenes.classes import TEMPLATE, ClassOptions, class_source, photo_scene, scene_classes
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, RADIUS, SHAPES
from vacsr.data.scenes.shifts import DOMAINS
from vacsr.errors import UsageError

SMALL = ClassOptions(classes=6, train=3, test=2, size=16)


def load(spec: str) -> FewshotSource:
    return scene_classes(parse_class_spec(spec))


def pixels(photos: LabelledPhotos) -> npt.NDArray[np.uint8]:
    assert isinstance(photos.photos, ArrayPhotos)
    return photos.photos.pixels


@pytest.fixture(scope="module")
def small() -> FewshotSource:
    return class_source(SMALL)


@given(count=st.integers(FEWEST, MOST_CLASSES), seed=st.integers(0, 2**40))
def test_new_classes_are_new_pairs_of_known_attributes(count: int, seed: int) -> None:
    classes = scene_class_list(count, seed=seed)
    half = math.ceil(count / 2)
    base, new = classes[:half], classes[half:]
    assert len(set(classes)) == count
    assert {each.colour for each in new} <= {each.colour for each in base}
    assert {each.shape for each in new} <= {each.shape for each in base}
    assert {each.colour for each in classes} <= set(COLOURS)
    assert {each.shape for each in classes} <= set(SHAPES)


@given(seed=st.integers(0, 2**40), fewer=st.integers(20, MOST_CLASSES), more=st.integers(20, MOST_CLASSES))
def test_from_twenty_on_fewer_classes_are_the_first_of_more(seed: int, fewer: int, more: int) -> None:
    fewer, more = sorted((fewer, more))
    assert scene_class_list(fewer, seed=seed) == scene_class_list(more, seed=seed)[:fewer]


def test_attributes_are_spread_evenly_over_the_usual_24() -> None:
    classes = scene_class_list(24, seed=0)
    for part in (classes[:12], classes[12:]):
        assert set(Counter(each.colour for each in part).values()) <= {1, 2}
        assert set(Counter(each.shape for each in part).values()) <= {1, 2}
    assert scene_class_list(24, seed=1) != classes


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    label=st.integers(0, 23),
    place=st.integers(0, 99),
    split=st.sampled_from(["train", "test"]),
)
def test_a_photo_shows_one_thing_of_its_class_and_no_other_is_as_large(
    seed: int, label: int, place: int, split: str
) -> None:
    options = ClassOptions(seed=seed)
    scene = photo_scene(options, split, label=label, place=place)
    colour, shape = options.class_list()[label].name.split()
    first, *others = sorted(scene.things, key=lambda thing: -RADIUS[thing.size])
    assert (first.colour, first.shape) == (colour, shape)
    assert all(RADIUS[other.size] < RADIUS[first.size] and other.shape != shape for other in others)
    assert scene == photo_scene(options, split, label=label, place=place)


def test_scenes_vary_in_all_but_the_class() -> None:
    scenes = [photo_scene(SMALL, "train", label=0, place=place) for place in range(60)]
    assert {scene.background for scene in scenes} == set(BACKGROUNDS)
    assert len({len(scene.things) for scene in scenes}) > 2
    assert len({(scene.things[0].x, scene.things[0].y) for scene in scenes}) > 50
    assert photo_scene(SMALL, "train", label=0, place=0) != photo_scene(SMALL, "test", label=0, place=0)
    assert len(set(scenes)) == 60


def test_the_photos_are_those_scenes_in_the_order_of_places(small: FewshotSource) -> None:
    check_source(small)
    assert small.val is None
    for photos, split, number in ((small.train, "train", 3), (small.test, "test", 2)):
        assert photos.labels.tolist() == [0, 1, 2, 3, 4, 5] * number
        for row, label in enumerate(photos.labels.tolist()):
            painted = render_scene(photo_scene(SMALL, split, label=label, place=row // 6), 16)
            assert (pixels(photos)[row] == painted).all()
            assert photos.photos.name(row) == f"{split}/{photos.classes[label]}/{row // 6:03d}"


def test_the_same_options_give_the_same_bytes_and_another_seed_does_not(small: FewshotSource) -> None:
    again, other = class_source(SMALL), class_source(replace(SMALL, seed=1))
    assert (again.train.digest(), again.test.digest()) == (small.train.digest(), small.test.digest())
    assert other.train.digest() != small.train.digest()


def test_a_smaller_world_is_the_start_of_a_larger(small: FewshotSource) -> None:
    larger = class_source(replace(SMALL, train=5, test=4))
    assert (pixels(larger.train)[: len(small.train)] == pixels(small.train)).all()
    assert (pixels(larger.test)[: len(small.test)] == pixels(small.test)).all()


def test_a_photo_does_not_depend_on_how_many_classes_there_are() -> None:
    few, many = (class_source(replace(SMALL, classes=count, train=1, test=1)) for count in (20, 30))
    assert (pixels(few.train) == pixels(many.train)[:20]).all()


@pytest.mark.parametrize("domain", DOMAINS[1:])
def test_a_domain_has_the_same_labels_and_other_pixels(small: FewshotSource, domain: str) -> None:
    options = replace(SMALL, domain=domain)
    there = class_source(options)
    assert there.name == f"scenes-{domain}"
    assert there.template == small.template
    for own, other in ((small.train, there.train), (small.test, there.test)):
        assert own.classes == other.classes
        assert own.ids() == other.ids()
        assert own.labels.equal(other.labels)
        assert (pixels(own) != pixels(other)).any(axis=(1, 2, 3)).all()
    assert photo_scene(options, "test", label=3, place=1) == photo_scene(SMALL, "test", label=3, place=1)


@pytest.mark.parametrize("subject", [0, 1])
def test_every_word_of_every_prompt_is_in_the_captions_of_scenes(subject: int) -> None:
    captions = scene_world(SceneOptions(images=150, held_out=1, size=16, subject=subject), split="train").pairs.captions
    words = WordTokenizer(context=32)
    words.fit(captions, limit=4096)
    prompts = [TEMPLATE.format(each.name) for each in scene_class_list(MOST_CLASSES, seed=0)]
    assert len(set(prompts)) == MOST_CLASSES
    assert {word for prompt in prompts for word in split_words(prompt)} <= set(words.words)
    assert all(WordTokenizer.UNKNOWN not in ids for ids in words.encode(prompts))


def test_a_spec_names_a_world() -> None:
    source = load("scenes:classes=4,train=2,test=1,size=16,seed=3,domain=blur")
    same = class_source(ClassOptions(classes=4, train=2, test=1, size=16, seed=3, domain="blur"))
    assert source.train.digest() == same.train.digest()
    assert [len(source.train), len(source.test), len(source.test.classes)] == [8, 4, 4]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("scenes:classes=3", "classes is 3, expected 4 to 70"),
        ("scenes:classes=71", "classes is 71, expected 4 to 70"),
        ("scenes:classes=many", "whole numbers"),
        ("scenes:train=0", "train is 0, expected at least 1"),
        ("scenes:test=-1", "test is -1, expected at least 1"),
        ("scenes:size=8", "size is 8, expected 16 to 1024"),
        ("scenes:domain=sketch", "no domain 'sketch' — write domain= with one of: plain"),
        ("scenes:clases=10", "no option 'clases' .did you mean 'classes'?"),
        ("scenes:images=10", "no option 'images'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_painted(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(spec)
