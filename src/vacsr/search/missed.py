"""Which candidates are probably matches too, although nobody said so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vacsr.config import Config
from vacsr.evaluate.uncertainty import Array
from vacsr.search.candidates import Candidates

_WEIGHTS = (0.0, 0.05, -0.05, 0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.5, -0.5)  # tried; of equals the first is taken


class MissedRule(Config):
    """z(score) + w·z(σ), with means and spreads of unlabelled candidates."""

    score_mean: float
    score_scale: float
    sigma_mean: float
    sigma_scale: float
    sigma_weight: float = 0.0
    """w; 0 where σ does not help to tell matches from others."""
    floor: float
    """From here on a candidate is "probably also a match": half of the labelled matches lie above."""

    def of(self, score: Array, sigma: Array | None) -> Array:
        """How much a candidate looks like a match that was missed. [...], [...] -> [...]"""
        value = (score - self.score_mean) / self.score_scale
        if sigma is not None:
            value = value + self.sigma_weight * (sigma - self.sigma_mean) / self.sigma_scale
        return np.asarray(value, dtype=np.float64)


def fit_missed(found: Candidates, choose: NDArray[np.bool_], *, depth: int) -> MissedRule:
    """Scales from the unlabelled candidates of the first ranks, the floor from the labelled matches among them.

    Whoever hides a label makes a missed match. So w is the weight that puts labelled candidates over the unlabelled
    ones of their list most often, where ``choose`` [Q]; 0 unless it gains on the other queries too, by more than the
    standard error. No image may have queries in both parts.
    """
    score, right = found.score[:, :depth], found.right[:, :depth]
    sigma = np.zeros_like(score) if found.sigma is None else found.sigma
    rest = ~right if (~right).any() else np.ones_like(right)
    rule = MissedRule(
        score_mean=float(score[rest].mean()), score_scale=float(score[rest].std()) or 1.0,
        sigma_mean=float(sigma[rest].mean()), sigma_scale=float(sigma[rest].std()) or 1.0, floor=0.0,
    )  # fmt: skip
    if found.sigma is not None:
        rule = rule.model_copy(update={"sigma_weight": _weight(rule, found, choose)})
    value = rule.of(score, sigma)
    matches = value[right] if right.any() else value
    return rule.model_copy(update={"floor": float(np.median(matches))})


def _weight(rule: MissedRule, found: Candidates, choose: NDArray[np.bool_]) -> float:
    """w by the part that chooses, if the other part agrees."""
    shares = {w: _placed_above(rule.model_copy(update={"sigma_weight": w}), found) for w in _WEIGHTS}
    counted = ~np.isnan(shares[0.0])
    part, other = counted & choose, counted & ~choose
    if not part.any() or not other.any():
        return 0.0
    best = max(_WEIGHTS, key=lambda w: float(shares[w][part].mean()))
    _, image = np.unique(found.image[other], return_inverse=True)
    gain = np.bincount(image, (shares[best] - shares[0.0])[other]) / np.bincount(image)
    return best if gain.mean() > gain.std() / np.sqrt(len(gain)) else 0.0


def _placed_above(rule: MissedRule, found: Candidates) -> Array:
    """Share of the pairs (labelled, unlabelled) of a list with the labelled one higher; NaN without pairs. -> [Q]"""
    assert found.sigma is not None
    depth = found.sigma.shape[1]
    value, right = rule.of(found.score[:, :depth], found.sigma), found.right[:, :depth]
    ordered = np.take_along_axis(right, value.argsort(axis=1, kind="stable"), 1)  # lowest first
    below = (~ordered).cumsum(axis=1)
    pairs = (right.sum(1) * (~right).sum(1)).astype(np.float64)
    return np.asarray((below * ordered).sum(1) / np.where(pairs > 0, pairs, np.nan), dtype=np.float64)
