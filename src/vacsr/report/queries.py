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

    `test.rsum` has both directions, `test.i2t.r1` one, `test.mean.map_at_r` half of each. None too where a direction's
    outcomes do not hold the figure: files of earlier versions have no R-precision.
    """
    figure = key.split(".")[1:]
    if figure == ["rsum"]:
        recalls = _RECALLS.values()
        return {place: sum((_hits(one, k) for k in recalls), np.zeros(1)) for place, one in _directions(outcomes)}
    if len(figure) != 2:
        return None
    direction, name = figure
    share = 0.5 if direction == "mean" else 1.0
    asked = [(place, one) for place, one in _directions(outcomes) if direction in (place, "mean")]
    found = {place: share * values for place, one in asked if (values := _values(one, name)) is not None}
    return found if found and len(found) == len(asked) else None


def _directions(outcomes: Outcomes) -> tuple[tuple[str, QueryOutcomes], ...]:
    return ("i2t", outcomes.i2t), ("t2i", outcomes.t2i)


def _values(found: QueryOutcomes, name: str) -> Array | None:
    """Percent, NaN for a query that is not asked; None for what is not kept. -> [Q]"""
    if name in _RECALLS:
        return _hits(found, _RECALLS[name])
    shares = {"map_at_r": found.average_precision, "r_precision": found.r_precision}.get(name)
    return None if shares is None else 100 * shares.double().numpy()


def _hits(found: QueryOutcomes, k: int) -> Array:
    """100 where a relevant item is among the first k, else 0. -> [Q]"""
    best = found.best_rank.double().numpy()
    return np.where(np.isnan(best), np.nan, 100.0 * (best <= k))
