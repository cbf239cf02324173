"""The seven backgrounds, painted in pictures of any size: the same lines and dots, whatever the number of pixels."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFilter

Points = Sequence[tuple[float, float]]
Stops = Sequence[tuple[float, str]]  # heights from 0 to 1 and the colour there; in between they blend
Discs = Sequence[tuple[float, float, float]]  # x, y and radius
_GRAIN = 2.2  # strength of a faint, uneven texture, like paint on paper, in levels of 255


def draw_backdrop(name: str, variant: int, canvas: int) -> Image.Image:
    """One picture of a background. [canvas, canvas] RGB"""
    rng = random.Random(f"{name}/{variant}")
    easel = _Easel(canvas)
    _PAINTERS[name](easel, rng)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 40, (48, 48)).clip(-127, 127) + 128
    texture = Image.fromarray(noise.astype(np.uint8)).resize(easel.image.size, Image.Resampling.BICUBIC)
    grain = (np.asarray(texture, dtype=np.float32) - 128) * (_GRAIN / 40)
    return Image.fromarray(np.clip(np.asarray(easel.image) + grain[..., None], 0, 255).astype(np.uint8))


class _Easel:
    """A picture in the making; all coordinates run from 0 to 1."""

    def __init__(self, canvas: int) -> None:
        self.canvas = canvas
        self.image = Image.new("RGB", (canvas, canvas))

    def sky(self, stops: Stops) -> None:
        self.image.paste(self._gradient(stops))

    def fill(self, points: Points, stops: Stops, *, alpha: float = 1.0, blur: float = 0.0) -> None:
        """Fill a polygon with a gradient that is anchored to the picture, not to the polygon."""
        with self._mask(self._gradient(stops), blur) as pen:
            pen.polygon(self._at(points), fill=round(255 * alpha))

    def dots(self, discs: Discs, colour: str, *, alpha: float = 1.0, blur: float = 0.0) -> None:
        with self._mask(ImageColor.getrgb(colour), blur) as pen:
            for x, y, radius in discs:
                corners = [(x - radius, y - radius), (x + radius, y + radius)]
                pen.ellipse(self._at(corners), fill=round(255 * alpha))

    def lines(self, paths: Sequence[Points], colour: str, *, width: float, alpha: float = 1.0) -> None:
        pixels = max(1, round(width * self.canvas))
        with self._mask(ImageColor.getrgb(colour)) as pen:
            for path in paths:
                pen.line(self._at(path), fill=round(255 * alpha), width=pixels, joint="curve")

    @contextmanager
    def _mask(self, paint: Any, blur: float = 0.0) -> Iterator[ImageDraw.ImageDraw]:
        """Paint whatever is drawn with the pen."""
        mask = Image.new("L", self.image.size)
        yield ImageDraw.Draw(mask)
        if blur:
            mask = mask.filter(ImageFilter.GaussianBlur(blur * self.canvas))
        self.image.paste(paint, mask=mask, box=(0, 0))

    def _at(self, points: Points) -> list[tuple[float, float]]:
        return [(x * self.canvas, y * self.canvas) for x, y in points]

    def _gradient(self, stops: Stops) -> Image.Image:
        heights = (np.arange(self.canvas) + 0.5) / self.canvas
        colours = np.array([ImageColor.getrgb(colour) for _, colour in stops], dtype=np.float64)
        known = [height for height, _ in stops]
        column = np.stack([np.interp(heights, known, colours[:, channel]) for channel in range(3)], axis=1)
        return Image.fromarray(np.rint(column).astype(np.uint8)[:, None, :]).resize(self.image.size)


def _ridge(rng: random.Random, height: float, *, swing: float, waves: float = 1.0) -> list[tuple[float, float]]:
    """Land below a rolling line around ``height``."""
    phase, second = rng.uniform(0, 2 * math.pi), rng.uniform(0, 2 * math.pi)

    def roll(x: float) -> float:
        return math.sin(2 * math.pi * waves * x + phase) + 0.4 * math.sin(2 * math.pi * 2.3 * waves * x + second)

    return [*((step / 64, height + swing * roll(step / 64)) for step in range(65)), (1.0, 1.02), (0.0, 1.02)]


def _scatter(rng: random.Random, number: int, *, low: float, high: float, radius: tuple[float, float]) -> Discs:
    """Random discs between two heights."""
    return [(rng.random(), rng.uniform(low, high), rng.uniform(*radius)) for _ in range(number)]


def _clouds(easel: _Easel, rng: random.Random, *, number: int, colour: str = "#ffffff", alpha: float = 0.85) -> None:
    for _ in range(number):
        x, y, scale = rng.uniform(0.05, 0.95), rng.uniform(0.07, 0.3), rng.uniform(0.6, 1.1)
        puffs = [(-0.09, 0.012, 0.035), (-0.04, -0.01, 0.052), (0.025, -0.018, 0.06), (0.085, 0.008, 0.042)]
        discs = [(x + scale * dx, y + scale * dy, scale * radius) for dx, dy, radius in puffs]
        easel.dots(discs, colour, alpha=alpha, blur=0.008)


def _meadow(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#74c3f0"), (0.62, "#dff3fa")])
    _clouds(easel, rng, number=rng.randint(2, 3))
    easel.fill(_ridge(rng, 0.55, swing=0.035), [(0.45, "#b4dfa0"), (0.75, "#8fca7c")])
    easel.fill(_ridge(rng, 0.66, swing=0.04), [(0.55, "#8fd06f"), (0.9, "#62b052")])
    easel.fill(_ridge(rng, 0.78, swing=0.025), [(0.7, "#6fbf56"), (1, "#3f9440")])
    for colour in ("#2f8437", "#a5dd7d"):
        blades = _scatter(rng, 70, low=0.84, high=1.0, radius=(0.012, 0.028))
        paths = [[(x, y), (x + rng.uniform(-0.012, 0.012), y - length)] for x, y, length in blades]
        easel.lines(paths, colour, width=0.005, alpha=0.6)


def _beach(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#6fcdf2"), (0.4, "#e3f8fb")])
    _clouds(easel, rng, number=2, alpha=0.7)
    easel.fill([(0, 0.4), (1, 0.4), (1, 1), (0, 1)], [(0.4, "#1f93c2"), (0.55, "#3dbfd0"), (0.68, "#9fe9df")])
    glints = _scatter(rng, 26, low=0.43, high=0.6, radius=(0.015, 0.045))
    easel.lines([[(x - half, y), (x + half, y)] for x, y, half in glints], "#ffffff", width=0.006, alpha=0.45)
    shore = rng.uniform(0.62, 0.7)
    state = rng.getstate()
    for offset, stops in ((0.0, [(0.6, "#ffffff"), (1, "#ffffff")]), (0.022, [(0.6, "#d8b87c"), (1, "#d8b87c")])):
        rng.setstate(state)
        easel.fill(_ridge(rng, shore + offset, swing=0.022, waves=0.8), stops, alpha=0.9)
    rng.setstate(state)
    easel.fill(_ridge(rng, shore + 0.05, swing=0.022, waves=0.8), [(0.65, "#f4dda6"), (1, "#e9c582")], blur=0.006)
    easel.dots(_scatter(rng, 90, low=0.78, high=1, radius=(0.002, 0.005)), "#c79d5c", alpha=0.55)


def _snow(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#9db9e3"), (0.6, "#e9effa")])
    for middle in rng.sample((0.02, 0.27, 0.5, 0.73, 0.98), 5):
        x, top, half = middle + rng.uniform(-0.06, 0.06), rng.uniform(0.28, 0.46), rng.uniform(0.24, 0.34)
        easel.fill([(x, top), (x + half, 0.75), (x - half, 0.75)], [(0.28, "#a3badf"), (0.7, "#cfdcf1")])
        peak = [(x, top), (x + 0.3 * half, top + 0.13), (x + 0.08 * half, top + 0.1), (x - 0.1 * half, top + 0.14)]
        easel.fill([*peak, (x - 0.3 * half, top + 0.12)], [(0, "#ffffff"), (1, "#ffffff")], alpha=0.9)
    easel.fill(_ridge(rng, 0.64, swing=0.03), [(0.58, "#f4f8ff"), (0.85, "#cfdef3")])
    easel.fill(_ridge(rng, 0.79, swing=0.03), [(0.72, "#ffffff"), (1, "#d6e3f5")])
    easel.dots(_scatter(rng, 70, low=0, high=1, radius=(0.003, 0.009)), "#ffffff", alpha=0.9)


def _night(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#0b1036"), (0.45, "#262d70"), (0.8, "#6a559e"), (0.9, "#8f6aa8")])
    slope = rng.uniform(-0.3, 0.3)
    band = [(x, 0.3 + slope * (x - 0.5)) for x in np.linspace(0, 1, 14)]
    discs = [(x, y + rng.uniform(-0.06, 0.06), rng.uniform(0.04, 0.09)) for x, y in band]
    easel.dots(discs, "#8d87d6", alpha=0.4, blur=0.06)
    easel.dots(_scatter(rng, 110, low=0, high=0.78, radius=(0.0015, 0.0035)), "#ffffff", alpha=0.75)
    easel.dots(_scatter(rng, 22, low=0, high=0.7, radius=(0.004, 0.006)), "#fff6d8", alpha=0.9)
    easel.fill(_ridge(rng, 0.76, swing=0.035), [(0.7, "#3a3a7c"), (1, "#24285c")])
    easel.fill(_ridge(rng, 0.87, swing=0.025), [(0.82, "#1d2250"), (1, "#101438")])


def _city(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#4a3580"), (0.3, "#b2568f"), (0.55, "#f78f6b"), (0.78, "#ffd398")])
    _clouds(easel, rng, number=2, colour="#ffb7a0", alpha=0.35)
    _skyline(easel, rng, top=(0.42, 0.62), width=(0.06, 0.11), colour="#7d4d86", lit="")
    _skyline(easel, rng, top=(0.52, 0.8), width=(0.09, 0.16), colour="#3a2859", lit="#ffd87a")
    easel.fill([(0, 0.93), (1, 0.93), (1, 1), (0, 1)], [(0.93, "#2a1f45"), (1, "#1d1634")])
    stripes = [[(x, 0.967), (x + 0.06, 0.967)] for x in (0.04, 0.24, 0.44, 0.64, 0.84)]
    easel.lines(stripes, "#f3e2b8", width=0.008, alpha=0.7)


def _skyline(
    easel: _Easel, rng: random.Random, *, top: tuple[float, float], width: tuple[float, float], colour: str, lit: str
) -> None:
    """Towers side by side; with ``lit``, some windows are."""
    x = -rng.uniform(0, 0.05)
    while x < 1:
        right, roof = x + rng.uniform(*width), rng.uniform(*top)
        easel.fill([(x, roof), (right, roof), (right, 1), (x, 1)], [(0, colour), (1, colour)])
        if lit:
            columns, rows = np.arange(x + 0.018, right - 0.024, 0.03), np.arange(roof + 0.03, 0.9, 0.042)
            windows = [[(c, r), (c, r + 0.016)] for c in columns for r in rows if rng.random() < 0.4]
            easel.lines(windows, lit, width=0.011, alpha=0.85)
        x = right + rng.choice((0.0, 0.006))


def _desert(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#f3a45f"), (0.55, "#fde7b8")])
    for _ in range(2):
        x, roof, half = rng.uniform(0.1, 0.9), rng.uniform(0.38, 0.46), rng.uniform(0.08, 0.15)
        rock = [(x - half, roof), (x + half, roof), (x + 1.35 * half, 0.64), (x - 1.35 * half, 0.64)]
        easel.fill(rock, [(0.38, "#d98d5f"), (0.62, "#e5a874")])
        easel.lines([[(x - half, roof + 0.04), (x + half, roof + 0.04)]], "#b9683f", width=0.012, alpha=0.35)
    dunes = ((0.58, "#f2bf7c", "#e3a25e"), (0.7, "#e9a860", "#cf8443"), (0.83, "#dd9149", "#b96a30"))
    for height, light, dark in dunes:
        easel.fill(_ridge(rng, height, swing=0.035, waves=0.9), [(height - 0.05, light), (height + 0.16, dark)])
    ripples = _scatter(rng, 22, low=0.88, high=1.0, radius=(0.03, 0.08))
    paths = [[(x - half, y), (x, y - 0.008), (x + half, y)] for x, y, half in ripples]
    easel.lines(paths, "#f3bd7b", width=0.006, alpha=0.45)


def _underwater(easel: _Easel, rng: random.Random) -> None:
    easel.sky([(0, "#5fd3df"), (0.35, "#2594c4"), (1, "#0d3f80")])
    for _ in range(4):
        x, lean, half = rng.uniform(0, 1), rng.uniform(-0.2, 0.2), rng.uniform(0.02, 0.05)
        ray = [(x - half, -0.02), (x + half, -0.02), (x + lean + 2.4 * half, 0.9), (x + lean - 2.4 * half, 0.9)]
        easel.fill(ray, [(0, "#ffffff"), (1, "#2594c4")], alpha=0.22, blur=0.012)
    easel.fill(_ridge(rng, 0.82, swing=0.02), [(0.78, "#3f7f9c"), (1, "#2c6287")])
    for colour in ("#157a6e", "#1f9a7d"):
        weeds = []
        for x in (rng.random() for _ in range(5)):
            tall, phase = rng.uniform(0.12, 0.26), rng.uniform(0, 6)
            weeds.append([(x + 0.014 * math.sin(phase + 9 * step / 12), 1 - tall * step / 12) for step in range(13)])
        easel.lines(weeds, colour, width=0.018, alpha=0.9)
    easel.fill(_ridge(rng, 0.92, swing=0.015), [(0.88, "#d8c593"), (1, "#b7a273")])
    bubbles = _scatter(rng, 16, low=0.05, high=0.85, radius=(0.006, 0.014))
    easel.dots(bubbles, "#d9f6ff", alpha=0.55)
    easel.dots([(x, y, 0.7 * radius) for x, y, radius in bubbles], "#3aa3cd", alpha=0.7)


_PAINTERS: Mapping[str, Callable[[_Easel, random.Random], None]] = {
    painter.__name__[1:]: painter for painter in (_meadow, _beach, _snow, _night, _city, _desert, _underwater)
}
