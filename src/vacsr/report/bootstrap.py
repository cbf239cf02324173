"""Paired bootstrap over queries: would another draw of images say the same of two systems?

Both systems answered the same queries, so what is drawn anew, with replacement, are the queries' differences. An image
is drawn with its captions, since these fare alike: drawn apart they would make intervals too narrow by a fifth. All
comparisons share the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ELEMENTS = 1 << 22  # drawn images in memory at a time


class Interval(NamedTuple):
    """A difference and where it lies in 95% of the draws."""

    difference: float
    low: float
    high: float
    p: float
    """Two-sided: twice the share of draws on the rarer side of 0, the data themselves counted as one draw."""


class Part(NamedTuple):
    """One direction's queries: what each adds to one system's figure less what it adds to the other's."""

    values: Array
    """[Q, C], C comparisons at once"""
    image: NDArray[np.int64]
    """The image that each query is, or belongs to. [Q]"""


def paired_bootstrap(parts: Sequence[Part], *, draws: int = 10_000, seed: int = 0) -> list[Interval]:
    """C comparisons at once; a figure is the sum over ``parts`` (image queries, caption queries) of a mean. -> C

    >>> better = Part(np.full((50, 1), 2.0), np.arange(50))
    >>> paired_bootstrap([better], draws=100)[0].low
    2.0
    """
    drawn = drawn_figures(parts, draws=draws, generator=np.random.default_rng(seed))
    difference = np.sum([part.values.mean(axis=0) for part in parts], axis=0)
    return [interval(float(found), own) for found, own in zip(difference, drawn.T, strict=True)]


def interval(difference: float, drawn: Array) -> Interval:
    """A difference with its 95% interval, from what it was in each draw. [D]"""
    low, high = np.quantile(drawn, [0.025, 0.975])
    rarer = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return Interval(difference, float(low), float(high), min(1.0, 2 * (rarer + 1) / (len(drawn) + 1)))


def drawn_figures(parts: Sequence[Part], *, draws: int, generator: np.random.Generator) -> Array:
    """The figure over images drawn with replacement; a draw without any query of some part is left out. -> [D, C]"""
    images, place = np.unique(np.concatenate([part.image for part in parts]), return_inverse=True)
    owners = np.split(place, np.cumsum([len(part.image) for part in parts])[:-1])
    grouped = [_by_image(part.values, owner, len(images)) for part, owner in zip(parts, owners, strict=True)]
    found = []
    step = max(1, _ELEMENTS // len(images))
    for start in range(0, draws, step):
        times = _times(min(step, draws - start), len(images), generator)
        with np.errstate(invalid="ignore"):  # 0/0: no query of this part was drawn
            found.append(sum(times @ total / (times @ count) for total, count in grouped))
    figures = np.concatenate(found)
    return figures[~np.isnan(figures).any(axis=1)]


def _by_image(values: Array, owner: NDArray[np.int64], images: int) -> tuple[Array, Array]:
    """Sum and number of each image's queries. [Q, C], [Q] -> [I, C], [I, 1]"""
    total = np.zeros((images, values.shape[1]))
    np.add.at(total, owner, values)
    return total, np.bincount(owner, minlength=images)[:, None].astype(float)


def _times(draws: int, images: int, generator: np.random.Generator) -> Array:
    """How often each image is drawn. -> [draws, I]"""
    chosen = generator.integers(0, images, (draws, images)) + images * np.arange(draws)[:, None]
    return np.bincount(chosen.ravel(), minlength=draws * images).reshape(draws, images).astype(float)
