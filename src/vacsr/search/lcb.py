"""λ of "score − λσ", as a dev split says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    """Share of right first answers by score alone, on the split that λ was fitted on."""
    r1_fitted: float
    """The same with λ."""


class FirstRight(NamedTuple):
    """Whether the first answer is right, before and after."""

    by_score: float
    by_lcb: float


def fit_lcb(found: Candidates, *, depth: int) -> LcbRule:
    """λ with the most right first answers (R@1); 0 unless the gain is larger than its standard error.

    Both signs are tried: σ means doubt in the first ranks, and further down an unlabelled match.
    """
    base = float(found.right[:, 0].mean())
    if found.sigma is None:
        return LcbRule(depth=depth, r1=base, r1_fitted=base)
    sigma = found.sigma
    unit = float(found.score[:, : sigma.shape[1]].std() / (sigma.std() or 1.0))
    tried = [float(step * unit) for step in np.linspace(-_REACH, _REACH, _STEPS)]
    hits = {weight: _first_right(found, sigma, weight) for weight in tried}
    best = max(tried, key=lambda weight: (float(hits[weight].mean()), -abs(weight)))
    gain = _by_image(hits[best] - found.right[:, 0].astype(np.float64), found)
    if gain.mean() <= gain.std() / np.sqrt(len(gain)):
        best = 0.0
    return LcbRule(weight=best, depth=depth, r1=base, r1_fitted=float(_first_right(found, sigma, best).mean()))


def check_lcb(rule: LcbRule, found: Candidates) -> FirstRight:
    """R@1 by score and with λ, on other queries."""
    by_score = float(found.right[:, 0].mean())
    if found.sigma is None:
        return FirstRight(by_score, by_score)
    return FirstRight(by_score, float(_first_right(found, found.sigma, rule.weight).mean()))


def _first_right(found: Candidates, sigma: Array, weight: float) -> Array:
    """Is the candidate with the highest score − λσ right? [Q]"""
    first = (found.score[:, : sigma.shape[1]] - weight * sigma).argmax(1)
    return np.asarray(found.right[np.arange(len(first)), first], dtype=np.float64)


def _by_image(values: Array, found: Candidates) -> Array:
    """Means over the queries of an image, which are not independent. [Q] -> [I]"""
    count = np.bincount(found.image)
    return (np.bincount(found.image, values) / np.maximum(count, 1))[count > 0]
