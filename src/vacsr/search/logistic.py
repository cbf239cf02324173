"""Logistic regression by Newton's method: small, exact, without randomness."""

from __future__ import annotations

import numpy as np

from vacsr.config import Config
from vacsr.errors import ShapeMismatch
from vacsr.evaluate.uncertainty import Array

_STEPS = 50
_ENOUGH = 1e-10  # a step shorter than this changes nothing that is printed


class Logistic(Config):
    """P(yes) = sigmoid(weight · (x − mean) / scale + bias)."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weight: tuple[float, ...]
    bias: float

    def apply(self, signals: Array) -> Array:
        """[N, F] -> [N]"""
        if signals.ndim != 2 or signals.shape[1] != len(self.weight):
            raise ShapeMismatch(f"signals are {list(signals.shape)}, expected [N, {len(self.weight)}]")
        moved = (signals - np.array(self.mean)) / np.array(self.scale)
        return sigmoid(moved @ np.array(self.weight) + self.bias)


def fit_logistic(signals: Array, labels: Array, *, ridge: float = 1.0) -> Logistic:
    """The weights of highest likelihood under a normal prior of precision ``ridge``. [N, F], [N] -> Logistic

    Signals are standardised first, so the prior means the same for each; the bias has none to speak of.
    """
    mean, scale = signals.mean(0), signals.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.concatenate(((signals - mean) / scale, np.ones((len(signals), 1))), axis=1)
    prior = np.diag([ridge] * signals.shape[1] + [1e-3])
    weight = np.zeros(design.shape[1])
    for _ in range(_STEPS):
        chance = sigmoid(design @ weight)
        slope = design.T @ (chance - labels) + prior @ weight
        curve = design.T @ (design * (chance * (1 - chance))[:, None]) + prior
        newton = np.asarray(np.linalg.solve(curve, slope), dtype=np.float64)
        step = _damped(design, labels, weight=weight, step=newton, prior=prior)
        weight = weight - step
        if float(np.abs(step).max()) < _ENOUGH:
            break
    return Logistic(
        mean=tuple(mean.tolist()), scale=tuple(scale.tolist()), weight=tuple(weight[:-1].tolist()), bias=weight[-1]
    )


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^−x) without overflow. [N] -> [N]"""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)), dtype=np.float64)


def _damped(design: Array, labels: Array, *, weight: Array, step: Array, prior: Array) -> Array:
    """Newton's step, halved until the loss does not rise."""

    def loss(at: Array) -> float:
        logit = design @ at
        return float(np.logaddexp(0, logit).sum() - labels @ logit + at @ prior @ at / 2)

    here = loss(weight)
    for _ in range(30):
        if loss(weight - step) <= here:
            return step
        step = step / 2
    return np.zeros_like(step)
