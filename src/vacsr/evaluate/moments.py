"""Mean and spread of values in a known range, of any finite size.

Values are taken times a power of two that brings the largest near 1, so that no square overflows or vanishes, and sums
are taken about the middle of the range, where they lose little.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Spot(NamedTuple):
    """Where values lie; from infinity to −infinity of none."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """A power of two that brings both ends between −2 and 2."""
        largest = math.frexp(max(abs(self.low), abs(self.high)))[1]
        return math.ldexp(1.0, max(-1023, min(1000, -largest)))

    def scaled(self) -> Spot:
        """Both ends times the scale."""
        return Spot(self.low * self.scale, self.high * self.scale)

    def joined(self, other: Spot) -> Spot:
        """From the lower of the low ends to the higher of the high ones."""
        return Spot(min(self.low, other.low), max(self.high, other.high))


class Moments:
    """Mean and standard deviation (of all values, not of a sample) of what was added."""

    def __init__(self, span: Spot) -> None:
        self.span, self.number, self.scale = span, 0, span.scale
        self.middle = sum(span.scaled()) / 2 if span.low <= span.high else 0.0
        self.total = self.squares = 0.0

    def add(self, values: Tensor, left_out: tuple[Tensor, ...] | None = None) -> None:
        """Some more, but for those at ``left_out``, an index into them. float64 [...]"""
        away = values * self.scale - self.middle
        self.number += away.numel()
        if left_out is not None:
            away[left_out] = 0.0
            self.number -= len(left_out[0])
        flat = away.reshape(-1)
        self.total += float(flat.sum())
        self.squares += float(torch.dot(flat, flat))

    @property
    def shift(self) -> float:
        """The mean less the middle, scaled."""
        return self.total / self.number

    @property
    def variance(self) -> float:
        """Scaled."""
        return max(0.0, self.squares / self.number - self.shift * self.shift)

    @property
    def mean(self) -> float:
        """NaN of none."""
        if not self.number:
            return math.nan
        return min(max((self.middle + self.shift) / self.scale, self.span.low), self.span.high)

    @property
    def std(self) -> float:
        """NaN of none; at most half of the range, where rounding might say more."""
        if not self.number:
            return math.nan
        return min(math.sqrt(self.variance) / self.scale, self.span.high / 2 - self.span.low / 2)


def joined(first: Moments, second: Moments) -> Moments:
    """As if all had been added to one."""
    if not first.number or not second.number:
        return first if first.number else second
    whole = Moments(first.span.joined(second.span))
    whole.number = first.number + second.number
    one, two = whole.scale / first.scale, whole.scale / second.scale
    share = second.number / whole.number
    # The gap between the means from that between the middles, of which little is lost.
    gap = (second.middle * two - first.middle * one) + (second.shift * two - first.shift * one)
    shift = (first.middle * one - whole.middle) + first.shift * one + share * gap
    variance = (1 - share) * first.variance * one * one + share * second.variance * two * two
    variance += share * (1 - share) * gap * gap
    whole.total = shift * whole.number
    whole.squares = (variance + shift * shift) * whole.number
    return whole
