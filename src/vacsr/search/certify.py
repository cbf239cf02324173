"""A threshold that keeps the risk of wrong answers below a bound, with high probability; and a count that checks it.

One part of the images chooses thresholds and their order. The others certify them in that order until one fails
(fixed-sequence testing): a threshold with too high a risk passes with a chance of at most δ. Queries of one image fail
together, so an image is one observation: its wrong answers less α times its answers. The risk is below α exactly if the
mean of that is negative.

The test is a bet. A gambler stakes a part of a capital of 1 on each value before it is seen: negative values win. If
the mean is zero or more, the capital reaches 1/δ with a chance of at most δ (Ville's inequality; Waudby-Smith and
Ramdas 2024). The stake only decides the power: it hedges a bet on "the sum ends low enough" as if values were normal
(Voráček and Orabona's STaR-bets). Images are taken as independent; those of one gallery are not quite.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.evaluate.uncertainty import Array

FEW = 20
"""Queries behind a share that is to mean something."""
_GRID = 50  # thresholds that are tried
_AIM = 1.05  # the aim over 1/δ: a hedge comes near its aim and seldom quite there
_NOTHING = 1e-12  # share of the aim that cannot come back
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)  # for an interval of 95%


class Bounds(NamedTuple):
    """What is known of the values beforehand."""

    lowest: float  # below 0
    highest: float  # above 0
    spread: float  # root of the mean square, a guess: a bad one costs power, never validity


class Outcomes(NamedTuple):
    """Queries with known answers."""

    value: Array  # [N] confidence
    wrong: NDArray[np.bool_]  # [N]
    image: NDArray[np.int64]  # [N] whose queries they are
    query: NDArray[np.int64]  # [N] the same number for repeats in other galleries


class Trial(NamedTuple):
    """A threshold, and what to expect of the losses of images at it."""

    threshold: float
    bounds: Bounds


def certify(
    outcomes: Outcomes, trials: Sequence[Trial], *, risk: float, level: float, generator: np.random.Generator
) -> float | None:
    """The last threshold before the first whose risk cannot be shown to be below ``risk``, at this level.

    The trials must not depend on these queries, only on others. The generator draws the order of the images.

    >>> right = Outcomes(np.linspace(0, 1, 90), np.zeros(90, dtype=bool), np.arange(90), np.arange(90))
    >>> trials = [Trial(0.2, Bounds(-0.1, 0.9, 0.3)), Trial(0.1, Bounds(-0.1, 0.9, 0.3))]
    >>> certify(right, trials, risk=0.1, level=0.1, generator=np.random.default_rng(0))
    0.1
    """
    certified = None
    order = generator.permutation(len(np.unique(outcomes.image)))
    for threshold, bounds in trials:
        most = min(-bounds.lowest / risk, bounds.highest / (1 - risk))
        losses = image_losses(outcomes, threshold, risk=risk, most=most)[order]
        if not mean_is_negative(losses, bounds, level=level):
            break
        certified = threshold
    return certified


def image_losses(outcomes: Outcomes, threshold: float, *, risk: float, most: float = inf) -> Array:
    """Wrong answers less ``risk`` times answers, of each image, in the mean over the repeats of a query. -> [images]

    An image with more than ``most`` queries, answered or not, weighs as if it had so many.

    >>> asked = Outcomes(np.ones(4), np.array([1, 0, 0, 0], dtype=bool), np.array([5, 5, 5, 7]), np.array([0, 0, 1, 2]))
    >>> image_losses(asked, 0.5, risk=0.1)
    array([ 0.3, -0.1])
    """
    loss = (outcomes.value >= threshold) * (outcomes.wrong - risk) * _weights(outcomes)
    _, image = np.unique(outcomes.image, return_inverse=True)
    return np.asarray(np.bincount(image, loss) * np.minimum(1, most / queries_per_image(outcomes)), dtype=np.float64)


def queries_per_image(outcomes: Outcomes) -> Array:
    """How many each image has, repeats counted once. -> [images]"""
    _, image = np.unique(outcomes.image, return_inverse=True)
    whole = np.bincount(image, _weights(outcomes)).round(9)  # but for the repeats of a query, which are added up
    return np.asarray(whole, dtype=np.float64)


def _weights(outcomes: Outcomes) -> Array:
    """One over the number of repeats. -> [N]"""
    _, query, count = np.unique(outcomes.query, return_inverse=True, return_counts=True)
    return np.asarray(1 / count[query], dtype=np.float64)


def countable_level(confidence: float) -> float:
    """δ for the true risk, such that a share *counted* elsewhere stays below the bound with this confidence.

    A count over as many images as certified has as much noise as the certificate, so the margin grows by √2.

    >>> round(countable_level(0.9), 3)
    0.035
    """
    return _NORMAL.cdf(-sqrt(2) * _NORMAL.inv_cdf(confidence))


def trial_order(outcomes: Outcomes, *, risk: float) -> list[Trial]:
    """Thresholds to try: from where a test has the most power, as far as this part can tell, to ever looser ones.

    The power is how fast the capital would grow with the best constant stake, to second order. The guessed spread
    counts one wrong answer more than there was, so that it is never zero.
    """
    counts = np.unique(np.linspace(min(FEW, len(outcomes.value)), len(outcomes.value), _GRID).round().astype(np.int64))
    most, power, trials = float(queries_per_image(outcomes).max()), [], []
    for threshold in np.sort(outcomes.value)[::-1][counts - 1].tolist():
        losses = image_losses(outcomes, threshold, risk=risk)
        square, mean = (float(losses @ losses) + (1 - risk) ** 2) / (len(losses) + 1), float(losses.mean())
        bounds = Bounds(-risk * most, (1 - risk) * most, sqrt(square))
        share = min(max(0.0, -mean / square), 1 / bounds.highest)
        power.append(-share * mean - share**2 * square / 2)
        trials.append(Trial(threshold, bounds))
    return trials[int(np.argmax(power)) :]


def mean_is_negative(values: Array, bounds: Bounds, *, level: float) -> bool:
    """Reject "the mean is zero or more" at this level. values [N], independent and in random order

    >>> mean_is_negative(np.full(40, -0.1), Bounds(-0.1, 0.9, 0.3), level=0.1)
    True
    """
    return bool(capital(values, bounds, level=level)[-1] >= 1 / level)


def capital(values: Array, bounds: Bounds, *, level: float) -> Array:
    """The gambler's capital before the first value and after each; who has 1/``level`` stops. [N] -> [N + 1]

    A larger value, anywhere, never leads to more capital at any later time.
    """
    history = np.ones(len(values) + 1)
    for n, value in enumerate(values.tolist()):
        held = float(history[n])
        if value and held < 1 / level:
            held -= value * stake(held, bounds, left=len(values) - n, level=level)
        history[n + 1] = held
    return history


def stake(held: float, bounds: Bounds, *, left: int, level: float) -> float:
    """What is won for each unit below zero and lost for each above, with ``left`` values to come.

    Never more than can be lost, and never more than the best value needs to reach the aim. Between these limits it is
    concave in the capital, hence whoever has more now will not have less later.
    """
    aim = _AIM / level
    share = held / aim
    if share < _NOTHING:
        return 0.0
    hedge = aim * _NORMAL.pdf(_NORMAL.inv_cdf(share)) / (bounds.spread * sqrt(left))
    return min(hedge, held / bounds.highest, (aim - held) / -bounds.lowest)


class RiskCheck(NamedTuple):
    """What a threshold answers of other queries, and how often wrongly."""

    queries: int
    answered: int
    wrong: int
    images: int  # whose queries they are
    interval: tuple[float, float] = (0.0, 1.0)  # of the true risk, with 95% confidence; approximate

    @property
    def coverage(self) -> float:
        return self.answered / self.queries

    @property
    def risk(self) -> float:
        """Share of the answers that is wrong; NaN without answers."""
        return self.wrong / self.answered if self.answered else float("nan")

    def held(self, risk: float) -> bool:
        """Is the risk below the bound, as counted? It is where nothing was answered."""
        return self.wrong <= risk * self.answered


def check_threshold(outcomes: Outcomes, threshold: float | None) -> RiskCheck:
    """Count what is answered from this confidence on; nothing where it is None."""
    images, image = np.unique(outcomes.image, return_inverse=True)
    if threshold is None:
        return RiskCheck(len(outcomes.value), 0, 0, len(images))
    answered = outcomes.value >= threshold
    answers, failures = (np.bincount(image, part).astype(np.float64) for part in (answered, answered & outcomes.wrong))
    counts = int(answers.sum()), int(failures.sum())
    return RiskCheck(len(answered), *counts, len(images), share_interval(failures, answers))


def verdict(check: RiskCheck, *, risk: float, confidence: float, images: int) -> str:
    """Did the guarantee hold? One sentence with the numbers. ``images``: how many certified it."""
    bound = f"guaranteed at most {100 * risk:g}% wrong, confidence {100 * confidence:g}%"
    if not check.answered:
        return f"{bound}; no query was answered."
    low, high = check.interval
    counted = f"{check.risk:.1%} wrong (95% interval {low:.1%} to {high:.1%}), {check.coverage:.1%} answered"
    if check.images < images:  # a count over fewer has more noise than the confidence allows for
        counted += f", on fewer images ({check.images:,}) than the calibration used ({images:,})"
    if check.held(risk):
        return f"{bound}; held: {counted}."
    cause = "more than chance explains" if low > risk else "which chance may explain"
    return f"{bound}; did NOT hold, {cause}: {counted}."


def share_interval(failures: Array, answers: Array) -> tuple[float, float]:
    """Wilson's interval of Σ failures / Σ answers, for as many trials as the images are worth. [I], [I]

    Answers about one image fail together. The variance of the ratio over images says how many independent answers
    would be as sure; where none or all failed it says nothing, and each image that is answered counts for one.

    >>> share_interval(np.eye(4)[0], np.ones(4)) == share_interval(5 * np.eye(4)[0], 5 * np.ones(4))
    True
    """
    total = float(answers.sum())
    if not total:
        return 0.0, 1.0
    share = float(failures.sum()) / total
    variance = float(((failures - share * answers) ** 2).sum()) / total**2
    trials = min(total, share * (1 - share) / variance) if variance else int((answers > 0).sum())
    pull = _Z**2 / trials
    middle, reach = share + pull / 2, _Z * sqrt(share * (1 - share) / trials + pull / trials / 4)
    return max(0.0, (middle - reach) / (1 + pull)), min(1.0, (middle + reach) / (1 + pull))
