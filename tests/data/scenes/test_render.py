"""Pictures of scenes: the same at every size, with everything in them to be seen; and in other domains."""

import base64
import random
from dataclasses import replace

import numpy as np

from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, RADIUS, SHAPES, VARIANTS, Scene, Thing, draw_scene
from vacsr.data.scenes.render import Domain, SceneRenderer, render_scene, shifted
from vacsr.data.scenes.sprites import _soft

SCENES = [draw_scene(random.Random(seed)) for seed in range(60)]
SMALL = SceneRenderer(64)
SHIFTS: tuple[Domain, ...] = ("palette", "outline", "texture", "blur")
QUARTERS = base64.b64decode(
    "o9j0rNv1d7xser1xr931otf0eLxteb1wo9j0pNj0d7xqe75zqtv1ptn0ebxueb1vo9j0rNv1drtqe710kNXsk9btwc2nxs2llNftjtTsu86rv82p"
    "ktbsk9btvs2pxc2mlNbtlNbtvc2pus6tjtTslNftx82lwM2ovtHsvtDs3+j22+X1vc/svtDs3Ob12+b1vtHsv9Ht2uX13ef2vc/rvtDs2+b13eb2"
    "v9HsvtDs3uj22uT1Ki9nJyxiNTNuOjdzKi5mLDBpNjRwODVwKi5mKC1jNTNvOTZyKS5lLDBpOTZyNjRvKy9nJitiNTNuOjdzm1WGl1KGUTZiUDVh"
    "nleFnFSEXj1jXDxknlaGoFeFXDxoXDxlnFWFoViGZEFlWjtinVWFnlaFZEFnVTlf98KH87l/3aBh2pdX9LyB9LuA3Jtd25hY87l/9b6D25lb25pa"
    "9r+E87l+25la2pdX9r+E9b6D3Jtb3JxeSK7PRq3ORYGdPn2dP6rNTrDQO3ubR4OfRq3OQqvNRYKePXycPqrMTLDQPXybRYKfP6rNSa7PP32cQYCd"
    "v83ovszo3+f12uT0wMzjwMzj3+fy2+TxwM/hwc/g4Ofx3OXwo8jOpcnQ1+Xt0uLruc3ru87s3uj22uT1usnoucjo3eX02eLywMzqv83q3+Xz2eDw"
    "vbjSwLjS3+Hv29zqvs/qvs7p3+f12+TzwNDjwNDj3+j12+X0yL3Lyr7M5eDk4tvgw8PfxMPf3+Tx3uHwt7LHv7XF1tbezMrUvbnTv7nT3uDt29vq"
)
"""Mean colours of the quarters of pictures: every background, every shape and every domain."""


def test_corners_are_cut_three_times() -> None:
    assert len(_soft(np.array([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]))) == 4 * 2**3


def test_pictures_stay_what_they_were() -> None:
    """Published results are of these pictures. Other versions of Pillow may round a pixel otherwise."""
    renderer = SceneRenderer(48)
    empty = [renderer.render(Scene(name, variant, ())) for name in BACKGROUNDS for variant in range(VARIANTS)]
    things = [
        Thing(shape, COLOURS[row % 7], tuple(RADIUS)[row % 4], 0.5, 0.45, 11 * (row % 3 - 1), mirrored=row % 2 == 1)
        for row, shape in enumerate(SHAPES)
    ]
    shown = [renderer.render(Scene("snow", 0, (thing,))) for thing in things]
    made = [shifted(shown[7], domain, rng=random.Random(0)) for domain in SHIFTS]
    quarters = np.stack([*empty, *shown, *made]).reshape(-1, 2, 24, 2, 24, 3).mean(axis=(2, 4))
    expected = np.frombuffer(QUARTERS, dtype=np.uint8).reshape(quarters.shape)
    assert np.abs(quarters - expected).max() <= 0.75


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
    at = (np.arange(64) + 0.5) / 64
    for scene in SCENES[:30]:
        picture, empty = SMALL.render(scene), SMALL.render(replace(scene, things=()))
        changed = np.abs(picture.astype(np.int64) - empty).max(axis=2)
        away = np.array([np.hypot(at[None, :] - one.x, at[:, None] - one.y) / one.radius for one in scene.things])
        assert all((changed[disc < 1] > 25).mean() > 0.45 for disc in away)
        assert changed[(away > 1.8).all(axis=0)].max(initial=0) <= 3, "nothing is painted where no thing is"
