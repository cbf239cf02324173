"""Pool adjacent violators against the definition: the nearest rising sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.errors import DataError
from vacsr.search.isotonic import Isotonic, fit_isotonic, pool_adjacent_violators

_weighted = st.lists(
    st.tuples(st.floats(-5, 5, allow_subnormal=False), st.floats(0.1, 3, allow_subnormal=False)), min_size=1, max_size=9
)


def minimax(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """The closed form: at each place the largest, over starts, of the smallest, over ends, of weighted means."""
    count = len(values)

    def mean(a: int, b: int) -> float:
        return float(np.average(values[a : b + 1], weights=weights[a : b + 1]))

    return [max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)]


@given(_weighted)
def test_pooling_is_the_minimax_formula(items: list[tuple[float, float]]) -> None:
    values, weights = np.array([v for v, _ in items]), np.array([w for _, w in items])
    found = pool_adjacent_violators(values, weights)
    np.testing.assert_allclose(found, minimax(values, weights), atol=1e-9)
    assert (np.diff(found) >= -1e-12).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40))
def test_the_fit_is_the_pooled_group_means_and_keeps_the_mean(items: list[tuple[int, bool]]) -> None:
    x, y = np.array([a for a, _ in items], dtype=float), np.array([b for _, b in items], dtype=float)
    places = sorted(set(x.tolist()))
    means = np.array([y[x == place].mean() for place in places])
    sizes = np.array([(x == place).sum() for place in places], dtype=float)
    fit = fit_isotonic(x, y)
    np.testing.assert_allclose(fit.apply(places), minimax(means, sizes), atol=1e-9)
    assert fit.apply(x).mean() == pytest.approx(y.mean())


def test_between_corners_it_is_straight_and_beyond_them_flat() -> None:
    fit = Isotonic(x=(0.0, 2.0), y=(0.0, 1.0))
    assert fit.apply([-9.0, 0.5, 9.0]).tolist() == [0.0, 0.25, 1.0]


def test_nothing_to_fit_is_said() -> None:
    with pytest.raises(DataError, match="no values"):
        fit_isotonic([], [])
