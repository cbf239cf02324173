"""The picture world as labelled photos: which classes, what they show, and in which words they are asked for."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.backbones.tokenizers import WordTokenizer, split_words
from vacsr.data.fewshot import FewshotSource, LabelledPhotos, load_classes
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes import SceneOptions, render_scene, scene_world
from vacsr.data.scenes.classes import TEMPLATE, ClassOptions, class_source, photo_scene, scene_class_list
from vacsr.data.scenes.objects import COLOURS, RADIUS, SHAPES
from vacsr.errors import UsageError

SMALL = ClassOptions(classes=6, train=3, test=2, size=16)


def pixels(photos: LabelledPhotos) -> npt.NDArray[np.uint8]:
    assert isinstance(photos.photos, ArrayPhotos)
    return photos.photos.pixels


@pytest.fixture(scope="module")
def small() -> FewshotSource:
    return class_source(SMALL)


@given(count=st.integers(4, 70), seed=st.integers(0, 2**40))
def test_new_classes_are_new_pairs_of_known_attributes(count: int, seed: int) -> None:
    classes = scene_class_list(count, seed=seed)
    base, new = classes[: math.ceil(count / 2)], classes[math.ceil(count / 2) :]
    assert len(set(classes)) == count
    for part, known in ((0, COLOURS), (1, SHAPES)):
        assert {name.split()[part] for name in new} <= {name.split()[part] for name in base} <= set(known)
    if count >= 20:
        assert classes == scene_class_list(70, seed=seed)[:count]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 23), st.integers(0, 99), st.sampled_from(["train", "test"]))
def test_the_largest_thing_of_a_photo_is_its_class(seed: int, label: int, number: int, split: str) -> None:
    name = scene_class_list(24, seed=seed)[label]
    scene = photo_scene(seed, split, class_name=name, number=number)
    first, *others = sorted(scene.things, key=lambda thing: -RADIUS[thing.size])
    assert f"{first.colour} {first.shape}" == name
    assert all(RADIUS[other.size] < RADIUS[first.size] and other.shape != first.shape for other in others)


def test_the_photos_are_those_scenes_in_the_order_of_numbers(small: FewshotSource) -> None:
    assert small.val is None
    for photos, split, count in ((small.train, "train", 3), (small.test, "test", 2)):
        assert photos.labels.tolist() == [0, 1, 2, 3, 4, 5] * count
        for row, label in enumerate(photos.labels.tolist()):
            scene = photo_scene(0, split, class_name=photos.classes[label], number=row // 6)
            assert (pixels(photos)[row] == render_scene(scene, 16)).all()
            assert photos.photos.name(row) == f"{split}/{photos.classes[label]}/{row // 6:03d}"


def test_a_smaller_world_is_the_start_of_a_larger(small: FewshotSource) -> None:
    larger = class_source(SMALL.model_copy(update={"train": 5, "test": 4}))
    assert (pixels(larger.train)[: len(small.train)] == pixels(small.train)).all()
    assert (pixels(larger.test)[: len(small.test)] == pixels(small.test)).all()
    assert class_source(SMALL.model_copy(update={"seed": 1})).train.digest() != small.train.digest()


@pytest.mark.parametrize("domain", ["palette", "outline", "texture", "blur"])
def test_a_domain_has_the_same_labels_and_other_pixels(small: FewshotSource, domain: str) -> None:
    there = load_classes(f"scenes:classes=6,train=3,test=2,size=16,domain={domain}")
    assert (there.name, there.template) == (f"scenes-{domain}", small.template)
    for plain, other in ((small.train, there.train), (small.test, there.test)):
        assert (plain.classes, plain.ids()) == (other.classes, other.ids())
        assert plain.labels.equal(other.labels)
        assert (pixels(plain) != pixels(other)).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("subject", [0, 1])
def test_every_word_of_every_prompt_is_in_the_captions_of_scenes(subject: int) -> None:
    captions = scene_world(SceneOptions(images=150, held_out=1, size=16, subject=subject), split="train").pairs.captions
    words = WordTokenizer(context=32)
    words.fit(captions, limit=4096)
    prompts = [TEMPLATE.format(name) for name in scene_class_list(70, seed=0)]
    assert {word for prompt in prompts for word in split_words(prompt)} <= set(words.words)


@pytest.mark.parametrize("option", ["classes=3", "classes=71", "train=0", "test=-1", "size=8", "domain=sketch"])
def test_bad_options_are_refused_before_anything_is_painted(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option.partition('=')[0]}: "):
        load_classes(f"scenes:{option}")
