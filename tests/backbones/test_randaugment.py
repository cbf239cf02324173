"""Each operation against its closed form on bytes, and the draws that choose them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vacsr.backbones.randaugment import DRAWS, LEVELS, OPERATIONS, randaugment
from vacsr.errors import UsageError

Bytes = np.ndarray
NAMES = ("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize")
NAMES += ("contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y")


def photo(width: int = 20, height: int = 12, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(20, 230, (height, width, 3), dtype=np.uint8))


def once(name: str, given: Image.Image, *, magnitude: int, sign: int = 1) -> Bytes:
    """One operation by name, through the public function."""
    which = (NAMES.index(name) + 0.5) / len(NAMES)
    return np.asarray(randaugment(given, [which, 0.25 if sign > 0 else 0.75], operations=1, magnitude=magnitude))


def grey(x: Bytes) -> Bytes:
    """Pillow's luma: ITU-R 601 in 16-bit fixed point. [H, W, 3] -> [H, W]"""
    red, green, blue = (x[..., channel].astype(np.int64) for channel in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def blended(x: Bytes, towards: Bytes | float, factor: float) -> Bytes:
    """towards + factor·(x − towards), clipped to bytes."""
    value = np.asarray(towards, dtype=np.float64) + factor * (x.astype(np.float64) - np.asarray(towards))
    return np.clip(value, 0, 255)


def moved(x: Bytes, source: Callable[[int, int], tuple[float, float]]) -> Bytes:
    """out[y, x] = in at the source of the pixel's centre, grey outside."""
    out = np.full_like(x, 128)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            u, v = source(column, row)
            if 0 <= u < x.shape[1] and 0 <= v < x.shape[0]:
                out[row, column] = x[math.floor(v), math.floor(u)]
    return out


def test_the_papers_fourteen() -> None:
    assert tuple(OPERATIONS) == NAMES
    assert len(set(OPERATIONS.values())) == 14


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("autocontrast", "equalize")])
def test_no_magnitude_no_change(name: str, sign: int) -> None:
    np.testing.assert_array_equal(once(name, photo(), magnitude=0, sign=sign), np.asarray(photo()))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "identity"])
def test_some_magnitude_some_change(name: str) -> None:
    large = photo(40, 40)
    assert (once(name, large, magnitude=15) != np.asarray(large)).any()
    np.testing.assert_array_equal(once("identity", large, magnitude=15), np.asarray(large))


@pytest.mark.parametrize(("magnitude", "threshold"), [(9, 179), (15, 128), (30, 0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_solarize(magnitude: int, threshold: int, sign: int) -> None:
    x = np.asarray(photo())
    np.testing.assert_array_equal(
        once("solarize", photo(), magnitude=magnitude, sign=sign), np.where(x < threshold, x, 255 - x)
    )


@pytest.mark.parametrize(("magnitude", "bits"), [(3, 8), (4, 7), (9, 7), (15, 6), (30, 4)])
def test_posterize(magnitude: int, bits: int) -> None:
    x = np.asarray(photo())
    np.testing.assert_array_equal(
        once("posterize", photo(), magnitude=magnitude, sign=-1), x >> (8 - bits) << (8 - bits)
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [9, 30])
def test_brightness_contrast_and_color(magnitude: int, sign: int) -> None:
    x, factor = np.asarray(photo()), 1.0 + sign * 0.9 * magnitude / 30
    luma = grey(x)
    towards = {"brightness": 0.0, "contrast": math.floor(luma.mean() + 0.5), "color": np.repeat(luma[..., None], 3, -1)}
    for name, target in towards.items():
        found = once(name, photo(), magnitude=magnitude, sign=sign)
        assert np.abs(found - blended(x, target, factor)).max() <= 1.0, name  # Pillow cuts or rounds the fraction


@pytest.mark.parametrize("sign", [1, -1])
def test_sharpness(sign: int) -> None:
    """Away from or towards the mean of 3×3 pixels, the middle five times; edges stay."""
    x = np.asarray(photo()).astype(np.float64)
    smooth = x.copy()
    for row in range(1, x.shape[0] - 1):
        for column in range(1, x.shape[1] - 1):
            window = x[row - 1 : row + 2, column - 1 : column + 2].sum(axis=(0, 1)) + 4 * x[row, column]
            smooth[row, column] = np.floor(window / 13 + 0.5)
    found = once("sharpness", photo(), magnitude=20, sign=sign)
    assert np.abs(found - blended(x, smooth, 1.0 + sign * 0.6)).max() <= 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_shear(sign: int) -> None:
    x, slope = np.asarray(photo()), sign * 0.3 * 19 / 30  # no pixel falls between two
    sideways = moved(x, lambda u, v: (u + 0.5 + slope * (v + 0.5), v + 0.5))
    upwards = moved(x, lambda u, v: (u + 0.5, v + 0.5 + slope * (u + 0.5)))
    np.testing.assert_array_equal(once("shear-x", photo(), magnitude=19, sign=sign), sideways)
    np.testing.assert_array_equal(once("shear-y", photo(), magnitude=19, sign=sign), upwards)


@pytest.mark.parametrize("sign", [1, -1])
def test_translate_by_a_share_of_its_own_side(sign: int) -> None:
    x = np.asarray(photo())
    across, down = sign * round(150 / 331 * 20 * 0.3), sign * round(150 / 331 * 12 * 0.3)
    assert (abs(across), abs(down)) == (3, 2)
    np.testing.assert_array_equal(
        once("translate-x", photo(), magnitude=9, sign=sign), moved(x, lambda u, v: (u + across, v))
    )
    np.testing.assert_array_equal(
        once("translate-y", photo(), magnitude=9, sign=sign), moved(x, lambda u, v: (u, v + down))
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_rotate_about_the_middle(sign: int) -> None:
    x, angle = np.asarray(photo(15, 15)), math.radians(sign * 30.0 * 9 / 30)

    def source(u: int, v: int) -> tuple[float, float]:
        across, down = u + 0.5 - 7.5, v + 0.5 - 7.5
        return (
            7.5 + math.cos(angle) * across - math.sin(angle) * down,
            7.5 + math.sin(angle) * across + math.cos(angle) * down,
        )

    found, plain = once("rotate", photo(15, 15), magnitude=9, sign=sign), moved(x, source)
    assert (found == plain).all(axis=-1).mean() > 0.98  # Pillow rounds the sines, so that a pixel on an edge may differ
    assert (found != x).any()


def test_autocontrast() -> None:
    x = np.asarray(photo()).astype(np.float64)
    low, high = x.min(axis=(0, 1)), x.max(axis=(0, 1))
    assert np.abs(once("autocontrast", photo(), magnitude=9) - (x - low) * 255 / (high - low)).max() <= 1.0


def test_equalize_keeps_the_order_and_spreads_it() -> None:
    dark = Image.fromarray((np.asarray(photo(64, 64)) // 6).astype(np.uint8))
    found, x = once("equalize", dark, magnitude=9), np.asarray(dark)
    for channel in range(3):
        order = np.argsort(x[..., channel], axis=None, kind="stable")
        assert (np.diff(found[..., channel].reshape(-1)[order].astype(int)) >= 0).all()
        share = np.array([(found[..., channel] <= level).mean() for level in (63, 127, 191)])
        assert np.abs(share - (0.25, 0.5, 0.75)).max() < 0.05


def test_operations_follow_each_other() -> None:
    place = {name: (number + 0.5) / 14 for number, name in enumerate(NAMES)}
    draws = [place["translate-x"], 0.1, place["posterize"], 0.9, place["solarize"], 0.3]
    found = randaugment(photo(), draws, operations=3, magnitude=20)
    step = photo()
    for name in ("translate-x", "posterize", "solarize"):
        step = Image.fromarray(once(name, step, magnitude=20))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(step))
    other = randaugment(photo(), [*draws[4:], *draws[2:4], *draws[:2]], operations=3, magnitude=20)
    assert (np.asarray(other) != np.asarray(found)).any()


@settings(max_examples=40, deadline=None)
@given(
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4),
    magnitude=st.integers(0, LEVELS),
    mode=st.sampled_from(["RGB", "L", "P", "RGBA", "CMYK", "1"]),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_any_photo_keeps_its_size_and_itself(
    draws: list[float], magnitude: int, mode: str, sides: tuple[int, int]
) -> None:
    given_photo = photo(*sides).convert(mode)
    before = given_photo.tobytes()
    found = randaugment(given_photo, draws, magnitude=magnitude)
    assert (found.mode, found.size) == ("RGB", sides)
    assert given_photo.tobytes() == before
    np.testing.assert_array_equal(np.asarray(found), np.asarray(randaugment(given_photo, draws, magnitude=magnitude)))


def test_every_operation_is_drawn_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in NAMES:
        monkeypatch.setitem(OPERATIONS, name, lambda photo, _, name=name: (seen.append(name), photo)[1])
    for number in range(140):
        randaugment(photo(2, 2), [(number + 0.5) / 140, 0.0], operations=1)
    assert {name: seen.count(name) for name in NAMES} == dict.fromkeys(NAMES, 10)


@pytest.mark.parametrize("draws", [[0.1], [0.1] * 3, [0.1] * 5, [0.1, 0.2, 0.3, 1.0], [-0.1] * 4, [math.nan] * 4])
def test_wrong_draws(draws: list[float]) -> None:
    assert DRAWS == 2
    with pytest.raises(UsageError, match=r"give 4, each in \[0, 1\)"):
        randaugment(photo(), draws)


@pytest.mark.parametrize("magnitude", [-1, 31])
def test_wrong_magnitude(magnitude: int) -> None:
    with pytest.raises(UsageError, match=f"is {magnitude} — give 0 to 30"):
        randaugment(photo(), [0.1] * 4, magnitude=magnitude)
