"""The risk bound, where the truth is known: the test by betting, the thresholds that it certifies, and counts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from vacsr.search.certify import (
    Bounds,
    Outcomes,
    RiskCheck,
    Trial,
    capital,
    certify,
    check_threshold,
    image_losses,
    mean_is_negative,
    share_interval,
    trial_order,
    verdict,
)

TENTH = Bounds(-0.1, 0.9, 0.3)
ROUNDS = 8
_low, _high = st.floats(-1, -0.01), st.floats(0.01, 1)
_spread, _level = st.floats(0.01, 2), st.floats(0.01, 0.5)


def threshold_of(outcomes: Outcomes, trials: list[Trial], *, risk: float = 0.1, level: float = 0.1) -> float | None:
    return certify(outcomes, trials, risk=risk, level=level, generator=np.random.default_rng(0))


def singles(value: np.ndarray, wrong: np.ndarray) -> Outcomes:
    """One query per image."""
    return Outcomes(value, wrong, np.arange(len(value)), np.arange(len(value)))


def endings(bounds: Bounds, *, level: float, chance_high: float) -> tuple[np.ndarray, np.ndarray]:
    """Every course of a game with two values: the capital at its end, and how likely it is."""
    ends, chances = [], []
    for highs in product((False, True), repeat=ROUNDS):
        values = np.where(highs, bounds.highest, bounds.lowest)
        ends.append(capital(values, bounds, level=level)[-1])
        chances.append(chance_high ** sum(highs) * (1 - chance_high) ** (ROUNDS - sum(highs)))
    return np.array(ends), np.array(chances)


@settings(deadline=None)
@given(_low, _high, _spread, _level)
def test_a_fair_game_gains_nothing_on_average(low: float, high: float, spread: float, level: float) -> None:
    """Exact: all courses of eight rounds with a mean of zero."""
    ends, chances = endings(Bounds(low, high, spread), level=level, chance_high=-low / (high - low))
    assert (ends >= -1e-9).all()
    assert ends @ chances == pytest.approx(1.0)
    assert chances[ends >= 1 / level].sum() <= level + 1e-9


@settings(deadline=None)
@given(st.lists(st.floats(-0.1, 0.9), min_size=1, max_size=30), st.integers(0, 29), st.floats(0, 1), _spread, _level)
def test_a_larger_value_never_leads_to_more_capital(
    values: list[float], position: int, more: float, spread: float, level: float
) -> None:
    before = np.array(values)
    after = before.copy()
    after[position % len(values)] += more * (0.9 - after[position % len(values)])
    # Who has reached 1/δ stops, whatever it holds then.
    first, second = (
        np.minimum(capital(path, Bounds(-0.1, 0.9, spread), level=level), 1 / level) for path in (before, after)
    )
    assert (second <= first + 1e-9).all()


def test_power_is_near_that_of_the_exact_binomial_test() -> None:
    """300 answers with a risk of 5%, tested against 10%: the binomial test passes in 96 of 100 cases."""
    rng = np.random.default_rng(0)
    passed = [mean_is_negative((rng.random(300) < 0.05) - 0.1, TENTH, level=0.1) for _ in range(200)]
    assert np.mean(passed) > 0.9


def alike(rng: np.random.Generator, images: int, *, risk: float) -> Outcomes:
    """Five captions per image. A third of the images is confident, and all their captions are wrong together."""
    image = np.repeat(np.arange(images), 5)
    sure = (rng.random(images) < 0.3)[image]
    wrong = np.where(sure, (rng.random(images) < risk)[image], rng.random(len(image)) < 0.5)
    return Outcomes(np.where(sure, 0.9, 0.5), wrong, image, np.arange(len(image)))


def test_queries_that_fail_together_are_not_taken_for_many() -> None:
    """The risk is just above the bound: passing is the error that δ limits. 600 draws."""
    rng, level, draws = np.random.default_rng(0), 0.1, 600
    trial = [Trial(0.9, Bounds(-0.5, 4.5, np.sqrt(0.3 * 25 * 0.09)))]
    bad = [certify(alike(rng, 300, risk=0.101), trial, risk=0.1, level=level, generator=rng) for _ in range(draws)]
    passed = sum(one is not None for one in bad)
    assert passed <= draws * level + 2 * np.sqrt(draws * level * (1 - level))
    good = [certify(alike(rng, 300, risk=0.02), trial, risk=0.1, level=level, generator=rng) for _ in range(50)]
    assert sum(one is not None for one in good) > 40  # it is not kept by silence


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_more_wrong_answers_never_loosen_the_threshold(seed: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    images = int(rng.integers(5, 120))
    image = rng.integers(images, size=3 * images)
    value = rng.random(len(image))
    found = Outcomes(value, rng.random(len(image)) > value + 0.3, image, np.arange(len(image)))
    worse = found._replace(wrong=found.wrong | np.isin(np.arange(len(image)), rng.integers(len(image), size=more)))
    trials = [Trial(float(at), Bounds(-0.3, 2.7, 0.6)) for at in np.linspace(0.8, 0, 9)]
    first, second = (threshold_of(part, trials, risk=0.3, level=0.2) for part in (found, worse))
    assert second is None or (first is not None and second >= first)


def test_certify_stops_at_the_first_failure() -> None:
    value = np.arange(400, 0, -1) / 400
    wrong = np.zeros(400, dtype=bool)
    wrong[200:240] = True  # bad in the middle, so that the loosest would pass by itself

    def kept(*counts: int) -> float | None:
        trials = [Trial(float(value[count - 1]), Bounds(-0.15, 0.85, 0.33)) for count in counts]
        return threshold_of(singles(value, wrong), trials, risk=0.15)

    assert kept(100, 200, 240, 400) == value[199]
    assert kept(400) == value[399]
    assert kept(240, 400) is None


def test_losses_by_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    query = rng.integers(30, size=200)
    image, value, wrong = 7 * (query // 3), rng.random(200), rng.random(200) < 0.3
    value[0] = 0.4  # at the threshold, so it is an answer
    expected = []
    for one in sorted(set(image.tolist())):
        loss = 0.0
        for asked in set(query[image == one].tolist()):
            repeats = [row for row in range(200) if query[row] == asked]
            loss += sum(float(wrong[row]) - 0.1 for row in repeats if value[row] >= 0.4) / len(repeats)
        expected.append(loss)
    np.testing.assert_allclose(image_losses(Outcomes(value, wrong, image, query), 0.4, risk=0.1), expected, atol=1e-12)


def test_an_image_with_more_queries_than_any_that_chose_counts_as_so_many() -> None:
    image = np.repeat(np.arange(4), [10, 2, 1, 4])
    wrong, value = np.isin(np.arange(17), [0, 3, 10, 13, 14, 15, 16]), np.where(np.arange(17) == 1, 0.0, 1.0)
    losses = image_losses(Outcomes(value, wrong, image, np.arange(17)), 0.5, risk=0.1, most=2.0)
    np.testing.assert_allclose(losses, [(2 - 0.1 * 9) * 2 / 10, 1 - 0.2, -0.1, (4 - 0.4) * 2 / 4])


def test_an_image_with_many_queries_counts_as_the_most_that_were_expected() -> None:
    image = np.repeat(np.arange(312), [5] * 300 + [200] * 12)
    outcomes = Outcomes(np.ones(len(image)), image >= 300, image, np.arange(len(image)))
    assert threshold_of(outcomes, [Trial(0.5, Bounds(-0.5, 4.5, 1.5))]) == 0.5


@pytest.mark.parametrize("count", [0, 1, 7])
def test_next_to_nothing_certifies_nothing(count: int) -> None:
    for wrong in (np.zeros(count, dtype=bool), np.ones(count, dtype=bool)):
        found = singles(np.ones(count), wrong)
        assert threshold_of(found, [Trial(0.5, TENTH)]) is threshold_of(found, []) is None


def test_a_confidence_at_the_threshold_counts_as_an_answer() -> None:
    right = singles(np.full(90, 0.5), np.zeros(90, dtype=bool))
    assert threshold_of(right, [Trial(0.5, TENTH)]) == 0.5
    asked = Outcomes(np.array([1.0, 2, 3, 2]), np.array([0, 1, 0, 0], bool), np.array([5, 5, 8, 9]), np.arange(4))
    for threshold, counts in ((2.0, (4, 3, 1, 3)), (np.nextafter(2, 3), (4, 1, 0, 3)), (None, (4, 0, 0, 3))):
        assert check_threshold(asked, threshold)[:4] == counts


def test_trials_go_from_powerful_to_loose() -> None:
    value, wrong = np.linspace(1, 0, 400), np.arange(400) >= 200
    trials = trial_order(singles(value, wrong), risk=0.3)
    thresholds = [trial.threshold for trial in trials]
    assert (np.diff(thresholds) < 0).all()
    assert value[220] < thresholds[0] < value[150]  # begins where most answers are good
    assert thresholds[-1] == value[-1]
    assert all(trial.bounds[:2] == (-0.3, 0.7) and trial.bounds.spread > 0 for trial in trials)
    assert len(trial_order(singles(value[:3], wrong[:3]), risk=0.1)) == 1


def wilson(misses: int, trials: int) -> tuple[float, float]:
    found = binomtest(misses, trials).proportion_ci(method="wilson")
    return found.low, found.high


def test_the_interval_is_wilsons_for_as_many_trials_as_images_are_worth() -> None:
    failures = (np.arange(80) < 8).astype(float)
    assert share_interval(failures, np.ones(80)) == pytest.approx(wilson(8, 80))
    assert share_interval(5 * failures, np.full(80, 5)) == pytest.approx(wilson(8, 80))
    low, high = share_interval(np.repeat([2, 1, 0], [1, 38, 41]), np.full(80, 5))  # 40 of 400, hardly together
    assert wilson(8, 80)[0] < low < 0.1 < high < wilson(8, 80)[1]
    assert share_interval(np.zeros(40), np.full(40, 5)) == pytest.approx(wilson(0, 40))
    assert share_interval(np.full(3, 5), np.full(3, 5)) == pytest.approx(wilson(3, 3))
    assert share_interval(np.zeros(3), np.zeros(3)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (RiskCheck(100, 0, 0, 50), "no query was answered"),
        (RiskCheck(100, 50, 5, 50, (0.04, 0.2)), "; held: 10.0% wrong"),
        (RiskCheck(100, 50, 4, 49, (0.032, 0.188)), "on fewer images (49) than the calibration used (50)."),
        (RiskCheck(100, 50, 6, 50, (0.06, 0.24)), "did NOT hold, which chance may explain: 12.0% wrong"),
        (RiskCheck(100, 50, 25, 50, (0.37, 0.63)), "did NOT hold, more than chance explains: 50.0% wrong"),
    ],
)
def test_the_verdict_is_plain(check: RiskCheck, words: str) -> None:
    assert words in verdict(check, risk=0.1, confidence=0.9, images=50)


def test_an_image_with_as_many_queries_as_any_that_chose_counts_in_full() -> None:
    bounds = Bounds(-0.5, 4.5, 0.5)
    images = next(n for n in range(1, 500) if mean_is_negative(np.full(n, -0.5), bounds, level=0.1))
    rows = np.arange(5 * images)
    right = Outcomes(np.ones(5 * images), np.zeros(5 * images, dtype=bool), rows // 5, rows)
    assert threshold_of(right, [Trial(0.5, bounds)]) == 0.5
