"""A threshold that keeps the risk of wrong answers below a bound, with high probability.

Two parts of the queries, of images that share nothing. One chooses how confidence is measured, which thresholds are
tried and in which order. The other certifies: thresholds are tested in that order, each by an exact binomial bound,
until one fails; the last that passed is kept. As the order was fixed beforehand, the chance that a threshold with too
high a risk passes is at most δ for independent queries (fixed-sequence testing; "learn then test").

Queries of one image, its captions and their repeats in other galleries, fail together. So they count for fewer than
they are: as many as their design effect leaves, 1 + ρ(m − 1) for m answered queries an image. With it the bound holds
approximately: counts so shrunk are not binomial, and ρ is an estimate, from all queries of the choosing part rather
than from those that are answered.
"""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.evaluate.uncertainty import Array
from vacsr.scoring.bounds import binomial_tail, miss_rate_bound

FEW = 20
"""Queries behind a share that is to mean something."""
_GRID = 100  # thresholds that are tried


class Outcomes(NamedTuple):
    """Queries that certify."""

    value: Array  # [N] confidence
    wrong: NDArray[np.bool_]  # [N]
    image: NDArray[np.int64]  # [N] whose queries they are
    correlation: float  # of failures within an image


class Certified(NamedTuple):
    """The loosest threshold that passed, and what it rests on."""

    threshold: float | None
    answered: int
    wrong: int
    bound: float


def certify(found: Outcomes, thresholds: Array, *, risk: float, confidence: float) -> Certified:
    """The last threshold, in the order given, before the first whose risk cannot be shown to be below ``risk``.

    Exact for independent queries, approximate where the design effect shrinks the counts. The thresholds must not
    depend on which of these queries are wrong.

    >>> right = Outcomes(np.linspace(0, 1, 30), np.zeros(30, dtype=bool), np.arange(30), 0.0)
    >>> certify(right, np.array([0.2, 0.1]), risk=0.1, confidence=0.9).threshold
    0.1
    """
    kept, counted = Certified(None, 0, 0, 1.0), (0, 0)
    for threshold in thresholds.tolist():
        given = found.value >= threshold
        answered, failed = int(given.sum()), int((given & found.wrong).sum())
        shrink = design_effect(found.image[given], found.correlation) if answered else 1.0
        trials, misses = floor(answered / shrink), ceil(failed / shrink)
        # The same as asking whether Clopper and Pearson's bound is above the risk.
        if misses >= trials or binomial_tail(misses, trials, risk) > 1 - confidence:
            break
        kept, counted = Certified(threshold, answered, failed, 1.0), (misses, trials)
    return kept._replace(bound=miss_rate_bound(*counted, level=1 - confidence))


def design_effect(image: NDArray[np.int64], correlation: float) -> float:
    """How many queries of the same images tell as much as one: 1 + ρ(m − 1), m the mean company of a query. [N]

    >>> design_effect(np.array([0, 0, 1, 1]), 0.5)
    1.5
    """
    counts = np.bincount(image)
    company = float((counts**2).sum() / counts.sum())
    return 1 + max(0.0, correlation) * (company - 1)


def failure_correlation(chance: Array, wrong: NDArray[np.bool_], image: NDArray[np.int64]) -> float:
    """Intraclass correlation of what the confidence does not explain, at least 0. [N], [N], [N]

    Of the pairs of queries that share an image: the mean product of their residuals, over the mean square of all.
    """
    rest = wrong - (1 - chance)
    sums, squares, counts = (np.bincount(image, weights) for weights in (rest, rest**2, np.ones(len(rest))))
    pairs, spread = float((counts * (counts - 1)).sum()), float(squares.sum() / counts.sum())
    if not pairs or not spread:
        return 0.0
    return float(np.clip((sums**2 - squares).sum() / pairs / spread, 0, 1))


def trial_order(value: Array, wrong: NDArray[np.bool_], risk: float) -> Array:
    """Thresholds to try: from where a test has the most power, as far as this part can tell, to ever looser ones.

    The risk that this part suggests is the mean of what it shows and of what the confidence itself says, which is
    smoother. value [N], wrong [N] -> [T]
    """
    ordered = (-value).argsort(kind="stable")
    counts = np.unique(np.linspace(min(FEW, len(value)), len(value), _GRID).round().astype(np.int64))
    shown, said = (part[ordered].cumsum()[counts - 1] / counts for part in (wrong, 1 - value))
    start = int(((risk - (shown + said) / 2) * np.sqrt(counts)).argmax())
    return value[ordered][counts[start:] - 1]
