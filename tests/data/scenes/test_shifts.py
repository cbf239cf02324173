"""Domain shifts: other pixels of the same pictures, at any size, from draws of their own."""

from __future__ import annotations

import colorsys
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.data.scenes.objects import Scene, Thing
from vacsr.data.scenes.render import render_scene
from vacsr.data.scenes.shifts import DOMAINS, PLAIN, shifted
from vacsr.data.scenes.sprites import PALETTE
from vacsr.errors import UsageError

SHIFTS = [domain for domain in DOMAINS if domain != PLAIN]
SCENE = Scene("meadow", 0, (Thing("star", "red", "large", 0.5, 0.5), Thing("fish", "blue", "small", 0.2, 0.8)))


def shift(pixels: npt.NDArray[np.uint8], domain: str, seed: int = 0) -> npt.NDArray[np.uint8]:
    return shifted(pixels, domain, rng=random.Random(seed))


@pytest.fixture(scope="module")
def photo() -> npt.NDArray[np.uint8]:
    return render_scene(SCENE, 64)


def test_plain_changes_nothing(photo: npt.NDArray[np.uint8]) -> None:
    assert (shift(photo, PLAIN) == photo).all()


@pytest.mark.parametrize("domain", SHIFTS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_pixels_give_a_picture_and_stay_as_they_are(domain: str, data: st.DataObject) -> None:
    size, seed = data.draw(st.integers(16, 40)), data.draw(st.integers(0, 2**32))
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3)).astype(np.uint8)
    before = pixels.copy()
    out = shift(pixels, domain, seed)
    assert out.shape == pixels.shape
    assert out.dtype == np.uint8
    assert (pixels == before).all()
    assert (out == shift(pixels, domain, seed)).all()


@pytest.mark.parametrize("domain", SHIFTS)
def test_every_domain_is_far_from_plain_and_from_the_others(photo: npt.NDArray[np.uint8], domain: str) -> None:
    own = shift(photo, domain).astype(float)
    for other in DOMAINS:
        if other != domain:
            assert np.abs(own - shift(photo, other)).mean() > 4  # of 255 levels


@pytest.mark.parametrize("domain", SHIFTS)
def test_only_the_texture_draws(photo: npt.NDArray[np.uint8], domain: str) -> None:
    assert (shift(photo, domain, 0) == shift(photo, domain, 1)).all() == (domain != "texture")


@pytest.mark.parametrize("domain", ["palette", "outline", "texture", "blur"])
def test_a_shift_looks_alike_at_any_size(domain: str) -> None:
    """Shrinking a large shifted picture gives about the small picture shifted, and nearer than the plain one is."""
    small, large = render_scene(SCENE, 64), render_scene(SCENE, 128)
    shrunk = shift(large, domain).reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
    apart = np.abs(shrunk - shift(small, domain)).mean()
    assert apart < 0.5 * np.abs(shrunk - small).mean()


@pytest.mark.parametrize("domain", SHIFTS)
def test_every_colour_stays_nearest_to_itself(domain: str) -> None:
    """Labels stay true: as a person names hues, a shifted red is nearer to red than to any other colour."""
    hues = {name: colorsys.rgb_to_hsv(*colour)[0] for name, colour in PALETTE.items()}
    for name, colour in PALETTE.items():
        patch = np.tile(np.array(colour, dtype=np.uint8), (32, 32, 1))
        seen = colorsys.rgb_to_hsv(*shift(patch, domain).reshape(-1, 3).mean(axis=0))[0]
        assert min(hues, key=lambda other: abs((hues[other] - seen + 0.5) % 1 - 0.5)) == name


def test_a_sketch_has_lines_where_the_picture_has_edges_and_paper_elsewhere() -> None:
    halves = np.full((64, 64, 3), 40, dtype=np.uint8)
    halves[:, 32:] = 220
    sketch = shift(halves, "outline").astype(int).mean(axis=2)
    assert sketch[:, 31:33].max() < sketch[:, :24].min()
    assert sketch[:, :24].min() > 40  # paper is bright, whatever was there


def test_the_texture_keeps_the_mean_and_the_blur_loses_the_detail(photo: npt.NDArray[np.uint8]) -> None:
    grey = np.full((64, 64, 3), 128, dtype=np.uint8)
    levels = [shift(grey, "texture", seed).astype(float) for seed in range(8)]
    assert np.mean(levels) == pytest.approx(128, abs=6)
    assert np.std(levels) > 15
    detail = [np.abs(np.diff(pixels.astype(float), axis=1)).mean() for pixels in (photo, shift(photo, "blur"))]
    assert detail[1] < 0.6 * detail[0]


def test_an_unknown_domain_is_refused(photo: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(UsageError, match="no domain 'sketch' — write domain= with one of: plain, palette, outline"):
        shift(photo, "sketch")
