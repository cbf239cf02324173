"""λ of "score − λσ", as a dev split says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.config import Config
from vacsr.evaluate.uncertainty import Array
from vacsr.search.candidates import Candidates

_REACH = 2.0  # the largest |λ|, in spreads of the score over spreads of σ
_STEPS = 41  # odd, so that 0 is among them


class LcbRule(Config):
    """Order the first ``depth`` by score − λσ."""

    weight: float = 0.0
    """λ; negative where uncertain candidates deserve to rise, 0 where σ does not help."""
    depth: int
    r1: float
    """Share of right first answers by score alone, on the part of the split that did not choose λ."""
    r1_fitted: float
    """The same with λ. That part decided whether λ stays, so where it did the gain is a little flattered."""


class FirstRight(NamedTuple):
    """Whether the first answer is right, before and after."""

    by_score: float
    by_lcb: float


def fit_lcb(found: Candidates, choose: NDArray[np.bool_], *, depth: int) -> LcbRule:
    """λ with the most right first answers (R@1) where ``choose`` [Q]; 0 unless it gains on the other queries too.

    The gain there has to be larger than its standard error: the best of many λ always gains where it was chosen. No
    image may have queries in both parts. Both signs are tried: σ means doubt in the first ranks, and further down an
    unlabelled match.
    """
    part, rest = found.take(choose), found.take(~choose)
    base = float(rest.right[:, 0].mean())
    if part.sigma is None or rest.sigma is None:
        return LcbRule(depth=depth, r1=base, r1_fitted=base)
    best = _best_weight(part, part.sigma)
    by_lcb = _first_right(rest, rest.sigma, best)
    gain = _by_image(by_lcb - rest.right[:, 0].astype(np.float64), rest)
    if gain.mean() <= gain.std() / np.sqrt(len(gain)):
        return LcbRule(depth=depth, r1=base, r1_fitted=base)
    return LcbRule(weight=best, depth=depth, r1=base, r1_fitted=float(by_lcb.mean()))


def check_lcb(rule: LcbRule, found: Candidates) -> FirstRight:
    """R@1 by score and with λ, on other queries."""
    by_score = float(found.right[:, 0].mean())
    if found.sigma is None:
        return FirstRight(by_score, by_score)
    return FirstRight(by_score, float(_first_right(found, found.sigma, rule.weight).mean()))


def _best_weight(found: Candidates, sigma: Array) -> float:
    """λ with the highest R@1, the smallest such."""
    unit = float(found.score[:, : sigma.shape[1]].std() / (sigma.std() or 1.0))
    tried = [float(step * unit) for step in np.linspace(-_REACH, _REACH, _STEPS)]
    return max(tried, key=lambda weight: (float(_first_right(found, sigma, weight).mean()), -abs(weight)))


def _first_right(found: Candidates, sigma: Array, weight: float) -> Array:
    """Is the candidate with the highest score − λσ right? [Q]"""
    first = (found.score[:, : sigma.shape[1]] - weight * sigma).argmax(1)
    return np.asarray(found.right[np.arange(len(first)), first], dtype=np.float64)


def _by_image(values: Array, found: Candidates) -> Array:
    """Means over the queries of an image, which are not independent. [Q] -> [I]"""
    count = np.bincount(found.image)
    return (np.bincount(found.image, values) / np.maximum(count, 1))[count > 0]
