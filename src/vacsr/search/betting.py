"""Is the mean of bounded values below zero? A test by betting, good for any number of values and any distribution.

A gambler starts with a capital of 1 and stakes a part of it on each value, before it is seen: a negative value wins, a
positive one loses, in proportion. If the mean is zero or more, no way of staking gains on average, so the capital
reaches 1/δ with a chance of at most δ (Ville's inequality; Waudby-Smith and Ramdas 2024).

How to stake only decides the power. The number of values is known, so the stake is the one that would hedge a bet on
"the sum ends low enough" if values were normal: it looks at the capital that is still missing and at the values that
are left (the idea of Voráček and Orabona's STaR-bets). That comes close to the test that knows the distribution.
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from vacsr.evaluate.uncertainty import Array

_AIM = 1.05  # the aim over 1/δ: a hedge comes near its aim and seldom quite there
_NOTHING = 1e-12  # share of the aim that cannot come back
_NORMAL = NormalDist()


class Bounds(NamedTuple):
    """What is known of the values beforehand."""

    lowest: float  # below 0
    highest: float  # above 0
    spread: float  # root of the mean square, a guess: a bad one costs power, never validity


def mean_is_negative(values: Array, bounds: Bounds, *, level: float) -> bool:
    """Reject "the mean is zero or more" at this level. values [N], independent and in random order

    >>> mean_is_negative(np.full(40, -0.1), Bounds(-0.1, 0.9, 0.3), level=0.1)
    True
    """
    return bool(capital(values, bounds, level=level)[-1] >= 1 / level)


def capital(values: Array, bounds: Bounds, *, level: float) -> Array:
    """The gambler's capital before the first value and after each; who has 1/``level`` stops. [N] -> [N + 1]

    A larger value, anywhere, never leads to more capital at any later time.
    """
    found = np.ones(len(values) + 1)
    for n, value in enumerate(values.tolist()):
        held = float(found[n])
        if value and held < 1 / level:
            held -= value * stake(held, bounds, left=len(values) - n, level=level)
        found[n + 1] = held
    return found


def stake(held: float, bounds: Bounds, *, left: int, level: float) -> float:
    """What is won for each unit below zero and lost for each above, with ``left`` values to come.

    Never more than can be lost, and never more than the best value needs to reach the aim. Between these limits it is
    concave in the capital, hence whoever has more now will not have less later.
    """
    aim = _AIM / level
    share = held / aim
    if share < _NOTHING:
        return 0.0
    hedge = aim * _NORMAL.pdf(_NORMAL.inv_cdf(share)) / (bounds.spread * sqrt(left))
    return min(hedge, held / bounds.highest, (aim - held) / -bounds.lowest)


def growth(values: Array, bounds: Bounds) -> float:
    """How fast the capital would grow on values like these with the best constant stake, to second order. [N]

    Says beforehand, on other values, which of several tests has the most power.
    """
    mean, square = float(values.mean()), bounds.spread**2
    share = min(max(0.0, -mean / square), 1 / bounds.highest)
    return -share * mean - share**2 * square / 2
