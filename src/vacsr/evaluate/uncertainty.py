"""Is the uncertainty worth anything? It should rise where retrieval fails, and tell which answers to trust.

All functions take one number per query (tensor, array or list) and compute in float64. A query whose outcome is NaN
(it has no positive) is left out; a NaN uncertainty is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError

Array = NDArray[np.float64]
Values = Tensor | NDArray[np.generic] | Sequence[float]
Width = Literal["count", "equal"]
_NEARLY_CONSTANT = 1e-13  # relative spread below which a mean's rounding is all there is


class BinnedCorrelation(NamedTuple):
    """Correlation of the bin index with the bin's mean outcome, and the bins [B] it rests on (empty ones left out)."""

    correlation: float
    bin_uncertainty: Array
    bin_score: Array
    bin_count: NDArray[np.int64]


class TopkCorrelation(NamedTuple):
    """For k = 1..K, the correlation of the mean uncertainty of the top k with the quality of the query. [K] each"""

    raw: Array
    binned: Array


class RiskCoverage(NamedTuple):
    """Selective risk at each coverage i/n, i = 1..n. [n] each"""

    coverage: Array
    risk: Array


def binned_correlation(
    uncertainty: Values, correct: Values, *, bins: int = 10, width: Width = "count"
) -> BinnedCorrelation:
    """Pearson correlation of the bin index with the mean of ``correct`` in the bin. uncertainty [Q], correct [Q]

    ``width="count"``: queries sorted by uncertainty (stable) and cut into bins of equal size, up to one. ``"equal"``:
    bins of equal width between the lowest and the highest uncertainty. NaN when uncertainty or outcome is constant.

    >>> round(binned_correlation([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], bins=2).correlation, 6)
    -1.0
    """
    sigma, outcome = _aligned(uncertainty, correct)
    if bins < 2:
        raise UsageError(f"bins={bins}, expected at least 2")
    if width not in get_args(Width):
        raise UsageError(f"width={width!r}, expected one of {', '.join(get_args(Width))}")
    index = _count_bins(sigma, bins) if width == "count" else _width_bins(sigma, bins)
    count = np.bincount(index, minlength=bins)
    used = count.nonzero()[0]
    bin_sigma = np.bincount(index, sigma, bins)[used] / count[used]
    bin_score = np.bincount(index, outcome, bins)[used] / count[used]
    # Equal uncertainties fall into bins by their order alone, which says nothing.
    correlation = float("nan") if _constant(sigma) else pearson(used, bin_score)
    return BinnedCorrelation(correlation, bin_sigma, bin_score, count[used])


def topk_correlation(uncertainty_topk: Values, quality: Values, *, bins: int = 10) -> TopkCorrelation:
    """Mean uncertainty of the first k retrieved items against the query's quality (mAP@R), for k = 1..K.

    ``uncertainty_topk`` [Q, K], items in order of rank; ``quality`` [Q]. ``raw``: Pearson over the queries; ``binned``:
    Pearson of the index of equal-count bins of the mean uncertainty with the mean quality in the bin.

    >>> topk_correlation([[0.1, 0.3], [0.2, 0.2], [0.3, 0.1]], [1.0, 0.5, 0.0], bins=3).raw.round(6)
    array([-1., nan])
    """
    sigma = _to_float64(uncertainty_topk)
    if sigma.ndim != 2:
        raise ShapeMismatch(f"uncertainty_topk is {list(sigma.shape)}, expected [Q, K] — pass the top k of each query")
    means = sigma.cumsum(1) / np.arange(1, sigma.shape[1] + 1)
    raw = [pearson(*_aligned(mean, quality)) for mean in means.T]
    binned = [binned_correlation(mean, quality, bins=bins).correlation for mean in means.T]
    return TopkCorrelation(np.array(raw, dtype=np.float64), np.array(binned, dtype=np.float64))


def risk_coverage(uncertainty: Values, loss: Values) -> RiskCoverage:
    """Mean loss of the i most certain queries, for i = 1..n, at coverage i/n. uncertainty [Q], loss [Q]

    Queries of equal uncertainty could be accepted in any order; each counts with the mean loss of its group, which is
    the expectation over a random order, so the curve does not depend on the order of the input.

    >>> risk_coverage([0.1, 0.2, 0.2], [0.0, 1.0, 0.0]).risk
    array([0.        , 0.25      , 0.33333333])
    """
    sigma, cost = _aligned(uncertainty, loss)
    _, group, size = np.unique(sigma, return_inverse=True, return_counts=True)
    expected = np.bincount(group, cost) / size  # one value per group, groups in order of uncertainty
    accepted = np.arange(1, len(sigma) + 1)
    return RiskCoverage(accepted / len(sigma), np.repeat(expected, size).cumsum() / accepted)


def aurc(uncertainty: Values, loss: Values) -> float:
    """Area under the risk–coverage curve: the mean selective risk over the coverages 1/n, 2/n, …, 1. Lower is better.

    With a 0/1 loss, an uncertainty without information gives the error rate.

    >>> aurc([0.1, 0.2], [0.0, 1.0]), aurc([0.5, 0.5], [0.0, 1.0])
    (0.25, 0.5)
    """
    return float(risk_coverage(uncertainty, loss).risk.mean())


def auroc(score: Values, positive: Values) -> float:
    """Chance that a positive scores above a negative, a tie counting half (Mann–Whitney). score [N], positive [N] 0/1

    NaN without a positive or without a negative.

    >>> auroc([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])
    0.875
    """
    value, label = as_vector("score", score), as_vector("positive", positive)
    check_length(value, label)
    if not np.isin(label, (0, 1)).all():
        raise DataError(
            f"positive holds {label[~np.isin(label, (0, 1))][0]}, expected 0 and 1 only — threshold it first"
        )
    positives = int(label.sum())
    negatives = len(label) - positives
    if not positives or not negatives:
        return float("nan")
    wins = average_ranks(value)[label == 1].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def pearson(x: Values, y: Values) -> float:
    """Pearson correlation; NaN if a side is constant (up to rounding) or empty. x [N], y [N]

    >>> round(pearson([1, 2, 3], [2, 4, 6]), 6), pearson([1, 2], [5, 5])
    (1.0, nan)
    """
    a, b = as_vector("x", x), as_vector("y", y)
    check_length(a, b)
    if _constant(a) or _constant(b):
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip((a / np.linalg.norm(a)) @ (b / np.linalg.norm(b)), -1, 1))


def average_ranks(values: Values) -> Array:
    """1-based ascending ranks; equal values share the mean of theirs. [N] -> [N]

    >>> average_ranks([5, 1, 5])
    array([2.5, 1. , 2.5])
    """
    _, group, size = np.unique(as_vector("values", values), return_inverse=True, return_counts=True)
    last: Array = size.cumsum().astype(np.float64)
    return (last - (size - 1) / 2)[group]


def as_vector(name: str, values: Values) -> Array:
    """One number per row as float64 [N]; NaN is a :class:`DataError` that names the first."""
    vector = _to_float64(values)
    if vector.ndim != 1:
        raise ShapeMismatch(f"{name} is {list(vector.shape)}, expected one dimension — pass one number per row")
    if np.isnan(vector).any():
        at = int(np.isnan(vector).argmax())
        raise DataError(f"{name}[{at}] is NaN, expected a number — check the scores or leave that row out")
    return vector


def check_length(x: Array, y: Array) -> None:
    """Refuse two vectors of unequal length."""
    if len(x) != len(y):
        raise ShapeMismatch(f"{len(x)} values against {len(y)}, expected as many — pass both for the same rows")


def _to_float64(values: Values) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _aligned(uncertainty: Values, outcome: Values) -> tuple[Array, Array]:
    """Both as float64 [N], without the queries that have no outcome (NaN)."""
    sigma, result = as_vector("uncertainty", uncertainty), _to_float64(outcome)
    check_length(sigma, result)
    known = ~np.isnan(result)
    if not known.any():
        raise DataError(f"none of {len(result)} queries has an outcome — check that some query has a positive")
    return sigma[known], result[known]


def _constant(x: Array) -> bool:
    if len(x) < 2:
        return True
    return float(np.ptp(x)) <= _NEARLY_CONSTANT * float(np.abs(x).max())


def _count_bins(sigma: Array, bins: int) -> NDArray[np.int64]:
    """Bin of each query when the sorted queries are cut into equal parts, the first ones longer by one. [Q] -> [Q]"""
    sizes = np.full(bins, len(sigma) // bins)
    sizes[: len(sigma) % bins] += 1
    index = np.empty(len(sigma), dtype=np.int64)
    index[sigma.argsort(kind="stable")] = np.repeat(np.arange(bins), sizes)
    return index


def _width_bins(sigma: Array, bins: int) -> NDArray[np.int64]:
    """Bin of each query when the range is cut into equal parts; the highest value falls into the last. [Q] -> [Q]"""
    inner_edges = np.linspace(sigma.min(), sigma.max(), bins + 1)[1:-1]
    return np.digitize(sigma, inner_edges)
