"""How well scores order pairs that people graded, or prefer the better caption; beside people and rivals.

Intervals are 95% bootstrap intervals over images, since pairs of one image are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.sparse import csr_array

from vacsr.evaluate.agreement import kendall_tau, published_form
from vacsr.evaluate.significance import Interval, Part, image_draws, interval, paired_bootstrap
from vacsr.evaluate.uncertainty import Array, Values, as_vector, check_length, pearson

Integers = NDArray[np.int64]
Names = Sequence[str] | NDArray[Any]
DRAWS = 1000
_BLOCK = 1 << 23  # pairs of rows that are compared at once


def graded_agreement(
    score: Values,
    ratings: Values,
    *,
    images: Names,
    own: Sequence[bool] | NDArray[np.bool_] | None = None,
    variant: Literal["b", "c"] = "c",
    rivals: Mapping[str, Values] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """How well scores [N] order pairs that people rated [N, R], NaN where a rating is missing. Times 100.

    ``images`` [N]: the image of each pair; ``own`` [N]: whether the caption was written for it; ``rivals``: scores [N]
    of other systems, NaN where unknown. ``tau_published`` has every rating as a row and leaves own captions out;
    ``tau`` and ``spearman`` are with mean ratings of all pairs. ``human_tau``: each rater against the others' mean.

    >>> result = graded_agreement([0.9, 0.5, 0.1], [[4, 4], [2, 3], [1, 1]], images=["a", "b", "c"], draws=10)
    >>> round(result["tau"], 1), round(result["spearman"], 1)
    (100.0, 100.0)
    """
    values, every = as_vector("score", score), np.atleast_2d(np.asarray(ratings, dtype=np.float64).T).T
    check_length(values, every)
    hidden = np.zeros(len(values), dtype=bool) if own is None else np.asarray(own, dtype=bool)
    image, mean = np.unique(np.asarray(images), return_inverse=True)[1], np.nanmean(every, axis=1)
    times = image_draws(int(image.max(initial=-1)) + 1, draws=draws, generator=np.random.default_rng(seed))

    def published(some: Values, without: NDArray[np.bool_]) -> _Tau:
        form = published_form(np.asarray(some, dtype=np.float64), every, own=without)
        return _tau(form.score, form.rating, image=image[form.row], times=times, variant=variant)

    result: dict[str, Any] = {"variant": variant}
    forms = {
        "tau_published": published(values, hidden),
        "tau": _tau(values, mean, image=image, times=times, variant=variant),
    }
    for name, tau in forms.items():
        _, low, high, _ = interval(tau.value, _known(tau.drawn))
        result |= {name: tau.value, f"{name}_low": low, f"{name}_high": high}
    result |= {
        "spearman": 100 * pearson(scipy.stats.rankdata(values), scipy.stats.rankdata(mean)),
        "human_tau": human_tau(every[~hidden], variant=variant),
        "pairs": len(values),
        "pairs_published": int((~hidden).sum()),
        "images": times.shape[1],
    }
    for name, rival in (rivals or {}).items():
        missing = hidden | np.isnan(np.asarray(rival, dtype=np.float64))
        ours, theirs = published(values, missing), published(rival, missing)
        tested = interval(ours.value - theirs.value, _known(ours.drawn - theirs.drawn))
        taus = {"pairs": int((~missing).sum()), "tau_published": theirs.value, "ours": ours.value}
        result.setdefault("rivals", {})[name] = {**taus, **tested._asdict()}
    return result


class _Tau(NamedTuple):
    value: float
    drawn: Array  # its value in each draw of images. [D]


def _tau(x: Array, y: Array, *, image: Integers, times: Array, variant: Literal["b", "c"]) -> _Tau:
    return _Tau(kendall_tau(x, y, variant=variant), drawn_taus(x, y, image=image, times=times, variant=variant))


def human_tau(ratings: Array, *, variant: Literal["b", "c"] = "c") -> float | None:
    """The ceiling: τ of each rater with the mean of the others, averaged over ratings. [N, R]; None if R is 1

    NaN where a rating is missing.

    >>> human_tau(np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 3.0]]))
    100.0
    """
    taus, counts = [], []
    for rater in range(ratings.shape[1] if ratings.shape[1] > 1 else 0):
        others = np.delete(ratings, rater, axis=1)
        both = ~np.isnan(ratings[:, rater]) & ~np.isnan(others).all(axis=1)
        tau = kendall_tau(np.nanmean(others[both], axis=1), ratings[both, rater], variant=variant)
        if not math.isnan(tau):
            taus.append(tau)
            counts.append(int(both.sum()))
    return float(np.average(taus, weights=counts)) if taus else None


def drawn_taus(x: Array, y: Array, *, image: Integers, times: Array, variant: Literal["b", "c"]) -> Array:
    """Kendall's τ times 100 when image i is drawn ``times[d, i]`` times, NaN where undefined. [N] each, [D, I] -> [D]

    What two rows add depends on their images alone once they are summed over these, so a draw is a quadratic form:
    the result is scipy's on the drawn rows, and no draw is sorted.
    """
    order, size = image.argsort(kind="stable"), times.shape[1]
    owner = image[order]
    ranks = [np.unique(values[order], return_inverse=True)[1].astype(np.int32) for values in (x, y)]
    agreed = np.zeros((size, size))
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    step = max(1, _BLOCK // max(1, len(x)))
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        sign = np.ones((len(owner[rows]), len(x)), dtype=np.int8)
        for rank in ranks:
            sign *= (rank[rows, None] > rank).astype(np.int8) - (rank[rows, None] < rank).astype(np.int8)
        summed = np.zeros((len(sign), size))
        summed[:, owner[starts]] = np.add.reduceat(sign, starts, axis=1, dtype=np.int64)
        np.add.at(agreed, owner[rows], summed)
    surplus = ((times @ agreed) * times).sum(axis=1) / 2  # concordant less discordant
    counts = [csr_array((np.ones(len(x)), (rank, owner)), shape=(len(x), size)) @ times.T for rank in ranks]
    number = counts[0].sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        if variant == "b":
            ties = [(count * (count - 1)).sum(axis=0) / 2 for count in counts]
            total = number * (number - 1) / 2
            return np.asarray(100 * surplus / np.sqrt((total - ties[0]) * (total - ties[1])))
        classes = np.minimum(*((count > 0).sum(axis=0) for count in counts))
        return np.asarray(100 * 2 * surplus / (number**2 * (classes - 1) / classes))


def preference_accuracy(
    better: Values,
    worse: Values,
    *,
    images: Names,
    kinds: Names = (),
    rivals: Mapping[str, tuple[Values, Values]] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """How often the better caption of an image scores higher, a tie counting half, in percent. [N] each

    ``rivals``: the two scores [N] by other systems, NaN where unknown.

    >>> preference_accuracy([0.9, 0.2], [0.1, 0.3], images=["a", "b"], kinds=["swap", "add"], draws=10)["accuracy"]
    50.0
    """
    above, below = as_vector("better", better), as_vector("worse", worse)
    check_length(above, below)
    right, labels = 50.0 * (1 + np.sign(above - below)), np.asarray(kinds)
    image = np.unique(np.asarray(images), return_inverse=True)[1]

    def bootstrap(values: Array, rows: NDArray[np.bool_]) -> Interval:
        return paired_bootstrap([Part(values[rows, None], image[rows])], draws=draws, seed=seed)[0]

    def accuracy(rows: NDArray[np.bool_]) -> dict[str, Any]:
        share, low, high, _ = bootstrap(right, rows)
        return {"accuracy": share, "low": low, "high": high, "pairs": int(rows.sum())}

    result = accuracy(np.ones(len(right), dtype=bool))
    if len(labels):
        result["kinds"] = {str(kind): accuracy(labels == kind) for kind in np.unique(labels)}
        result["mean_of_kinds"] = float(np.mean([part["accuracy"] for part in result["kinds"].values()]))
    for name, both in (rivals or {}).items():
        theirs = 50.0 * (1 + np.sign(np.asarray(both[0], dtype=np.float64) - np.asarray(both[1], dtype=np.float64)))
        known = ~np.isnan(theirs)
        shares = {
            "pairs": int(known.sum()),
            "accuracy": float(theirs[known].mean()),
            "ours": float(right[known].mean()),
        }
        result.setdefault("rivals", {})[name] = {**shares, **bootstrap(right - theirs, known)._asdict()}
    return result


def _known(drawn: Array) -> Array:
    """Draws that have a value; NaN where none has."""
    known = drawn[~np.isnan(drawn)]
    return known if len(known) else np.full(1, math.nan)
