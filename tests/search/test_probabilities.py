"""Grades of hits: odds against rivals, a fit where the truth is a softmax, and the error of a calibration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from scipy.special import softmax

from vacsr.search.probabilities import (
    HitModel,
    Isotonic,
    Mask,
    expected_calibration_error,
    fit_hits,
    fit_isotonic,
    rival_odds,
)


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 100))
def test_odds_are_those_of_a_plain_loop(width: int, siblings: int, seed: int) -> None:
    value = np.sort(np.random.default_rng(seed).normal(size=(3, width)))[:, ::-1]
    odds = rival_odds(value, siblings=siblings)
    for row, scores in enumerate(value):
        for one in range(width):
            rivals = np.delete(scores, one)[siblings:]
            expected = scores[one] - np.log(np.exp(rivals).sum()) if len(rivals) else 0.0
            assert odds[row, one] == pytest.approx(np.clip(expected, -20, 20))


def test_odds_without_siblings_are_the_log_odds_of_a_softmax() -> None:
    value = np.sort(np.random.default_rng(0).normal(size=(5, 9)))[:, ::-1]
    chance = softmax(value, axis=1)
    np.testing.assert_allclose(rival_odds(value), np.log(chance / (1 - chance)))


def test_odds_are_cut_where_they_say_nothing_more() -> None:
    np.testing.assert_allclose(rival_odds(np.array([[1000.0, 0.0]])), [[20, -20]])


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 1000), st.floats(0.05, 5), st.floats(0, 3), st.floats(0, 3), st.floats(-2, 2))
def test_grades_fall_from_hit_to_hit(
    siblings: int, seed: int, temperature: float, odds: float, score: float, bias: float
) -> None:
    value = np.sort(np.random.default_rng(seed).normal(size=(4, 30)))[:, ::-1]
    model = HitModel(temperature=temperature, siblings=siblings, odds_weight=odds, score_weight=score, bias=bias)
    grade = model.apply(value)
    assert (np.diff(grade, axis=1) <= 1e-12).all()
    assert ((grade >= 0) & (grade <= 1)).all()


def gallery(rng: np.random.Generator, size: int, queries: int = 1500) -> tuple[np.ndarray, Mask]:
    """Right scores are normal around 2, wrong ones around 0: the truth is a softmax of 2 · score, for every size."""
    score = rng.normal(size=(queries, size))
    score[:, 0] += 2
    order = (-score).argsort(axis=1)
    return np.take_along_axis(score, order, 1), order == 0


def test_one_fit_is_calibrated_in_galleries_of_every_size() -> None:
    rng = np.random.default_rng(0)
    model = fit_hits([gallery(rng, 30), gallery(rng, 300)], siblings=0, depth=20)
    for size in (10, 30, 100, 1000):
        score, right = gallery(rng, size)
        grade, true = model.apply(score), softmax(2 * score, axis=1)
        assert np.abs(grade - true).mean() < 0.1 / size + 0.003
        assert grade[:, 0].mean() == pytest.approx(right[:, 0].mean(), abs=0.05)


def test_a_fit_of_noise_says_the_share_of_right_hits() -> None:
    rng = np.random.default_rng(0)
    score = np.sort(rng.normal(size=(800, 10)))[:, ::-1]
    model = fit_hits([(score, rng.random((800, 10)) < 0.1)], siblings=0, depth=10)
    assert model.apply(score).mean() == pytest.approx(0.1, abs=0.02)


def test_sizes_weigh_alike_in_a_fit() -> None:
    """Each list gives every n-th query, so a list that is repeated changes nothing but the noise."""
    rng = np.random.default_rng(0)
    lists = [gallery(rng, 50), gallery(rng, 50)]
    one, many = (fit_hits(some, siblings=0, depth=20) for some in (lists[:1], lists))
    assert one.odds_weight / one.temperature == pytest.approx(many.odds_weight / many.temperature, rel=0.25)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40))
def test_isotonic_is_that_of_scipy_on_distinct_values(pairs: list[tuple[int, bool]]) -> None:
    values, labels = (np.array(part, dtype=float) for part in zip(*pairs, strict=True))
    distinct = np.unique(values)
    means = [labels[values == one].mean() for one in distinct]
    expected = isotonic_regression(means, weights=[(values == one).sum() for one in distinct]).x
    np.testing.assert_allclose(fit_isotonic(values, labels).apply(distinct), expected, atol=1e-9)


def test_isotonic_is_flat_beyond_its_ends() -> None:
    assert Isotonic(x=(0.0, 2.0), y=(0.1, 0.5)).apply([-5, 1, 9]).tolist() == pytest.approx([0.1, 0.3, 0.5])


def test_calibration_error_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    chance, match = rng.random(100), (rng.random(100) < 0.5).astype(float)
    order = np.argsort(chance, kind="stable")
    bins = [order[n : n + 20] for n in range(0, 100, 20)]
    expected = sum(len(part) / 100 * abs(chance[part].mean() - match[part].mean()) for part in bins)
    assert expected_calibration_error(chance, match, bins=5) == pytest.approx(expected)
