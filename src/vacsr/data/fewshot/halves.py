"""Base and new classes: the two halves of the base-to-novel protocol."""

from __future__ import annotations

from typing import NamedTuple

from vacsr.errors import UsageError


class BaseNew(NamedTuple):
    """Labels of all classes, in two halves; :meth:`LabelledPhotos.only` relabels each from 0."""

    base: tuple[int, ...]
    """Seen in training."""
    new: tuple[int, ...]
    """Met in the test only."""


def base_and_new(classes: int) -> BaseNew:
    """The first half of the sorted labels is base, the larger one where the count is odd.

    >>> base_and_new(5)
    BaseNew(base=(0, 1, 2), new=(3, 4))
    """
    if classes < 2:
        raise UsageError(f"{classes} classes cannot be halved into base and new — use a data set with two or more")
    middle = (classes + 1) // 2
    return BaseNew(tuple(range(middle)), tuple(range(middle, classes)))
