"""Protocols: which shots are learned from, and which classes each test set is answered over.

Crops by the usual rule; batches that depend on seed, pass and shot only.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vacsr.data.fewshot import LabelledPhotos, load_classes, save_shots
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.config import FewshotDataConfig, FewshotTrainConfig
from vacsr.fewshot.data import (
    RANDAUGMENT,
    VIEW_DRAWS,
    FewshotSets,
    ShotLoader,
    augmented,
    crop_box,
    load_sets,
    randaugment,
    read_sentences,
)
from vacsr.fewshot.methods import ShotBatch

from .conftest import TRANSFORM, CountingPhotos, colours

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
shares = st.floats(0.001, 0.999)
many_draws = st.lists(shares, min_size=40, max_size=40)
CENTRAL = [0.5, 0.5, 0.5, 0.5]
SPEC = "scenes:classes=7,train=6,test=2,size=32"


def sets_of(**fields: Any) -> FewshotSets:
    return load_sets(FewshotDataConfig(**{"spec": SPEC, "shots": 3, **fields}))


def test_base_to_novel_tests_each_half_over_itself() -> None:
    sets, whole = sets_of(), load_classes(SPEC)
    names = whole.test.classes
    assert sets.classes.names == sets.train.classes == names[:4]
    assert torch.bincount(sets.train.labels).tolist() == [3] * 4
    assert torch.bincount(sets.val.labels).tolist() == [3] * 4
    base, new = sets.tests
    assert (base.split, base.classes.names, new.split, new.classes.names) == ("base", names[:4], "new", names[4:])
    assert sorted(base.photos.labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(new.photos.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert base.classes.template == whole.template
    for row in range(len(sets.train)):  # a shot is the photo of the class that its label says
        name = sets.train.photos.name(row)
        position = whole.train.ids().index(name)
        assert names[int(whole.train.labels[position])] == sets.train.classes[int(sets.train.labels[row])]


def test_all_trains_and_tests_every_class() -> None:
    sets = sets_of(protocol="all")
    assert (len(sets.classes.names), len(sets.train)) == (7, 21)
    assert [one.split for one in sets.tests] == ["test"]
    assert sets_of().shots.hash == sets.shots.hash != sets_of(seed=2).shots.hash, "drawn before the halves"
    with pytest.raises(UsageError, match=r"one \{\}"):
        sets_of(template="no place")


def test_targets_have_their_own_classes_and_sentence(tmp_path: Path) -> None:
    with (tmp_path / "other.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "split"])
        for number, name in enumerate(["cat", "dog", "cat", "dog"]):
            Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
            writer.writerow([f"{number}.png", name, "train" if number < 2 else "test"])
    targets = {"blur": f"{SPEC},domain=blur", "other": f"csv:{tmp_path / 'other.csv'}"}
    sets = sets_of(protocol="domain", targets=targets)
    assert [one.split for one in sets.tests] == ["source", "blur", "other"]
    source, blur, other = sets.tests
    assert source.classes == sets.classes
    assert blur.classes == sets.classes._replace(shifted=True)
    assert other.classes.shifted
    assert sorted(other.classes.names) == ["cat", "dog"]
    assert other.classes.template == "a photo of a {}."
    assert len(other.photos) == 2
    same = sets_of(protocol="domain", targets=targets, template="one {}.")
    assert {one.classes.template for one in same.tests} == {"one {}."}


def test_a_target_without_splits_is_tested_on_all_its_photos(tmp_path: Path) -> None:
    for name in ("plain/cat", "plain/dog", "split/train/cat", "split/train/dog", "split/test/cat", "split/test/dog"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(3 if "test" in name else 10):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    targets = {name: f"folder:{tmp_path / name}" for name in ("plain", "split")}
    sets = sets_of(protocol="domain", targets=targets)
    assert [len(one.photos) for one in sets.tests] == [14, 20, 6]
    assert torch.bincount(sets.tests[1].photos.labels).tolist() == [10, 10]
    own = sets_of(spec=targets["plain"], protocol="all")  # as the source it is shared out
    assert [len(one.photos) for one in own.tests] == [6]


def test_a_saved_draw_is_taken_up(tmp_path: Path) -> None:
    first = sets_of(seed=5)
    save_shots(tmp_path / "shots.json", first.shots, source=first.source)
    again = sets_of(shots_file=str(tmp_path / "shots.json"), shots=1, seed=1)
    assert again.shots.hash == first.shots.hash
    assert torch.equal(again.train.labels, first.train.labels)


def test_sentences_come_in_the_order_of_the_classes(tmp_path: Path) -> None:
    names = sets_of().classes.names
    path = tmp_path / "sentences.json"
    written = {name.upper().replace(" ", "_"): [f"about {name}", "and more"] for name in reversed(names)}
    path.write_text(json.dumps(written))
    sets = sets_of(sentences=str(path))
    assert sets.classes.sentences == tuple((f"about {name}", "and more") for name in names)
    assert all(one.classes.sentences == () for one in sets.tests)
    assert read_sentences(path, names[1:2]) == ((f"about {names[1]}", "and more"),)


@pytest.mark.parametrize("value", [[], {}, {"red circle": "one"}, {"red circle": []}, {"red circle": [3]}])
def test_sentences_that_are_none(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "sentences.json"
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"sentences\.json"):
        read_sentences(path, ["red circle"])


# ------------------------------------------------------------------------------------------------------------- crops


@PROPERTY
@given(st.integers(1, 400), st.integers(1, 400), many_draws, st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)))
def test_a_box_is_the_first_try_that_fits(
    width: int, height: int, draws: list[float], scale: tuple[float, float]
) -> None:
    box = crop_box(width, height, draws=draws, scale=scale)
    left, top, right, bottom = box
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    low, high = sorted(scale)
    fitting = []
    for number in range(10):
        area, aspect = draws[4 * number], draws[4 * number + 1]
        ratio = (3 / 4) ** (1 - aspect) * (4 / 3) ** aspect
        pixels = (low + (high - low) * area) * width * height
        wide, tall = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 1 <= wide <= width and 1 <= tall <= height:
            fitting.append((wide, tall, int(draws[4 * number + 3] * (width - wide + 1))))
    if fitting:
        assert (right - left, bottom - top, left) == fitting[0]


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (400, 20, (186, 0, 213, 20)),  # too wide for any try: 4/3 of the height, in the middle
        (20, 400, (0, 186, 20, 213)),
        (100, 100, (0, 0, 100, 100)),
    ],
)
def test_where_no_try_fits_the_middle_is_taken(width: int, height: int, expected: tuple[int, int, int, int]) -> None:
    wide_first = [0.5, 0.999, 0.5, 0.5] if width == height else CENTRAL
    assert crop_box(width, height, draws=wide_first * 10, scale=(1.0, 1.0)) == expected


def photo(width: int = 30, height: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(1, 250, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("flip", [0.1, 0.9])
def test_a_crop_view_is_pils_crop_and_resize(flip: float) -> None:
    draws = [0.3, 0.6, 0.2, 0.8] * 10 + [flip]
    config = FewshotTrainConfig(crop=(0.08, 1.0), flip=0.5)
    got = augmented(photo(), draws, kind="crop", config=config, transform=TRANSFORM)
    part = photo().crop(crop_box(30, 20, draws=draws, scale=(0.08, 1.0)))
    expected = np.asarray(part.resize((8, 8), Image.Resampling.BICUBIC))
    assert np.array_equal(np.asarray(got), expected[:, ::-1] if flip < 0.5 else expected)


def test_a_randaugment_view_squeezes_the_whole_photo_first() -> None:
    draws = [0.3, 0.2, 0.7, 0.9, 0.1, 0.6]
    got = augmented(photo(), draws, kind="randaugment", config=FewshotTrainConfig(), transform=TRANSFORM)
    assert VIEW_DRAWS["randaugment"] == len(draws)
    squeezed = photo().resize((8, 8), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(got), np.asarray(randaugment(squeezed, draws)))


def apply(name: str, image: Image.Image, *, first: float = 0.1, second: float = 0.2) -> np.ndarray:
    which = (list(RANDAUGMENT).index(name) + 0.5) / len(RANDAUGMENT)
    return np.asarray(randaugment(image, [which, first, second])).astype(int)


@pytest.mark.parametrize("name", RANDAUGMENT)
def test_every_operation_changes_a_copy_of_the_photo_and_leaves_its_size(name: str) -> None:
    image = photo()
    out = apply(name, image)
    assert out.shape == (20, 30, 3)
    assert (out != np.asarray(image)).any()
    assert np.array_equal(np.asarray(image), np.asarray(photo()))


def test_pixelwise_operations_are_their_formulas() -> None:
    """Colour, contrast, brightness and sharpness only fade below the middle of their range, either way of the draw."""
    x, grey = np.asarray(photo()).astype(int), np.asarray(photo().convert("L")).astype(float)
    assert np.array_equal(apply("invert", photo()), 255 - x)
    assert np.array_equal(apply("solarize", photo()), np.where(x < 256 / 3, x, 255 - x))
    added = np.minimum(255, x + 110 / 3).astype(int)
    assert np.array_equal(apply("solarize-add", photo()), np.where(added < 128, added, 255 - added))
    assert np.array_equal(apply("posterize", photo()), x & 0b11111000)  # int(4 + 4/3) bits
    assert np.abs(apply("brightness", photo()) - 0.7 * x).max() <= 1
    assert np.abs(apply("color", photo()) - (0.3 * grey[..., None] + 0.7 * x)).max() <= 1
    assert np.abs(apply("contrast", photo()) - (0.3 * round(grey.mean()) + 0.7 * x)).max() <= 1
    for name in ("color", "contrast", "brightness", "sharpness"):
        assert np.array_equal(apply(name, photo(), first=0.9), apply(name, photo(), first=0.1))


@pytest.mark.parametrize("axis", [0, 1])
def test_translation_moves_a_third_of_100_pixels_either_way(axis: int) -> None:
    image, name = photo(80, 80), ("translate-y", "translate-x")[axis]
    x = np.asarray(image).astype(int)
    forth, back = apply(name, image), apply(name, image, first=0.9)
    for out, shift in ((forth, -33), (back, 33)):
        moved = np.roll(x, shift, axis=axis)
        inside = np.arange(80) < 47 if shift < 0 else np.arange(80) >= 33
        assert np.array_equal(np.compress(inside, out, axis=axis), np.compress(inside, moved, axis=axis))
        assert (np.compress(~inside, out, axis=axis) == 0).mean() > 0.95  # black comes in


def test_rotation_and_shear_go_either_way_with_black_corners() -> None:
    white = Image.new("RGB", (60, 60), (255, 255, 255))
    for name in ("rotate", "shear-x", "shear-y"):
        forth, back = apply(name, white), apply(name, white, first=0.9)
        assert not np.array_equal(forth, back)
        assert set(np.unique(forth)) == {0, 255}
        assert name != "rotate" or np.abs(forth[::-1] - back).mean() < 12


def test_cutout_is_a_grey_square_around_a_drawn_centre() -> None:
    image = Image.new("RGB", (60, 40), (255, 0, 0))
    out = apply("cutout", image, first=0.5, second=0.25)
    rows, columns = np.nonzero((out == [125, 123, 114]).all(axis=-1))
    side = 40 / 3
    assert (rows.min(), columns.min()) == (int(10 - side / 2), int(30 - side / 2))
    assert abs(rows.max() - rows.min() - side) <= 1


def test_the_sixteen_operations_follow_each_other() -> None:
    assert len(RANDAUGMENT) == 16
    invert = (list(RANDAUGMENT).index("invert") + 0.5) / 16
    twice = randaugment(photo(), [invert, 0.0, 0.0] * 2)
    assert np.array_equal(np.asarray(twice), np.asarray(photo()))
    assert randaugment(photo().convert("L"), [0.99, 0.5, 0.5]).mode == "RGB"


# ----------------------------------------------------------------------------------------------------------- batches


def loader(shots: LabelledPhotos, *, second: bool = False, **fields: Any) -> ShotLoader:
    """Labels are the numbers of the shots, so that a batch tells which ones it holds."""
    config = FewshotTrainConfig(**{"batch_size": 4, "epochs": 3, "workers": 2, **fields})
    names = tuple(f"shot {row}" for row in range(len(shots)))
    shots = replace(shots, labels=torch.arange(len(shots)), classes=names)
    return ShotLoader(shots, config, transform=TRANSFORM, second=second)


def by_shot(batches: Iterator[ShotBatch]) -> dict[int, list[torch.Tensor]]:
    views: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for row, pixels in zip(batch.labels.tolist(), batch.pixels, strict=True):
            views.setdefault(row, []).append(pixels)
    return views


@pytest.mark.parametrize(
    ("count", "batch", "size", "steps"), [(14, 4, 4, 3), (12, 4, 4, 3), (3, 4, 3, 1), (4, 4, 4, 1), (5, 1, 1, 5)]
)
def test_a_last_batch_is_dropped_unless_it_is_the_only_one(count: int, batch: int, size: int, steps: int) -> None:
    shots = loader(colours(count), batch_size=batch)
    assert shots.steps_per_epoch == steps
    epoch = list(shots.stream(0, steps))
    assert [len(one.labels) for one in epoch] == [size] * steps
    seen = torch.cat([one.labels for one in epoch]).tolist()
    assert len(set(seen)) == len(seen) == size * steps


def test_an_epoch_of_many_steps_goes_over_the_shots_again() -> None:
    shots = loader(colours(8), steps_per_epoch=5)
    rows = [one.labels.tolist() for one in shots.stream(0, 10)]
    for start in (0, 2, 5, 7):  # an epoch is two passes and a half; the next one begins afresh
        assert sorted(rows[start] + rows[start + 1]) == list(range(8))
    assert len({tuple(batch) for batch in rows}) > 5


def test_a_stream_is_the_same_from_any_step() -> None:
    shots = loader(colours(14), second=True)
    whole = list(shots.stream(0, 9))
    for start in (1, 3, 8):
        for one, other in zip(whole[start:], loader(colours(14), second=True).stream(start, 9), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def test_draws_do_not_depend_on_batch_threads_or_cache() -> None:
    first = by_shot(loader(colours(12), batch_size=4, workers=3).stream(0, 9))
    other = by_shot(loader(colours(12), batch_size=2, workers=1, cache_gb=0).stream(0, 18))
    assert first.keys() == other.keys() == set(range(12))
    for row, views in first.items():
        assert len(views) == 3
        assert all(torch.equal(a, b) for a, b in zip(views, other[row], strict=True))
        assert not torch.equal(views[0], views[1])


def test_draws_follow_the_seed_the_shot_and_the_view() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (10, 14, 3), dtype=np.uint8)
    same = replace(colours(4), photos=ArrayPhotos(np.stack([photo] * 4), tuple("abcd")))
    batch = next(loader(same, second=True, second_view="crop").stream(0, 1))
    assert batch.second.shape == batch.pixels.shape == (4, 3, 8, 8)
    assert not torch.equal(batch.pixels, batch.second)
    assert not torch.equal(batch.pixels[0], batch.pixels[1])
    other = next(loader(same, seed=2).stream(0, 1))
    assert other.second is None
    assert not torch.equal(batch.pixels, other.pixels)


def test_photos_are_decoded_once_where_they_fit() -> None:
    shots = colours(8)
    counting = CountingPhotos(shots.photos)  # type: ignore[arg-type]
    counted = replace(shots, photos=counting)
    for room, opened in ((8, [1] * 8), (4, [1] * 4 + [3] * 4), (0, [3] * 8)):
        counting.opened = [0] * 8
        list(loader(counted, workers=1, cache_gb=room * 4 * 10 * 14 / 2**30).stream(0, 6))
        assert sorted(counting.opened) == opened
