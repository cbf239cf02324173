"""RandAugment: a few operations drawn from fourteen, all at one strength (Cubuk et al., 2020).

The operations are the paper's, their ranges AutoAugment's. Every one grows with the magnitude and begins at the photo
itself, but for autocontrast and equalize, which have no strength. Draws are passed in, so that training can make them
a function of seed, epoch and place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PIL import Image, ImageEnhance, ImageOps

from vacsr.errors import UsageError

LEVELS = 30
"""The magnitude at which every operation is at its strongest."""
DRAWS = 2
"""Numbers that one operation takes: which it is, and its direction."""

_SHEAR, _SHIFT, _TURN, _CHANGE = 0.3, 150.0 / 331.0, 30.0, 0.9  # of a side, of a side (150 pixels of 331), degrees, ± 1
_FILL = (128, 128, 128)  # what comes in from outside: grey

_Operation = Callable[[Image.Image, float], Image.Image]


def randaugment(photo: Image.Image, draws: Sequence[float], *, operations: int = 2, magnitude: int = 9) -> Image.Image:
    """``operations`` of the fourteen, one after the other; the same one may come twice.

    ``draws`` are uniform in [0, 1), :data:`DRAWS` for each operation. Gives RGB of the same size.

    >>> photo = Image.new("RGB", (8, 8), (10, 200, 90))
    >>> names = list(OPERATIONS)
    >>> solarize = (names.index("solarize") + 0.5) / len(names)
    >>> randaugment(photo, [solarize, 0.0], operations=1, magnitude=9).getpixel((0, 0))
    (10, 55, 90)
    """
    wanted = DRAWS * operations
    if len(draws) != wanted or not all(0.0 <= draw < 1.0 for draw in draws):
        raise UsageError(f"randaugment got the draws {list(draws)} — give {wanted}, each in [0, 1)")
    if not 0 <= magnitude <= LEVELS:
        raise UsageError(f"randaugment's magnitude is {magnitude} — give 0 to {LEVELS}")
    photo = photo if photo.mode == "RGB" else photo.convert("RGB")
    table = list(OPERATIONS.values())
    for place in range(operations):
        which, direction = draws[DRAWS * place], draws[DRAWS * place + 1]
        strength = magnitude / LEVELS
        photo = table[int(which * len(table))](photo, strength if direction < 0.5 else -strength)
    return photo


def _same(photo: Image.Image, strength: float) -> Image.Image:
    return photo


def _autocontrast(photo: Image.Image, strength: float) -> Image.Image:
    return ImageOps.autocontrast(photo)


def _equalize(photo: Image.Image, strength: float) -> Image.Image:
    return ImageOps.equalize(photo)


def _rotate(photo: Image.Image, strength: float) -> Image.Image:
    return photo.rotate(_TURN * strength, fillcolor=_FILL)


def _solarize(photo: Image.Image, strength: float) -> Image.Image:
    """Invert what is at least as bright as a threshold, 256 … 0; it has no direction."""
    return ImageOps.solarize(photo, round(256.0 * (1.0 - abs(strength))))


def _posterize(photo: Image.Image, strength: float) -> Image.Image:
    """Keep the upper 8 … 4 bits; it has no direction."""
    return ImageOps.posterize(photo, 8 - round(4.0 * abs(strength)))


def _color(photo: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Color(photo).enhance(1.0 + _CHANGE * strength)


def _contrast(photo: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Contrast(photo).enhance(1.0 + _CHANGE * strength)


def _brightness(photo: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Brightness(photo).enhance(1.0 + _CHANGE * strength)


def _sharpness(photo: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Sharpness(photo).enhance(1.0 + _CHANGE * strength)


def _shear_x(photo: Image.Image, strength: float) -> Image.Image:
    return _affine(photo, (1.0, _SHEAR * strength, 0.0, 0.0, 1.0, 0.0))


def _shear_y(photo: Image.Image, strength: float) -> Image.Image:
    return _affine(photo, (1.0, 0.0, 0.0, _SHEAR * strength, 1.0, 0.0))


def _translate_x(photo: Image.Image, strength: float) -> Image.Image:
    return _affine(photo, (1.0, 0.0, round(_SHIFT * photo.width * strength), 0.0, 1.0, 0.0))


def _translate_y(photo: Image.Image, strength: float) -> Image.Image:
    return _affine(photo, (1.0, 0.0, 0.0, 0.0, 1.0, round(_SHIFT * photo.height * strength)))


def _affine(photo: Image.Image, rows: tuple[float, float, float, float, float, float]) -> Image.Image:
    """Each pixel is the one at (a·x + b·y + c, d·x + e·y + f), the nearest; the top left corner is the origin."""
    return photo.transform(photo.size, Image.Transform.AFFINE, rows, fillcolor=_FILL)


OPERATIONS: dict[str, _Operation] = {
    "identity": _same,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "color": _color,
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
}
"""By the paper's names, in its order; each takes a photo and a strength in [−1, 1]."""
