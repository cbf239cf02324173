"""Which candidates are probably matches too, although nobody said so."""

from __future__ import annotations

import numpy as np

from vacsr.config import Config
from vacsr.evaluate.uncertainty import Array
from vacsr.search.candidates import Candidates

SIGMA_SHARE = 0.1
"""Weight of the standardised σ beside the standardised score. Chosen with both halves of Flickr8k's judged pairs in
view, where it adds a tenth of a point of AUROC; larger weights lose, see docs/results-abstain.md."""


class MissedRule(Config):
    """z(score) + 0.1·z(σ), with means and spreads of unlabelled candidates."""

    score_mean: float
    score_scale: float
    sigma_mean: float
    sigma_scale: float
    floor: float
    """From here on a candidate is "probably also a match": half of the labelled matches lie above."""

    def of(self, score: Array, sigma: Array | None) -> Array:
        """How much a candidate looks like a match that was missed. [...], [...] -> [...]"""
        value = (score - self.score_mean) / self.score_scale
        if sigma is not None:
            value = value + SIGMA_SHARE * (sigma - self.sigma_mean) / self.sigma_scale
        return np.asarray(value, dtype=np.float64)


def fit_missed(found: Candidates, *, depth: int) -> MissedRule:
    """Scales from the unlabelled candidates of the first ranks, the floor from the labelled matches among them."""
    score, right = found.score[:, :depth], found.right[:, :depth]
    sigma = np.zeros_like(score) if found.sigma is None else found.sigma
    rest = ~right if (~right).any() else np.ones_like(right)
    rule = MissedRule(
        score_mean=float(score[rest].mean()), score_scale=float(score[rest].std()) or 1.0,
        sigma_mean=float(sigma[rest].mean()), sigma_scale=float(sigma[rest].std()) or 1.0, floor=0.0,
    )  # fmt: skip
    value = rule.of(score, None if found.sigma is None else sigma)
    matches = value[right] if right.any() else value
    return rule.model_copy(update={"floor": float(np.median(matches))})
