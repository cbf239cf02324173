"""Paired bootstrap over queries: would another draw of queries say the same of two systems?

Both systems answered the same queries, so what is drawn anew, with replacement, are the queries' differences. Images
and captions are drawn apart, each as often as there are; all comparisons share the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ELEMENTS = 1 << 22  # drawn queries in memory at a time


class Interval(NamedTuple):
    """A difference and where it lies in 95% of the draws."""

    difference: float
    low: float
    high: float
    p: float
    """Two-sided: twice the share of draws on the rarer side of 0, the data themselves counted as one draw."""


def paired_bootstrap(parts: Sequence[Array], *, draws: int = 10_000, seed: int = 0) -> list[Interval]:
    """C comparisons at once; a figure is the sum over ``parts`` (image queries, caption queries) of a mean.

    Each part holds what each query adds to one system's figure less what it adds to the other's. [Q_part, C] -> C

    >>> better = np.full((50, 1), 2.0)
    >>> paired_bootstrap([better], draws=100)[0].low
    2.0
    """
    generator = np.random.default_rng(seed)
    drawn = sum(drawn_means(part, draws=draws, generator=generator) for part in parts)
    assert not isinstance(drawn, int), "at least one part"
    difference = np.sum([part.mean(axis=0) for part in parts], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    rarer = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    p = np.minimum(1.0, 2 * (rarer + 1) / (draws + 1))
    return [Interval(*map(float, found)) for found in zip(difference, low, high, p, strict=True)]


def drawn_means(values: Array, *, draws: int, generator: np.random.Generator) -> Array:
    """Means over queries drawn with replacement. [Q, C] -> [draws, C]"""
    queries = len(values)
    means = np.empty((draws, values.shape[1]))
    step = max(1, _ELEMENTS // queries)
    for start in range(0, draws, step):
        count = min(step, draws - start)
        chosen = generator.integers(0, queries, (count, queries)) + queries * np.arange(count)[:, None]
        times = np.bincount(chosen.ravel(), minlength=count * queries).reshape(count, queries)
        means[start : start + count] = times @ values / queries
    return means
