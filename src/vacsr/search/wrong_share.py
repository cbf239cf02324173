"""How many labels are wrong, with an interval, from agreements of labelled pairs and of unrelated ones.

On the scale of artanh, agreements of right pairs are close to a Gaussian. Wrong ones are distributed like unrelated
pairs, but shifted: training on a wrong label pulls its pair together. Shift and width are those with the largest
likelihood. docs/measurements.md says how often the interval holds.
"""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.methods.mixtures import falling

Array = NDArray[np.float64]
CONFIDENCE = 0.9
MARGIN, LEAST_MARGIN = 0.08, 0.01
"""Of the count, and at least of all labels: by so much the bootstrap interval is widened on each side, because no model
of wrong labels is exact. Chosen on Flickr8k with seed 0."""
_SHIFTS, _WIDTHS = np.arange(0, 2.01, 0.125), (1.0, 1.25, 1.5, 1.75)  # of the wrong, in deviations of the unrelated
MOST_OVERLAP = 0.4
"""Of right and wrong labels; with more, the model cannot tell them apart, and the interval is everything."""
_PENALTY = 5.0  # of the log-likelihood, per deviation of shift and for a width: chance alone should not choose them
_BINS, _STEPS, _RESAMPLES, _TINY = 400, 200, 100, 1e-12


class WrongCount(NamedTuple):
    """An estimate of how many labels are wrong, and an interval that should contain the true number."""

    value: int
    low: int
    high: int
    confidence: float
    at_least: bool  # wrong captions resemble their images, so nobody can say how many look right: `high` is all

    def __str__(self) -> str:
        interval = f"at least {self.low:,}" if self.at_least else f"{self.low:,} to {self.high:,}"
        return f"about {self.value:,} ({interval}, {self.confidence:.0%} confidence)"


class WrongShare(NamedTuple):
    """A mixture of right and wrong labels, fitted to a histogram of agreements."""

    at: Array  # [B] the middle of each bin
    bin: NDArray[np.int64]  # [M] of each labelled pair
    wrong: Array  # [C, B] density of the wrong, one candidate of shift and width each
    right: Array  # [3, C] share of the wrong, mean and deviation of the right
    chosen: int  # the candidate with the largest likelihood

    @classmethod
    def fit(cls, own: Tensor, unrelated: Tensor) -> Self:
        """From agreements of labelled pairs [M] and of unrelated ones [U]; cosines."""
        x, other = (np.arctanh(part.double().cpu().clamp(-0.9999, 0.9999).numpy()) for part in (own, unrelated))
        low, high = min(x.min(), other.min()), max(x.max(), other.max())
        pad = 0.1 * (high - low) + 1e-3
        edges = np.linspace(low - pad, high + pad, _BINS + 1)
        at, mean, std = (edges[1:] + edges[:-1]) / 2, other.mean(), other.std() + 1e-3
        kernel = np.exp(-0.5 * ((at - at[_BINS // 2]) / (1.06 * std * len(other) ** -0.2)) ** 2)
        wrong = []
        for width in _WIDTHS:
            for shift in _SHIFTS:
                moved = np.histogram(mean + shift * std + width * (other - mean), edges)[0]
                wrong.append(np.convolve(moved / len(other), kernel / kernel.sum(), "same") / (at[1] - at[0]) + _TINY)
        position = np.digitize(x, edges[1:-1])
        start = np.array([[0.3], [np.quantile(x, 0.75)], [0.5 * x.std() + 1e-3]]) * np.ones(len(wrong))
        mixture = cls(at, position, np.stack(wrong), start, 0)
        return mixture.refit(np.bincount(position, minlength=_BINS).astype(float), steps=_STEPS)

    def refit(self, bins: Array, *, steps: int) -> Self:
        """EM from where it is, for every candidate, on other numbers of pairs per bin [B]."""
        share, mean, std = self.right[..., None]
        for _ in range(steps):
            right = (1 - share) * _gaussian(self.at, mean, std)
            weight = bins * right / (share * self.wrong + right)
            total = weight.sum(1, keepdims=True) + _TINY
            mean = (weight * self.at).sum(1, keepdims=True) / total
            std = np.sqrt((weight * (self.at - mean) ** 2).sum(1, keepdims=True) / total).clip(self.at[1] - self.at[0])
            share = (1 - total / bins.sum()).clip(1e-6, 1 - 1e-6)
        likelihood = (bins * np.log(share * self.wrong + (1 - share) * _gaussian(self.at, mean, std))).sum(1)
        likelihood -= _PENALTY * (np.tile(_SHIFTS, len(_WIDTHS)) + (np.arange(len(likelihood)) >= len(_SHIFTS)))
        right = np.stack([share[:, 0], mean[:, 0], std[:, 0]])
        return self._replace(right=right, chosen=int(likelihood.argmax()))

    @property
    def share(self) -> float:
        return float(self.right[0, self.chosen])

    def probability(self) -> Tensor:
        """That each label is wrong; it falls as the agreement grows. [M] float64"""
        share, mean, std = self.right[:, self.chosen]
        wrong, right = share * self.wrong[self.chosen], (1 - share) * _gaussian(self.at, mean, std)
        return falling(torch.from_numpy(wrong / (wrong + right)), torch.from_numpy(self.at))[torch.from_numpy(self.bin)]

    def estimate(self, owner: Tensor, images: int, *, confidence: float = CONFIDENCE) -> WrongCount:
        """With an interval by bootstrap over images, as the captions of one depend on each other. ``owner`` [M]"""
        generator, rows = np.random.default_rng(0), owner.cpu().numpy()
        shares = []
        for _ in range(_RESAMPLES):
            drawn = generator.multinomial(images, np.full(images, 1 / images))[rows]
            if drawn.sum():
                again = self.refit(np.bincount(self.bin, drawn, _BINS).astype(float), steps=_STEPS // 10)
                shares.append(again.share)
        low, high = np.quantile(shares, [(1 - confidence) / 2, (1 + confidence) / 2])
        of = len(rows)
        margin = max(MARGIN * self.share, LEAST_MARGIN, of**-0.5)  # few labels say little
        low, high = of * max(0, min(low, self.share) - margin), of * min(1, max(high, self.share) + margin)
        at_least = self.chosen >= len(_SHIFTS)  # wider than unrelated pairs
        if self.overlap() > MOST_OVERLAP:
            low, high = 0, of
        most = of if at_least else int(np.ceil(high))
        return WrongCount(round(of * self.share), int(low), most, confidence, at_least)

    def overlap(self) -> float:
        """Of the densities of right and wrong labels: 0 where they are apart, 1 where they are the same."""
        _, mean, std = self.right[:, self.chosen]
        shared = np.minimum(self.wrong[self.chosen], _gaussian(self.at, mean, std))
        return float(shared.sum() * (self.at[1] - self.at[0]))


def _gaussian(x: Array, mean: Array, std: Array) -> Array:
    density: Array = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) + 1e-300
    return density
