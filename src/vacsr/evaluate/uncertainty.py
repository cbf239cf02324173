"""Is the uncertainty worth anything? It should rise where retrieval fails, and tell which answers to trust.

All functions take one number per query (tensor, array or list) and compute in float64. A query whose outcome is NaN
(it has no positive) is left out; a NaN uncertainty is an error.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import scipy  # its parts load when they are used; scipy.stats takes most of a second
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.metrics import average_precisions_at_r, hits_at
from vacsr.evaluate.protocols import Gallery
from vacsr.evaluate.ranks import BothRanks
from vacsr.evaluate.score_files import Scores
from vacsr.scoring.topk import DIRECTIONS, Direction

Array = NDArray[np.float64]
Values = Tensor | NDArray[np.generic] | Sequence[float]
Bins = Literal["count", "equal"]  # of equal count, or of equal width
_TOP = 10
_COVERAGES = tuple(point / 20 for point in range(1, 21))  # of a risk–coverage curve
_NEARLY_CONSTANT = 1e-13  # relative spread below which a mean's rounding is all there is


def binned_correlation(
    uncertainty: Values, correct: Values, *, bins: int = 10, width: Bins = "count"
) -> tuple[float, Array, Array]:
    """Pearson correlation of the bin index with the mean of ``correct`` in the bin. uncertainty [Q], correct [Q]

    With it come the mean uncertainty and the mean of ``correct`` in each bin that is not empty.

    ``width="count"``: queries sorted by uncertainty (stable) and cut into bins of equal size, up to one. ``"equal"``:
    bins of equal width between the lowest and the highest uncertainty. NaN when uncertainty or outcome is constant.

    >>> round(binned_correlation([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], bins=2)[0], 6)
    -1.0
    """
    sigma, outcome = _aligned(uncertainty, correct)
    if width not in get_args(Bins):
        raise UsageError(f"width={width!r}, expected one of {', '.join(get_args(Bins))}")
    if width == "count":
        index = np.empty(len(sigma), dtype=np.int64)
        for number, part in enumerate(np.array_split(sigma.argsort(kind="stable"), bins)):
            index[part] = number
    else:
        index = np.digitize(sigma, np.linspace(sigma.min(), sigma.max(), bins + 1)[1:-1])
    count = np.bincount(index, minlength=bins)
    used = count.nonzero()[0]
    bin_sigma = np.bincount(index, sigma, bins)[used] / count[used]
    bin_score = np.bincount(index, outcome, bins)[used] / count[used]
    # Equal uncertainties fall into bins by their order alone, which says nothing.
    correlation = float("nan") if _constant(sigma) else pearson(used, bin_score)
    return correlation, bin_sigma, bin_score


def topk_correlation(uncertainty_topk: Values, quality: Values, *, bins: int = 10) -> dict[str, list[float]]:
    """Mean uncertainty of the first k retrieved items against the query's quality (mAP@R), for k = 1..K.

    ``uncertainty_topk`` [Q, K], items in order of rank; ``quality`` [Q]. ``raw``: Pearson over the queries; ``binned``:
    Pearson of the index of equal-count bins of the mean uncertainty with the mean quality in the bin. [K] each

    >>> [round(r, 6) for r in topk_correlation([[0.1, 0.3], [0.2, 0.2], [0.3, 0.1]], [1.0, 0.5, 0.0], bins=3)["raw"]]
    [-1.0, nan]
    """
    sigma = _to_float64(uncertainty_topk)
    means = (sigma.cumsum(1) / np.arange(1, sigma.shape[1] + 1)).T
    return {
        "raw": [pearson(*_aligned(mean, quality)) for mean in means],
        "binned": [binned_correlation(mean, quality, bins=bins)[0] for mean in means],
    }


def selective_risk(uncertainty: Values, loss: Values) -> Array:
    """Mean loss of the i most certain queries, for i = 1..Q: the risk at coverage i/Q. uncertainty [Q], loss [Q] -> [Q]

    Queries of equal uncertainty could be accepted in any order; each counts with the mean loss of its group, which is
    the expectation over a random order, so the curve does not depend on the order of the input.

    >>> selective_risk([0.1, 0.2, 0.2], [0.0, 1.0, 0.0])
    array([0.        , 0.25      , 0.33333333])
    """
    sigma, cost = _aligned(uncertainty, loss)
    _, group, size = np.unique(sigma, return_inverse=True, return_counts=True)
    expected = np.bincount(group, cost) / size  # one value per group, groups in order of uncertainty
    return np.asarray(np.repeat(expected, size).cumsum() / np.arange(1, len(sigma) + 1))


def risk_at(risk: Array, coverages: Sequence[float]) -> Array:
    """The selective risk [Q] at some coverages [C], shares above 0: the fewest queries that reach each count. -> [C]

    >>> risk_at(selective_risk([0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 1.0]), (0.5, 0.75, 1.0))
    array([0.        , 0.33333333, 0.5       ])
    """
    accepted = np.ceil(np.asarray(coverages) * len(risk) - 1e-9).astype(int)
    return np.asarray(risk[np.maximum(accepted, 1) - 1])


def risk_curve(risk: Array) -> dict[str, list[float]]:
    """Twenty points of a risk–coverage curve, in percent, from the selective risk [Q]."""
    return {
        "coverage": [100 * share for share in _COVERAGES],
        "risk": (100 * risk_at(risk, _COVERAGES)).tolist(),
    }


def aurc(uncertainty: Values, loss: Values) -> float:
    """Area under the risk–coverage curve: the mean selective risk over the coverages 1/n, 2/n, …, 1. Lower is better.

    With a 0/1 loss, an uncertainty without information gives the error rate.

    >>> aurc([0.1, 0.2], [0.0, 1.0]), aurc([0.5, 0.5], [0.0, 1.0])
    (0.25, 0.5)
    """
    return float(selective_risk(uncertainty, loss).mean())


def auroc(score: Values, positive: Values) -> float:
    """Chance that a positive scores above a negative, a tie counting half (Mann–Whitney). score [N], positive [N] 0/1

    NaN without a positive or without a negative.

    >>> auroc([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])
    0.875
    """
    value, label = as_vector("score", score), as_vector("positive", positive) > 0
    check_length(value, label)
    if label.all() or not label.any():
        return float("nan")
    wins = scipy.stats.mannwhitneyu(value[label], value[~label], method="asymptotic").statistic
    return float(wins / (label.sum() * (~label).sum()))


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


def as_vector(name: str, values: Values) -> Array:
    """One number per row as float64 [N]; NaN is a :class:`DataError` that names the first."""
    vector = _to_float64(values)
    if vector.ndim != 1:
        raise ShapeMismatch(f"{name} is {list(vector.shape)}, expected one dimension — pass one number per row")
    if np.isnan(vector).any():
        at = int(np.isnan(vector).argmax())
        raise DataError(f"{name}[{at}] is NaN, expected a number — check the scores or leave that row out")
    return vector


def check_length(x: NDArray[Any], y: NDArray[Any]) -> None:
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
    return len(x) < 2 or float(np.ptp(x)) <= _NEARLY_CONSTANT * float(np.abs(x).max())


def top_uncertainty(scores: Scores, gallery: Gallery, direction: Direction) -> Tensor | None:
    """σ of each query's ten best answers, best first; None where scores have no σ. -> [Q, min(10, items)]"""
    first = torch.zeros(1, dtype=torch.int64)
    if scores.uncertainty(first, first) is None:
        return None
    items = gallery.topk(scores, _TOP, direction=direction).index
    queries = gallery.queries(direction).to(items.device).unsqueeze(1).expand_as(items)
    rows, cols = (queries, items) if direction == "i2t" else (items, queries)
    sigma = scores.uncertainty(rows.reshape(-1), cols.reshape(-1))
    return None if sigma is None else sigma.view_as(items).cpu()


def uncertainty_result(
    scores: Scores,
    galleries: Sequence[Gallery],
    ranks: Sequence[BothRanks],
    *,
    bins: Bins = "count",
    cache: dict[Direction, Tensor],
) -> dict[str, Any] | None:
    """σ of the best hit against R@1 (ten bins), risk and coverage, and mean σ of the top K against mAP@R.

    The queries of all galleries together, ``ranks`` being one for each; None without σ. ``cache`` keeps the σ of the
    best answers in the whole gallery, which protocols share.
    """
    result: dict[str, Any] = {}
    for direction, of_galleries in zip(DIRECTIONS, zip(*ranks, strict=True), strict=True):
        parts = []
        for gallery in galleries:
            top = cache.get(direction) if gallery.whole else None
            top = top_uncertainty(scores, gallery, direction) if top is None else top
            if top is None:
                return None
            if gallery.whole:
                cache[direction] = top
            parts.append(top)
        sigma = torch.cat(parts)
        hit = torch.cat([hits_at(one, 1) for one in of_galleries])
        quality = torch.cat([average_precisions_at_r(one) for one in of_galleries])
        correlation, bin_sigma, bin_hit = binned_correlation(sigma[:, 0], hit, width=bins)
        risk = selective_risk(sigma[:, 0], 1.0 - hit)
        result |= {
            f"corr_r1_{direction}": correlation,
            f"aurc_{direction}": 100.0 * float(risk.mean()),
            f"bins_{direction}": {"sigma": bin_sigma.tolist(), "r1": bin_hit.tolist()},
            f"topk_{direction}": topk_correlation(sigma, quality),
            f"risk_{direction}": risk_curve(risk),
        }
    return result
