"""Two-component mixtures of one-dimensional losses, fitted by EM: small losses are clean pairs, large ones noisy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_TINY = 1e-12
_INSIDE = 1e-4  # a Beta density has no moments' fit at 0 and 1


class Gaussians(NamedTuple):
    """Two normal distributions with their shares, the one with the smaller mean first; each [2]."""

    share: Tensor
    mean: Tensor
    variance: Tensor

    def log_joint(self, x: Tensor) -> Tensor:
        """log share_k + log N(x; mean_k, variance_k). [n] -> [n, 2]"""
        distance = (x.unsqueeze(1) - self.mean).square() / self.variance
        return self.share.log() - 0.5 * (distance + self.variance.log() + math.log(2.0 * math.pi))

    def first(self, x: Tensor) -> Tensor:
        """Probability of the first component. [n] -> [n]"""
        return self.log_joint(x).softmax(dim=1)[:, 0]


class Betas(NamedTuple):
    """Two Beta distributions with their shares, the one that began at small values first; each [2]."""

    share: Tensor
    alpha: Tensor
    beta: Tensor

    def joint(self, x: Tensor) -> Tensor:
        """share_k · Beta(x; alpha_k, beta_k). [n] -> [n, 2]"""
        x = x.unsqueeze(1)
        scale = torch.lgamma(self.alpha + self.beta) - torch.lgamma(self.alpha) - torch.lgamma(self.beta)
        return self.share * (scale + (self.alpha - 1.0) * x.log() + (self.beta - 1.0) * torch.log1p(-x)).exp()

    def first(self, x: Tensor) -> Tensor:
        """Probability of the first component; 0 and 1 are moved inside. [n] -> [n]"""
        joint = self.joint(_inside(x))
        return joint[:, 0] / (joint.sum(dim=1) + _TINY)


def rescaled(x: Tensor) -> Tensor:
    """From the smallest to the largest onto [0, 1], in float64; 0 where all are equal. [n] -> [n]"""
    x = x.double()
    low, high = x.aminmax()
    return (x - low) / (high - low).clamp_min(_TINY)


@torch.no_grad()
def fit_gaussians(x: Tensor, *, steps: int = 10, tolerance: float = 1e-2, floor: float = 5e-4) -> Gaussians:
    """EM from the two means of :func:`two_means`, until the mean log-likelihood gains less than ``tolerance``.

    ``floor`` is added to the variances: a component cannot fall onto a point. [n] -> two components
    """
    weight = two_means(x)
    mixture = _gaussians(x, weight, floor)
    before = -math.inf
    for _ in range(steps):
        joint = mixture.log_joint(x)
        likelihood = float(joint.logsumexp(dim=1).mean())
        mixture = _gaussians(x, joint.softmax(dim=1), floor)
        if abs(likelihood - before) < tolerance:
            break
        before = likelihood
    order = mixture.mean.argsort(stable=True)  # where all are equal, the component that has them stays first
    return Gaussians(*(values[order] for values in mixture))


def _gaussians(x: Tensor, weight: Tensor, floor: float) -> Gaussians:
    """The M step. [n], [n, 2] -> two components"""
    total = weight.sum(dim=0) + _TINY
    mean = (weight * x.unsqueeze(1)).sum(dim=0) / total
    variance = (weight * (x.unsqueeze(1) - mean).square()).sum(dim=0) / total + floor
    return Gaussians(total / total.sum(), mean, variance)


def two_means(x: Tensor, *, steps: int = 20) -> Tensor:
    """Lloyd's algorithm from the smallest and the largest value: which mean each is nearer to. [n] -> [n, 2], 0 or 1"""
    low, high = x.aminmax()
    for _ in range(steps):
        upper = x > 0.5 * (low + high)
        low = torch.where(upper, 0.0, x).sum() / (~upper).sum().clamp_min(1)
        high = torch.where(upper, x, 0.0).sum() / upper.sum().clamp_min(1)
    upper = x > 0.5 * (low + high)
    return torch.stack((~upper, upper), dim=1).to(x.dtype)


@torch.no_grad()
def fit_betas(x: Tensor, *, steps: int = 10) -> Betas:
    """EM for values in [0, 1] from Beta(1, 2) and Beta(2, 1); the M step matches mean and variance. [n]"""
    x = _inside(x)
    mixture = Betas(x.new_tensor([0.5, 0.5]), x.new_tensor([1.0, 2.0]), x.new_tensor([2.0, 1.0]))
    for _ in range(steps):
        weight = mixture.joint(x).clamp_min(_TINY)
        weight = weight / weight.sum(dim=1, keepdim=True)
        total = weight.sum(dim=0)
        mean = (weight * x.unsqueeze(1)).sum(dim=0) / total
        variance = (weight * (x.unsqueeze(1) - mean).square()).sum(dim=0) / total
        # A variance of mean·(1−mean) is the widest a Beta can have; values in (0, 1) stay below it.
        alpha = mean * (mean * (1.0 - mean) / variance.clamp_min(_TINY) - 1.0)
        mixture = Betas(total / total.sum(), alpha, alpha * (1.0 - mean) / mean)
    return mixture


def falling(probability: Tensor, x: Tensor) -> Tensor:
    """A probability made to fall as x grows: its peak for all before the peak, and no rise after it. [n], [n] -> [n]

    Two densities may cross twice, so that a mixture calls its largest values clean again.

    >>> falling(torch.tensor([0.9, 0.5, 0.1, 0.7]), torch.tensor([1.0, 0.0, 2.0, 3.0]))
    tensor([0.9000, 0.9000, 0.1000, 0.1000])
    """
    order = x.argsort()
    value = probability[order]
    before = torch.arange(len(value), device=x.device) <= value.argmax()
    value = torch.where(before, value.max(), value).cummin(dim=0).values
    return torch.empty_like(value).scatter(0, order, value)


def _inside(x: Tensor) -> Tensor:
    return x.clamp(_INSIDE, 1.0 - _INSIDE)
