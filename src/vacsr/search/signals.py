"""What a list of candidates says about its own first answer."""

from __future__ import annotations

import numpy as np

from vacsr.errors import UsageError
from vacsr.evaluate.uncertainty import Array

SIGNALS = ("score", "margin", "margin6", "odds_sharp", "odds", "odds_soft", "cosine", "cosine_odds")
"""Of any method; methods with an uncertainty add those of :data:`SIGMA_SIGNALS`."""
SIGMA_SIGNALS = ("sigma", "sigma5")
_TEMPERATURES = (0.1, 0.25, 0.5)  # of the odds, in spreads of the scores
_SIXTH = 5  # an image has up to five captions that are all right, so the sixth is the first that must be wrong
_CLEAR = 20.0  # odds beyond e^20 say no more than that


def signal_names(*, sigma: bool) -> tuple[str, ...]:
    """The columns of :func:`signals`."""
    return SIGNALS + SIGMA_SIGNALS if sigma else SIGNALS


def signals(score: Array, cosine: Array, sigma: Array | None, *, spread: float, cosine_spread: float) -> Array:
    """One row per query: how high the best candidate scores, how far ahead it is, and its uncertainty.

    ``score`` and ``cosine`` [Q, m] in order of falling score, ``sigma`` [Q, d] of the first ones. -> [Q, F]
    """
    if score.shape[1] < 2:
        raise UsageError("a confidence needs two candidates or more — search a larger index")
    value, near = score / spread, cosine / cosine_spread
    found = [value[:, 0], value[:, 0] - value[:, 1], value[:, 0] - value[:, min(_SIXTH, value.shape[1] - 1)]]
    found += [_odds(value / heat) for heat in _TEMPERATURES]
    found += [near[:, 0], _odds(near / _TEMPERATURES[1])]
    if sigma is not None:
        found += [sigma[:, 0], sigma[:, :5].mean(1)]
    return np.stack(found, axis=1)


def _odds(value: Array) -> Array:
    """Log odds of the first against all others, as a softmax sees them. [Q, m] -> [Q]"""
    rest = value[:, 1:]
    top = rest.max(1)
    total = top + np.log(np.exp(rest - top[:, None]).sum(1))
    return np.asarray(np.clip(value[:, 0] - total, -_CLEAR, _CLEAR), dtype=np.float64)
