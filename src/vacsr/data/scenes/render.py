"""Pictures of scenes, at any size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from vacsr.data.scenes.backdrops import draw_backdrop
from vacsr.data.scenes.objects import RADIUS, Scene, Thing
from vacsr.data.scenes.sprites import PALETTE, draw_sprite
from vacsr.errors import UsageError

SMALLEST, LARGEST = 16, 1024
"""Pixels along an edge."""
_FINE_UP_TO = 160  # pixels up to which a picture is painted four times as large, and three times beyond


def check_size(size: int) -> None:
    """Refuse a size at which nothing can be seen, or nothing fits in memory."""
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(f"scenes: size is {size}, expected {SMALLEST} to {LARGEST} pixels — write size=64")


def render_scene(scene: Scene, size: int) -> npt.NDArray[np.uint8]:
    """Paint one scene; for many, keep a :class:`SceneRenderer`. [size, size, 3]"""
    return SceneRenderer(size).render(scene)


class SceneRenderer:
    """Paints scenes of one size. What it has painted once, a background or a kind of thing, it keeps.

    Everything is painted several times as large as asked for and then averaged, so edges are smooth.
    """

    def __init__(self, size: int) -> None:
        check_size(size)
        self._shrink = 4 if size <= _FINE_UP_TO else 3
        self._canvas = size * self._shrink
        self._backdrops: dict[tuple[str, int], Image.Image] = {}
        self._sprites: dict[tuple[str, str, str, int, bool], Image.Image] = {}

    def render(self, scene: Scene) -> npt.NDArray[np.uint8]:
        """The picture. [size, size, 3]"""
        picture = self._backdrop(scene.background, scene.variant).copy()
        for thing in sorted(scene.things, key=lambda thing: thing.y):
            sprite = self._sprite(thing)
            corner = (
                round(thing.x * self._canvas) - sprite.width // 2,
                round(thing.y * self._canvas) - sprite.height // 2,
            )
            picture.paste(sprite, corner, mask=sprite)
        return np.asarray(picture.reduce(self._shrink))

    def _backdrop(self, name: str, variant: int) -> Image.Image:
        key = (name, variant)
        if key not in self._backdrops:
            self._backdrops[key] = draw_backdrop(name, variant, self._canvas)
        return self._backdrops[key]

    def _sprite(self, thing: Thing) -> Image.Image:
        key = (thing.shape, thing.colour, thing.size, thing.tilt, thing.mirrored)
        if key not in self._sprites:
            self._sprites[key] = draw_sprite(
                thing.shape,
                PALETTE[thing.colour],
                radius=RADIUS[thing.size],
                canvas=self._canvas,
                tilt=thing.tilt,
                mirrored=thing.mirrored,
            )
        return self._sprites[key]
