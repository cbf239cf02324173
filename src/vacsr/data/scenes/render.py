"""Pictures of scenes, at any size; and the same pictures as a model meets them in another domain.

A shift works on pixels and leaves every thing its shape, its position and a shade of its colour, so that labels stay
true. Lengths are shares of the picture's width: a shift looks alike at any size.
"""

import math
import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter
from pydantic import Field

from vacsr.data.scenes.backdrops import draw_backdrop
from vacsr.data.scenes.objects import Scene
from vacsr.data.scenes.sprites import PALETTE, draw_sprite

Size = Annotated[int, Field(ge=16, le=1024)]
"""Pixels along an edge: enough to see something, and few enough for the memory."""
_FINE_UP_TO = 160  # pixels up to which a picture is painted four times as large, and three times beyond

Pixels = npt.NDArray[np.uint8]  # [S, S, 3]
Levels = npt.NDArray[np.float64]  # [S, S, 3] or [S, S], black 0 and white 1

Domain = Literal["plain", "palette", "outline", "texture", "blur"]
_LUMA = np.array((0.299, 0.587, 0.114), dtype=np.float64)
_FADED = 0.85  # of its colour an old print has left
_PALER = 0.8  # exponent of its levels
_CAST = np.array((1.0, 0.97, 0.95), dtype=np.float64)  # old paper
_WASH = 1.6  # colour of a sketch's crayons, of the picture's own; the paper pales it again
_PAPER = 0.3  # how much of a sketch's brightness is paper
_LINES = 2.2  # how dark an edge of full contrast is drawn
_WEAVE = 0.65  # how far the texture moves a level
_BLUR = 0.05  # deviation, in widths


def render_scene(scene: Scene, size: int) -> Pixels:
    """Paint one scene; for many, keep a :class:`SceneRenderer`. [size, size, 3]"""
    return SceneRenderer(size).render(scene)


class SceneRenderer:
    """Paints scenes of one size, with a cache of backgrounds and things.

    Everything is painted several times larger and then averaged, so edges are smooth.
    """

    def __init__(self, size: int) -> None:
        self._shrink = 4 if size <= _FINE_UP_TO else 3
        self._canvas = size * self._shrink
        self._backdrop = cache(partial(draw_backdrop, canvas=self._canvas))
        self._sprite = cache(partial(draw_sprite, canvas=self._canvas))

    def render(self, scene: Scene) -> Pixels:
        """The picture. [size, size, 3]"""
        picture = self._backdrop(scene.background, scene.variant).copy()
        for thing in sorted(scene.things, key=lambda thing: thing.y):
            sprite = self._sprite(
                thing.shape, PALETTE[thing.colour], radius=thing.radius, tilt=thing.tilt, mirrored=thing.mirrored
            )
            left = round(thing.x * self._canvas) - sprite.width // 2
            top = round(thing.y * self._canvas) - sprite.height // 2
            picture.paste(sprite, (left, top), mask=sprite)
        return np.asarray(picture.reduce(self._shrink))


def shifted(pixels: Pixels, domain: Domain, *, rng: random.Random) -> Pixels:
    if domain == "plain":
        return pixels
    levels = _SHIFTS[domain](pixels.astype(np.float64) / 255, rng)
    return np.rint(255 * np.clip(levels, 0, 1)).astype(np.uint8)


def _palette(levels: Levels, rng: random.Random) -> Levels:
    """An old print: pastel colours, on paper that is no longer white."""
    printed: Levels = _CAST * _toned(levels, _FADED) ** _PALER
    return printed


def _outline(levels: Levels, rng: random.Random) -> Levels:
    """A sketch: dark lines where brightness or colour jumps, on paper coloured with crayons."""
    smooth = _blurred(levels, 0.008)
    steps = [np.gradient(smooth, axis=axis) for axis in (0, 1)]
    edges = np.sqrt(steps[0] ** 2 + steps[1] ** 2).max(axis=2) * (len(levels) / 64)
    wash = _PAPER + (1 - _PAPER) * _toned(_blurred(levels, 0.02), _WASH)
    drawn: Levels = wash * np.clip(1.05 - _LINES * edges, 0, 1)[..., None]
    return drawn


def _texture(levels: Levels, rng: random.Random) -> Levels:
    """A coarse cloth: threads in two directions at an angle of their own, worn in blotches."""
    turn, threads = rng.uniform(0, math.pi), rng.uniform(11, 16)
    centres = (np.arange(len(levels), dtype=np.float64) + 0.5) / len(levels)
    y, x = np.meshgrid(centres, centres, indexing="ij")
    along, across = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    phases = [rng.uniform(0, 2 * math.pi) for _ in range(2)]
    weave = sum(np.sin(2 * math.pi * threads * way + phase) for way, phase in zip((along, across), phases, strict=True))
    blotches = np.random.default_rng(rng.getrandbits(32)).uniform(0, 255, (7, 7)).astype(np.uint8)
    worn = np.asarray(Image.fromarray(blotches).resize(x.shape, Image.Resampling.BICUBIC), dtype=np.float64) / 255
    return levels + _WEAVE * (0.5 * weave * worn + worn - 0.5)[..., None]


def _blur(levels: Levels, rng: random.Random) -> Levels:
    return _blurred(levels, _BLUR)


def _toned(levels: Levels, share: float) -> Levels:
    """Colour times ``share``, the brightness kept as far as levels go."""
    grey = (levels @ _LUMA)[..., None]
    toned: Levels = np.clip(share * levels + (1 - share) * grey, 0, 1)
    return toned


def _blurred(levels: Levels, deviation: float) -> Levels:
    """Gaussian, of a deviation in widths."""
    image = Image.fromarray(np.rint(255 * levels).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(deviation * image.width)), dtype=np.float64) / 255


_SHIFTS: Mapping[str, Callable[[Levels, random.Random], Levels]] = {
    shift.__name__[1:]: shift for shift in (_palette, _outline, _texture, _blur)
}
