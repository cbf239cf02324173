from __future__ import annotations

import statistics

import numpy as np
import pytest

from vacsr.report.bootstrap import drawn_means, paired_bootstrap


def plain_bootstrap(parts: list[list[float]], *, draws: int, generator: np.random.Generator) -> list[float]:
    """Query by query, draw by draw."""
    found = []
    for _ in range(draws):
        total = 0.0
        for part in parts:
            chosen = [part[int(generator.integers(len(part)))] for _ in part]
            total += statistics.fmean(chosen)
        found.append(total)
    return found


def test_against_a_plain_bootstrap() -> None:
    generator = np.random.default_rng(3)
    parts = [generator.normal(0.4, 1.0, 40), generator.normal(-0.1, 2.0, 90)]
    slow = np.array(plain_bootstrap([p.tolist() for p in parts], draws=4000, generator=np.random.default_rng(5)))
    (found,) = paired_bootstrap([part[:, None] for part in parts], draws=40_000, seed=1)
    assert found.difference == pytest.approx(parts[0].mean() + parts[1].mean())
    low, high = np.quantile(slow, [0.025, 0.975])
    spread = slow.std()
    assert found.low == pytest.approx(low, abs=0.12 * spread)  # 4,000 draws know a quantile about as well as this
    assert found.high == pytest.approx(high, abs=0.12 * spread)
    share = min((slow <= 0).mean(), (slow >= 0).mean())
    assert found.p == pytest.approx(2 * share, abs=0.03)


def test_a_draw_is_a_mean_of_the_drawn_queries() -> None:
    """The same integers, used one by one, give the same means."""
    values = np.random.default_rng(0).normal(size=(7, 3))
    found = drawn_means(values, draws=5, generator=np.random.default_rng(9))
    chosen = np.random.default_rng(9).integers(0, 7, (5, 7))
    for draw, queries in enumerate(chosen):
        expected = sum(values[query] for query in queries) / 7
        np.testing.assert_allclose(found[draw], expected)


def test_draws_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(7, 2))
    whole = drawn_means(values, draws=23, generator=np.random.default_rng(9))
    monkeypatch.setattr("vacsr.report.bootstrap._ELEMENTS", 15)
    np.testing.assert_allclose(drawn_means(values, draws=23, generator=np.random.default_rng(9)), whole)


def test_coverage_on_simulated_data() -> None:
    """The interval holds the truth about 95 times in 100; where there is none, p is small about 5 times."""
    generator = np.random.default_rng(11)
    truth, trials, queries = 0.3, 400, 60
    images = truth / 2 + generator.exponential(1.0, (queries, trials)) - 1.0
    captions = truth / 2 + generator.normal(0.0, 2.0, (2 * queries, trials))
    found = paired_bootstrap([images, captions], draws=1000, seed=2)
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.90 <= held <= 0.98
    none = paired_bootstrap([images - truth / 2, captions - truth / 2], draws=1000, seed=2)
    assert 0.02 <= np.mean([one.p < 0.05 for one in none]) <= 0.10


def test_comparisons_share_the_draws_and_the_seed_decides() -> None:
    values = np.random.default_rng(0).normal(size=(30, 1))
    twice = paired_bootstrap([np.hstack([values, values])], draws=200, seed=4)
    assert twice[0] == twice[1]
    assert paired_bootstrap([values], draws=200, seed=4)[0] == pytest.approx(twice[0])
    assert paired_bootstrap([values], draws=200, seed=5)[0] != pytest.approx(twice[0])


def test_no_difference_at_all() -> None:
    (found,) = paired_bootstrap([np.zeros((10, 1))], draws=100)
    assert found == (0.0, 0.0, 0.0, 1.0)
