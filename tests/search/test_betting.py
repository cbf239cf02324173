"""The gambler's capital: a game that nobody can win who has no reason to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.search.betting import Bounds, capital, growth, mean_is_negative, stake

ROUNDS = 8
_low, _high = st.floats(-1, -0.01), st.floats(0.01, 1)
_spread, _level = st.floats(0.01, 2), st.floats(0.01, 0.5)


def endings(bounds: Bounds, *, level: float, chance_high: float) -> tuple[np.ndarray, np.ndarray]:
    """Every course of a game with two values: the capital at its end, and how likely it is."""
    ends, chances = [], []
    for highs in product((False, True), repeat=ROUNDS):
        values = np.where(highs, bounds.highest, bounds.lowest)
        ends.append(capital(values, bounds, level=level)[-1])
        chances.append(chance_high ** sum(highs) * (1 - chance_high) ** (ROUNDS - sum(highs)))
    return np.array(ends), np.array(chances)


@given(_low, _high, _spread, _level)
def test_a_fair_game_gains_nothing_on_average_and_rarely_much(
    low: float, high: float, spread: float, level: float
) -> None:
    """Exact: all courses of eight rounds with a mean of zero."""
    ends, chances = endings(Bounds(low, high, spread), level=level, chance_high=-low / (high - low))
    assert (ends >= -1e-9).all()
    assert ends @ chances == pytest.approx(1.0)
    assert chances[ends >= 1 / level].sum() <= level + 1e-9


@given(_low, _high, _spread, st.floats(0, 1))
def test_an_unfair_game_loses_on_average(low: float, high: float, spread: float, more: float) -> None:
    fair = -low / (high - low)
    ends, chances = endings(Bounds(low, high, spread), level=0.1, chance_high=fair + more * (1 - fair))
    assert ends @ chances <= 1 + 1e-9


_values = st.lists(st.floats(-0.1, 0.9), min_size=1, max_size=30)


@given(_values, st.integers(0, 29), st.floats(0, 1), _spread, _level)
def test_a_larger_value_never_leads_to_more_capital(
    values: list[float], place: int, more: float, spread: float, level: float
) -> None:
    before = np.array(values)
    after = before.copy()
    after[place % len(values)] += more * (0.9 - after[place % len(values)])
    bounds = Bounds(-0.1, 0.9, spread)
    first, second = (capital(path, bounds, level=level) for path in (before, after))
    # Who has reached 1/δ stops, whatever it holds then.
    reached = np.minimum(first, 1 / level), np.minimum(second, 1 / level)
    assert (reached[1] <= reached[0] + 1e-9).all()


@given(st.floats(0, 9.9), _spread, st.integers(1, 1000))
def test_nobody_stakes_more_than_there_is(held: float, spread: float, left: int) -> None:
    placed = stake(held, Bounds(-0.1, 0.9, spread), left=left, level=0.1)
    assert placed >= 0
    assert held - 0.9 * placed >= -1e-12


def test_no_values_show_nothing() -> None:
    assert capital(np.zeros(0), Bounds(-0.1, 0.9, 0.3), level=0.1).tolist() == [1.0]
    assert not mean_is_negative(np.zeros(0), Bounds(-0.1, 0.9, 0.3), level=0.1)
    assert not mean_is_negative(np.zeros(500), Bounds(-0.1, 0.9, 0.3), level=0.1)
    assert not mean_is_negative(np.full(500, 0.9), Bounds(-0.1, 0.9, 0.3), level=0.1)


def test_power_is_near_that_of_the_exact_binomial_test() -> None:
    """300 answers with a risk of 5%, tested against 10%: the binomial test passes in 96 of 100 cases."""
    rng, bounds = np.random.default_rng(0), Bounds(-0.1, 0.9, 0.3)
    passed = [mean_is_negative((rng.random(300) < 0.05) - 0.1, bounds, level=0.1) for _ in range(200)]
    assert np.mean(passed) > 0.9


def test_growth_is_that_of_the_best_constant_stake() -> None:
    values = np.where(np.arange(100) < 3, 0.9, -0.1)
    spread = float(np.sqrt(np.mean(values**2)))
    found = growth(values, Bounds(-0.1, 0.9, spread))
    tried = [-share * values.mean() - share**2 * np.mean(values**2) / 2 for share in np.linspace(0, 1 / 0.9, 20_001)]
    assert found == pytest.approx(max(tried), rel=1e-6)
    assert growth(-values, Bounds(-0.9, 0.1, spread)) == 0.0
