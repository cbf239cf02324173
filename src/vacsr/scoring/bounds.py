"""How many misses may hide behind those that a sample shows."""

from __future__ import annotations

import math

_STEPS = 60  # of bisection: the bound is exact to float precision


def binomial_tail(count: int, trials: int, rate: float) -> float:
    """P(X ≤ count) of X ~ Binomial(trials, rate), 0 < rate < 1.

    >>> round(binomial_tail(1, 3, 0.5), 12)
    0.5
    """
    odds = math.log(rate) - math.log1p(-rate)
    start = math.lgamma(trials + 1) + trials * math.log1p(-rate)
    terms = (start - math.lgamma(n + 1) - math.lgamma(trials - n + 1) + n * odds for n in range(count + 1))
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def miss_rate_bound(missed: int, trials: int, *, level: float) -> float:
    """The largest miss rate that would show so few misses with probability ``level``: Clopper and Pearson's bound.

    >>> round(miss_rate_bound(0, 100, level=0.05), 4)  # the rule of three
    0.0295
    """
    if missed >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if binomial_tail(missed, trials, middle) > level:
            low = middle
        else:
            high = middle
    return high


def mean_level(level: float, *, parts: int) -> float:
    """The level at which the bound also holds for the mean of shares in [0, 1] instead of hits and misses.

    By Bentkus' inequality the tail of such a sum is at most e times the binomial one at the next whole number.
    """
    return level if parts == 1 else level / math.e
