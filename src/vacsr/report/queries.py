"""What each query adds to a figure of a report: the figure is the sum of the directions' means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vacsr.evaluate.outcomes import Outcomes, QueryOutcomes

Array = NDArray[np.float64]
_RECALLS = {"r1": 1, "r5": 5, "r10": 10}


def outcomes_of(outcomes: Sequence[Outcomes], key: str) -> Outcomes | None:
    """Those of a column key's split and protocol; of a split alone, the first."""
    split, _, protocol = key.partition(".")[0].partition("/")
    found = [one for one in outcomes if one.split == split and protocol in ("", one.protocol)]
    return found[0] if found else None


def contributions(outcomes: Outcomes, key: str) -> dict[str, Array] | None:
    """Per direction what each query adds, in percent; None for figures that are no means over queries. [Q] each

    `test.rsum` has both directions, `test.i2t.r1` one, `test.mean.map_at_r` half of each.
    """
    figure = key.split(".")[1:]
    if figure == ["rsum"]:
        return {name: sum((_values(one, k) for k in _RECALLS), np.zeros(1)) for name, one in _directions(outcomes)}
    if len(figure) != 2 or figure[1] not in (*_RECALLS, "map_at_r"):
        return None
    direction, name = figure
    if direction == "mean":
        return {place: _values(one, name) / 2 for place, one in _directions(outcomes)}
    return {place: _values(one, name) for place, one in _directions(outcomes) if place == direction} or None


def _directions(outcomes: Outcomes) -> tuple[tuple[str, QueryOutcomes], ...]:
    return ("i2t", outcomes.i2t), ("t2i", outcomes.t2i)


def _values(found: QueryOutcomes, name: str) -> Array:
    """Percent, NaN for a query that is not asked. -> [Q]"""
    if name == "map_at_r":
        return 100 * found.average_precision.double().numpy()
    best = found.best_rank.double().numpy()
    return np.where(np.isnan(best), np.nan, 100.0 * (best <= _RECALLS[name]))
