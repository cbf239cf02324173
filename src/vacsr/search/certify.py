"""A threshold that keeps the risk of wrong answers below a bound, with high probability.

Two parts of the queries, no image in both. One chooses how confidence is measured, which thresholds are
tried and in which order. The other certifies: thresholds are tested in that order until one fails; the last that passed
is kept. As the order was fixed beforehand, the chance that a threshold with too high a risk passes is at most δ
(fixed-sequence testing; "learn then test").

Queries of one image, its captions and their repeats in other galleries, fail together. So an image is one observation:
its wrong answers less α times its answers, repeats averaged. The risk is below α exactly if the mean of that is
negative, which is tested by betting, without a model of how queries of an image depend on each other. A bet needs to
know beforehand how much a loss can be: an image with more queries than any that chose counts as that many.

Images are taken as independent. Those in one gallery are not quite, for they are each other's wrong candidates, in
either part: galleries are drawn from all images, since a part may be smaller than one gallery. What breaks it is a hub,
an item that comes first for queries of many images: these fail together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, log, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.evaluate.uncertainty import Array
from vacsr.search.betting import Bounds, growth, mean_is_negative

FEW = 20
"""Queries behind a share that is to mean something."""
_GRID = 50  # thresholds that are tried


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


class Certified(NamedTuple):
    """The loosest threshold that passed, and what it rests on."""

    threshold: float | None
    images: int
    answered: int
    wrong: int


def certify(
    found: Outcomes, trials: Sequence[Trial], *, risk: float, level: float, generator: np.random.Generator
) -> Certified:
    """The last threshold before the first whose risk cannot be shown to be below ``risk``, at this level.

    The trials must not depend on these queries, only on others. The generator draws the order of the images.

    >>> right = Outcomes(np.linspace(0, 1, 90), np.zeros(90, dtype=bool), np.arange(90), np.arange(90))
    >>> trials = [Trial(0.2, Bounds(-0.1, 0.9, 0.3)), Trial(0.1, Bounds(-0.1, 0.9, 0.3))]
    >>> certify(right, trials, risk=0.1, level=0.1, generator=np.random.default_rng(0)).threshold
    0.1
    """
    images = len(np.unique(found.image))
    kept = Certified(None, images, 0, 0)
    order = generator.permutation(images)
    for threshold, bounds in trials:
        most = min(-bounds.lowest / risk, bounds.highest / (1 - risk))
        losses = image_losses(found, threshold, risk=risk, most=most)[order]
        if not mean_is_negative(losses, bounds, level=level):
            break
        given = found.value >= threshold
        kept = Certified(threshold, images, int(given.sum()), int((given & found.wrong).sum()))
    return kept


def image_losses(found: Outcomes, threshold: float, *, risk: float, most: float = inf) -> Array:
    """Wrong answers less ``risk`` times answers, of each image, in the mean over the repeats of a query. -> [images]

    An image with more than ``most`` queries, answered or not, weighs as if it had so many.

    >>> asked = Outcomes(np.ones(4), np.array([1, 0, 0, 0], dtype=bool), np.array([5, 5, 5, 7]), np.array([0, 0, 1, 2]))
    >>> image_losses(asked, 0.5, risk=0.1)
    array([ 0.3, -0.1])
    """
    loss = (found.value >= threshold) * (found.wrong - risk) * _weights(found)
    _, image = np.unique(found.image, return_inverse=True)
    return np.asarray(np.bincount(image, loss) * np.minimum(1, most / queries_per_image(found)), dtype=np.float64)


def queries_per_image(found: Outcomes) -> Array:
    """How many each image has, repeats counted once. -> [images]"""
    _, image = np.unique(found.image, return_inverse=True)
    whole = np.bincount(image, _weights(found)).round(9)  # but for the repeats of a query, which are added up
    return np.asarray(whole, dtype=np.float64)


def _weights(found: Outcomes) -> Array:
    """One over the number of repeats. -> [N]"""
    _, place, count = np.unique(found.query, return_inverse=True, return_counts=True)
    return np.asarray(1 / count[place], dtype=np.float64)


def countable_level(confidence: float) -> float:
    """δ for the true risk, such that a share *counted* elsewhere keeps the promise with this confidence.

    A count over as many images as certified has as much noise as the certificate, so the distance to keep grows by √2.

    >>> round(countable_level(0.9), 3)
    0.035
    """
    normal = NormalDist()
    return normal.cdf(-sqrt(2) * normal.inv_cdf(confidence))


def images_needed(*, risk: float, level: float) -> int:
    """About how many images it takes before a flawless search could be certified; with errors it takes more.

    A bet on answers that are all right grows by 1/(1 − α) an image at best. A quarter of the images chooses.

    >>> images_needed(risk=0.1, level=0.035)
    60
    """
    return max(3 * FEW, ceil(4 / 3 * log(level) / log1p(-risk)))


def trial_order(found: Outcomes, *, risk: float) -> list[Trial]:
    """Thresholds to try: from where a test has the most power, as far as this part can tell, to ever looser ones.

    The guessed spread counts one wrong answer more than there was, so that it is never zero.
    """
    counts = np.unique(np.linspace(min(FEW, len(found.value)), len(found.value), _GRID).round().astype(np.int64))
    most, power, trials = float(queries_per_image(found).max()), [], []
    for threshold in np.sort(found.value)[::-1][counts - 1].tolist():
        losses = image_losses(found, threshold, risk=risk)
        spread = sqrt((float(losses @ losses) + (1 - risk) ** 2) / (len(losses) + 1))
        trials.append(Trial(threshold, Bounds(-risk * most, (1 - risk) * most, spread)))
        power.append(growth(losses, trials[-1].bounds))
    return trials[int(np.argmax(power)) :]
