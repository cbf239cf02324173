"""Crops by the usual rule, and squares as PIL makes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vacsr.backbones.randaugment import randaugment
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.views import AugmentView, Box, CropView, build_view, crop_box

from .conftest import TRANSFORM

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
shares = st.floats(0.001, 0.999)
draws_of = st.lists(shares, min_size=40, max_size=40)
CENTRAL = [0.5, 0.5, 0.5, 0.5]


@PROPERTY
@given(st.integers(1, 400), st.integers(1, 400), draws_of, st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)))
def test_a_box_is_the_first_try_that_fits(
    width: int, height: int, draws: list[float], scale: tuple[float, float]
) -> None:
    box = crop_box(width, height, draws=draws, scale=scale)
    assert 0 <= box.left <= box.left + box.width <= width
    assert 0 <= box.top <= box.top + box.height <= height
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
        assert (box.width, box.height, box.left) == fitting[0]


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (400, 20, Box(186, 0, 27, 20)),  # too wide for any try: 4/3 of the height, in the middle
        (20, 400, Box(0, 186, 20, 27)),
        (100, 100, Box(0, 0, 100, 100)),
    ],
)
def test_where_no_try_fits_the_middle_is_taken(width: int, height: int, expected: Box) -> None:
    wide_first = [0.5, 0.999, 0.5, 0.5] if width == height else CENTRAL
    assert crop_box(width, height, draws=wide_first * 10, scale=(1.0, 1.0)) == expected


def test_every_place_of_a_crop_is_reached() -> None:
    grid = np.linspace(0.0005, 0.9995, 400)
    lefts = {crop_box(10, 10, draws=[0.5, 0.5, 0.5, x] * 10, scale=(0.25, 0.25)).left for x in grid}
    assert lefts == {0, 1, 2, 3, 4, 5}


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8))


@pytest.mark.parametrize("flip", [0.1, 0.9])
def test_a_crop_view_is_pils_crop_and_resize(flip: float) -> None:
    draws = [0.3, 0.6, 0.2, 0.8] * 10 + [flip]
    got = CropView(8, "bicubic", (0.08, 1.0), 0.5)(photo(), draws)
    box = crop_box(30, 20, draws=draws, scale=(0.08, 1.0))
    part = photo().crop((box.left, box.top, box.left + box.width, box.top + box.height))
    expected = np.asarray(part.resize((8, 8), Image.Resampling.BICUBIC))
    assert np.array_equal(np.asarray(got), expected[:, ::-1] if flip < 0.5 else expected)


def test_a_randaugment_view_squeezes_the_whole_photo_first() -> None:
    draws = [0.3, 0.2, 0.7, 0.9]
    got = AugmentView(8, "bicubic", 2, 10)(photo(), draws)
    squeezed = photo().resize((8, 8), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(got), np.asarray(randaugment(squeezed, draws, operations=2, magnitude=10)))


def test_views_are_built_as_the_recipe_says() -> None:
    config = FewshotTrainConfig(crop=(0.5, 1.0), flip=0.0, randaugment_operations=3, randaugment_magnitude=4)
    assert build_view("crop", config, transform=TRANSFORM) == CropView(8, "bicubic", (0.5, 1.0), 0.0)
    augmented = build_view("randaugment", config, transform=TRANSFORM)
    assert augmented == AugmentView(8, "bicubic", 3, 4)
    assert augmented.lanes == 6
