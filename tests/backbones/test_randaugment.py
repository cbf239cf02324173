"""RandAugment is Dassl's: sixteen operations, none the identity, black fill, strengths by the magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vacsr.backbones.augment import OPERATIONS, randaugment

NAMES = [
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add", "color", "contrast",
    "brightness", "sharpness", "shear-x", "shear-y", "cutout", "translate-x", "translate-y",
]  # fmt: skip


def photo(width: int = 48, height: int = 36) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(1, 250, (height, width, 3), dtype=np.uint8))


def apply(name: str, image: Image.Image, *, magnitude: int = 10, first: float = 0.1, second: float = 0.2) -> np.ndarray:
    which = (list(OPERATIONS).index(name) + 0.5) / len(OPERATIONS)
    return np.asarray(randaugment(image, [which, first, second], magnitude=magnitude)).astype(int)


def test_the_sixteen() -> None:
    assert list(OPERATIONS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_changes_a_photo_and_leaves_its_size(name: str) -> None:
    image = photo()
    out = apply(name, image)
    assert out.shape == (36, 48, 3)
    assert (out != np.asarray(image)).any()
    assert np.array_equal(np.asarray(image), np.asarray(photo()))


def test_pixelwise_operations_are_their_formulas() -> None:
    x = np.asarray(photo()).astype(int)
    assert np.array_equal(apply("invert", photo()), 255 - x)
    assert np.array_equal(apply("solarize", photo()), np.where(x < 256 / 3, x, 255 - x))
    added = np.minimum(255, x + 110 / 3).astype(int)
    assert np.array_equal(apply("solarize-add", photo()), np.where(added < 128, added, 255 - added))
    assert np.array_equal(apply("posterize", photo()), x & 0b11111000)  # int(4 + 4/3) bits
    assert np.abs(apply("brightness", photo()) - 0.7 * x).max() <= 1


def test_colour_contrast_and_sharpness_only_fade_below_the_middle_of_their_range() -> None:
    x = np.asarray(photo()).astype(float)
    grey = np.asarray(photo().convert("L")).astype(float)
    assert np.abs(apply("color", photo()) - (0.3 * grey[..., None] + 0.7 * x)).max() <= 1
    assert np.abs(apply("contrast", photo()) - (0.3 * round(grey.mean()) + 0.7 * x)).max() <= 1
    for name in ("color", "contrast", "brightness", "sharpness"):
        assert np.abs(apply(name, photo(), magnitude=15) - x).max() <= 1  # factor 1
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
        assert np.array_equal(forth[::-1], back) or name != "rotate" or np.abs(forth[::-1] - back).mean() < 12


def test_cutout_is_a_grey_square_around_a_drawn_centre() -> None:
    image = Image.new("RGB", (60, 40), (255, 0, 0))
    out = apply("cutout", image, first=0.5, second=0.25)
    rows, columns = np.nonzero((out == [125, 123, 114]).all(axis=-1))
    side = 40 / 3
    assert (rows.min(), columns.min()) == (int(10 - side / 2), int(30 - side / 2))
    assert abs(rows.max() - rows.min() - side) <= 1
    assert np.array_equal(apply("cutout", image, magnitude=0, first=0.5)[30:], np.asarray(image)[30:])


def test_operations_follow_each_other_and_are_drawn_equally_often() -> None:
    invert = (NAMES.index("invert") + 0.5) / 16
    twice = randaugment(photo(), [invert, 0.0, 0.0] * 2, magnitude=3)
    assert np.array_equal(np.asarray(twice), np.asarray(photo()))
    assert [int(draw * 16) for draw in np.arange(16) / 16] == list(range(16))
    assert randaugment(photo().convert("L"), [0.99, 0.5, 0.5]).mode == "RGB"
