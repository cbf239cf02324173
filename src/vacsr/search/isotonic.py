"""A rising step function through labels: pool adjacent violators."""

from __future__ import annotations

import numpy as np

from vacsr.config import Config
from vacsr.errors import DataError
from vacsr.evaluate.uncertainty import Array, Values, as_vector, check_length


class Isotonic(Config):
    """Corners of a rising line; between two of them it is straight, beyond the ends flat."""

    x: tuple[float, ...]
    """[B], rising."""
    y: tuple[float, ...]
    """[B], never falling."""

    def apply(self, values: Values) -> Array:
        """The line at each value. [N] -> [N]

        >>> Isotonic(x=(0.0, 1.0), y=(0.2, 0.6)).apply([-1.0, 0.5, 2.0])
        array([0.2, 0.4, 0.6])
        """
        return np.interp(as_vector("values", values), self.x, self.y)


def fit_isotonic(values: Values, labels: Values) -> Isotonic:
    """The rising function of the values that is nearest to the labels in squares. values [N], labels [N]

    Equal values share one level.

    >>> fit_isotonic([1, 2, 3, 4], [0, 1, 0, 1]).y
    (0.0, 0.5, 0.5, 1.0)
    """
    x, y = as_vector("values", values), as_vector("labels", labels)
    check_length(x, y)
    if not len(x):
        raise DataError("no values to fit a rising function to — give some pairs")
    places, group, size = np.unique(x, return_inverse=True, return_counts=True)
    level = pool_adjacent_violators(np.bincount(group, y) / size, size.astype(np.float64))
    # Only the ends of a block are corners: what lies between is on the line anyway.
    inner = (level[1:-1] == level[:-2]) & (level[1:-1] == level[2:])
    keep = np.concatenate(([True], ~inner, [True]))[: len(places)] if len(places) > 1 else np.array([True])
    return Isotonic(x=tuple(places[keep].tolist()), y=tuple(level[keep].tolist()))


def pool_adjacent_violators(values: Array, weights: Array) -> Array:
    """The nearest sequence that never falls, in weighted squares. [N], [N] -> [N]

    >>> pool_adjacent_violators(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    array([2., 2., 2.])
    """
    mean: list[float] = []
    weight: list[float] = []
    count: list[int] = []
    for value, heavy in zip(values.tolist(), weights.tolist(), strict=True):
        mean.append(value)
        weight.append(heavy)
        count.append(1)
        while len(mean) > 1 and mean[-2] >= mean[-1]:  # a fall: both become one block with their mean
            last, mass, items = mean.pop(), weight.pop(), count.pop()
            mean[-1] = (mean[-1] * weight[-1] + last * mass) / (weight[-1] + mass)
            weight[-1] += mass
            count[-1] += items
    return np.repeat(np.array(mean, dtype=np.float64), count)
