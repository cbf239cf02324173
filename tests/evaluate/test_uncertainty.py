"""Uncertainty metrics against scipy and brute force."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.uncertainty import Bins, aurc, auroc, binned_correlation, selective_risk

few_levels = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40)


def reference_bins(sigma: list[float], score: list[float], bins: int, width: str) -> dict[int, list[float]]:
    """The outcomes in each bin, filled one query at a time."""
    filled: dict[int, list[float]] = {}
    if width == "count":
        order = sorted(range(len(sigma)), key=lambda query: sigma[query])
        for index, part in enumerate(np.array_split(np.array(order), bins)):
            filled[index] = [score[query] for query in part]
    else:
        low, high = min(sigma), max(sigma)
        for query, value in enumerate(sigma):
            index = min(int((value - low) / (high - low) * bins), bins - 1) if high > low else bins - 1
            filled.setdefault(index, []).append(score[query])
    return {index: filled[index] for index in sorted(filled) if filled[index]}


@settings(max_examples=150, deadline=None)
@given(rows=few_levels, bins=st.sampled_from([2, 4, 8]), width=st.sampled_from(["count", "equal"]))
def test_bins_equal_the_plain_ones(rows: list[tuple[int, int]], bins: int, width: Bins) -> None:
    sigma, score = [float(s) for s, _ in rows], [float(c) for _, c in rows]
    correlation, _, bin_score = binned_correlation(sigma, score, bins=bins, width=width)
    expected = reference_bins(sigma, score, bins, width)
    means = [float(np.mean(values)) for values in expected.values()]
    np.testing.assert_allclose(bin_score, means)
    if len(set(sigma)) > 1 and len(expected) > 1 and np.ptp(means) > 1e-9:
        assert correlation == pytest.approx(stats.pearsonr(list(expected), means)[0])
    else:
        assert np.isnan(correlation)


def test_tensors_are_taken_and_queries_without_outcome_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    sigma = torch.rand(1003, generator=generator)
    correct = (torch.rand(1003, generator=generator) > sigma).double()
    correlation, bin_sigma, _ = binned_correlation(sigma.bfloat16(), correct)
    assert (np.diff(bin_sigma) > 0).all()
    assert correlation < -0.9
    _, _, gap = binned_correlation([0.1, 0.15, 0.2, 0.3], [1, float("nan"), 0, 1], bins=3)
    np.testing.assert_array_equal(gap, [1, 0, 1])


@pytest.mark.parametrize(("sigma", "correct"), [([1, 1, 1, 1], [0, 0, 1, 1]), ([1, 2, 3, 4], [0.1] * 4), ([1], [0])])
@pytest.mark.parametrize("width", ["count", "equal"])
def test_constant_side_gives_nan(sigma: list[float], correct: list[float], width: Bins) -> None:
    assert np.isnan(binned_correlation(sigma, correct, width=width)[0])


def reference_risk(sigma: tuple[int, ...], loss: tuple[int, ...]) -> np.ndarray:
    """Mean over all orders of acceptance that respect the uncertainty."""
    queries = range(len(sigma))
    orders = [order for order in permutations(queries) if [sigma[q] for q in order] == sorted(sigma)]
    curves = [np.cumsum([loss[q] for q in order]) / np.arange(1, len(order) + 1) for order in orders]
    return np.mean(curves, axis=0)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6))
def test_selective_risk_equals_brute_force(rows: list[tuple[int, int]]) -> None:
    sigma, loss = zip(*rows, strict=True)
    np.testing.assert_allclose(selective_risk(sigma, loss), reference_risk(sigma, loss))
    assert aurc(sigma, loss) == pytest.approx(reference_risk(sigma, loss).mean())


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auroc_equals_pair_counting(rows: list[tuple[int, bool]]) -> None:
    score, positive = zip(*rows, strict=True)
    wins = [(p > n) + 0.5 * (p == n) for p, yes in rows if yes for n, other in rows if not other]
    result = auroc(score, positive)
    if not wins:
        assert np.isnan(result)
        return
    assert result == pytest.approx(np.mean(wins))


def test_bad_input_is_refused() -> None:
    with pytest.raises(DataError, match=r"uncertainty\[1\] is NaN"):
        aurc([0.1, float("nan")], [0, 1])
    with pytest.raises(ShapeMismatch, match="2 values against 1"):
        aurc([0.1, 0.2], [0])
    with pytest.raises(DataError, match="none of 1 queries has an outcome"):
        aurc([0.1], [float("nan")])
    with pytest.raises(UsageError, match="width='odd'"):
        binned_correlation([0.1, 0.2], [0, 1], width="odd")  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match="one dimension"):
        auroc(torch.zeros(2, 2), [0, 1])
