"""Clean or noisy: two-component mixtures fitted to losses by EM. Small losses are clean pairs, large ones noisy."""

import math

import torch
from torch import Tensor

_TINY = 1e-12


def rescaled(x: Tensor) -> Tensor:
    """From the smallest to the largest onto [0, 1], in float64; 0 where all are equal. [n] -> [n]"""
    x = x.double()
    low, high = x.aminmax()
    return (x - low) / (high - low).clamp_min(_TINY)


@torch.no_grad()
def clean_by_gaussians(x: Tensor, *, steps: int = 10, tolerance: float = 1e-2, floor: float = 5e-4) -> Tensor:
    """Probability of the Gaussian with the smaller mean, after EM from :func:`two_means`. [n] -> [n]

    EM stops after ``steps``, or one step after the mean log-likelihood gained less than ``tolerance``. ``floor`` is
    added to the variances: a component cannot fall onto a point.
    """
    weight, values = two_means(x), x.unsqueeze(1)
    before, converged = -math.inf, False
    for _ in range(steps + 1):
        total = weight.sum(dim=0) + _TINY
        mean = (weight * values).sum(dim=0) / total
        variance = (weight * (values - mean).square()).sum(dim=0) / total + floor
        distance = (values - mean).square() / variance
        log_joint = (total / total.sum()).log() - 0.5 * (distance + variance.log() + math.log(2.0 * math.pi))
        weight = log_joint.softmax(dim=1)
        if converged:
            break
        likelihood = float(log_joint.logsumexp(dim=1).mean())
        before, converged = likelihood, abs(likelihood - before) < tolerance
    return weight[:, mean.argsort(stable=True)[0]]  # where all are equal, the component that has them stays first


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
def clean_by_betas(x: Tensor, *, steps: int = 10) -> Tensor:
    """Probability of the Beta that began at small values, after EM from Beta(1, 2) and Beta(2, 1). [n] -> [n]

    For values in [0, 1]; the M step matches mean and variance.
    """
    x = x.clamp(1e-4, 1.0 - 1e-4).unsqueeze(1)  # at 0 and 1 a density may be infinite
    share, alpha, beta = x.new_tensor([[0.5, 0.5], [1.0, 2.0], [2.0, 1.0]]).unbind()

    def joint() -> Tensor:  # share_k · Beta(x; alpha_k, beta_k), [n, 2]
        scale = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        return share * (scale + (alpha - 1.0) * x.log() + (beta - 1.0) * torch.log1p(-x)).exp()

    for _ in range(steps):
        weight = joint().clamp_min(_TINY)
        weight = weight / weight.sum(dim=1, keepdim=True)
        total = weight.sum(dim=0)
        mean = (weight * x).sum(dim=0) / total
        variance = (weight * (x - mean).square()).sum(dim=0) / total
        # A variance of mean·(1−mean) is the widest a Beta can have; values in (0, 1) stay below it.
        alpha = mean * (mean * (1.0 - mean) / variance.clamp_min(_TINY) - 1.0)
        share, beta = total / total.sum(), alpha * (1.0 - mean) / mean
    return joint()[:, 0] / (joint().sum(dim=1) + _TINY)


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


@torch.no_grad()
def trust_labels(scores: Tensor, unrelated: Tensor, *, steps: int = 50) -> Tensor:
    """The probability that a labelled pair is right, from its score and from those of unrelated pairs. [n], [m] -> [n]

    Right pairs are a Gaussian; wrong ones score like unrelated pairs, whose Gaussian is known. EM finds the share, mean
    and variance of the right ones. Without wrong labels the share goes to 1, where two free components would still
    split the scores.

    >>> right, wrong = torch.linspace(2, 6, 90), torch.linspace(-6, -2, 10)
    >>> trust = trust_labels(torch.cat((right, wrong)), torch.linspace(-7, -1, 500))
    >>> bool((trust[:90] > 0.9).all()), bool((trust[90:] < 0.1).all())
    (True, True)
    """
    x, known = scores.double(), unrelated.double()
    floor = 1e-3 * torch.cat((x, known)).std().clamp_min(_TINY)

    def log_density(mean: Tensor, std: Tensor) -> Tensor:
        return -0.5 * ((x - mean) / std).square() - std.log()

    wrong = log_density(known.mean(), known.std().clamp_min(floor))
    mean, std, share = x.quantile(0.75), x.std().clamp_min(floor), x.new_tensor(0.5)
    for _ in range(steps):
        weight = torch.sigmoid(share.logit() + log_density(mean, std) - wrong)
        total = weight.sum().clamp_min(_TINY)
        share = (total / len(x)).clamp(1e-3, 1.0 - 1e-3)
        mean = (weight * x).sum() / total
        std = ((weight * (x - mean).square()).sum() / total).sqrt().clamp_min(floor)
    return falling(weight, -x)
