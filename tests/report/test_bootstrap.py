from __future__ import annotations

import statistics

import numpy as np
import pytest

from vacsr.report.bootstrap import Part, drawn_figures, paired_bootstrap


def alone(values: np.ndarray, first: int = 0) -> Part:
    """Every query an image of its own."""
    return Part(values.reshape(len(values), -1), first + np.arange(len(values)))


def plain_bootstrap(parts: list[Part], *, draws: int, generator: np.random.Generator) -> list[float]:
    """Image by image, draw by draw; of one comparison."""
    images = sorted({image for part in parts for image in part.image.tolist()})
    found = []
    for _ in range(draws):
        chosen = [images[int(generator.integers(len(images)))] for _ in images]
        total = 0.0
        for part in parts:
            of = {
                image: [v for v, i in zip(part.values[:, 0], part.image, strict=True) if i == image] for image in images
            }
            total += statistics.fmean([value for image in chosen for value in of[image]])
        found.append(total)
    return found


def test_against_a_plain_bootstrap() -> None:
    generator = np.random.default_rng(3)
    captions = np.repeat(np.arange(30), 3)
    shared = generator.normal(0.2, 1.0, 30)
    parts = [alone(shared + generator.normal(0.2, 0.3, 30)), Part((shared[captions] - 0.3)[:, None], captions)]
    slow = np.array(plain_bootstrap(parts, draws=3000, generator=np.random.default_rng(5)))
    (found,) = paired_bootstrap(parts, draws=40_000, seed=1)
    assert found.difference == pytest.approx(sum(part.values.mean() for part in parts))
    low, high = np.quantile(slow, [0.025, 0.975])
    spread = slow.std()
    assert found.low == pytest.approx(low, abs=0.15 * spread)  # 3,000 draws know a quantile about as well as this
    assert found.high == pytest.approx(high, abs=0.15 * spread)
    share = min((slow <= 0).mean(), (slow >= 0).mean())
    assert found.p == pytest.approx(2 * share, abs=0.04)


def test_a_draw_is_a_mean_of_the_drawn_images_queries() -> None:
    """The same integers, used one by one, give the same means; images may have any number of queries."""
    values = np.random.default_rng(0).normal(size=(7, 3))
    image = np.array([4, 4, 9, 9, 9, 2, 5])
    found = drawn_figures([Part(values, image)], draws=5, generator=np.random.default_rng(9))
    names = [2, 4, 5, 9]
    for draw, places in enumerate(np.random.default_rng(9).integers(0, 4, (5, 4))):
        rows = [row for place in places for row in range(7) if image[row] == names[place]]
        np.testing.assert_allclose(found[draw], values[rows].mean(axis=0))


def test_draws_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(7, 2))
    whole = drawn_figures([alone(values)], draws=23, generator=np.random.default_rng(9))
    monkeypatch.setattr("vacsr.report.bootstrap._ELEMENTS", 15)
    pieces = drawn_figures([alone(values)], draws=23, generator=np.random.default_rng(9))
    np.testing.assert_allclose(pieces, whole)


def test_coverage_on_simulated_data() -> None:
    """The interval holds the truth about 95 times in 100, also where captions of an image fare alike."""
    generator = np.random.default_rng(11)
    truth, trials, images = 0.3, 400, 60
    own = generator.normal(0.0, 1.0, (images, trials))
    captions = np.repeat(np.arange(images), 2)
    texts = truth / 2 + own[captions] + generator.normal(0.0, 0.5, (2 * images, trials))
    photos = truth / 2 + own + generator.exponential(0.5, (images, trials)) - 0.5
    found = paired_bootstrap([alone(photos), Part(texts, captions)], draws=1000, seed=2)
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.90 <= held <= 0.98
    none = paired_bootstrap([alone(photos - truth / 2), Part(texts - truth / 2, captions)], draws=1000, seed=2)
    assert 0.02 <= np.mean([one.p < 0.05 for one in none]) <= 0.10
    apart = paired_bootstrap([alone(photos), alone(texts, first=images)], draws=1000, seed=2)
    assert np.mean([one.low <= truth <= one.high for one in apart]) < 0.90  # what drawing captions apart would say


def test_comparisons_share_the_draws_and_the_seed_decides() -> None:
    values = np.random.default_rng(0).normal(size=(30, 1))
    twice = paired_bootstrap([alone(np.hstack([values, values]))], draws=200, seed=4)
    assert twice[0] == twice[1]
    assert paired_bootstrap([alone(values)], draws=200, seed=4)[0] == pytest.approx(twice[0])
    assert paired_bootstrap([alone(values)], draws=200, seed=5)[0] != pytest.approx(twice[0])


def test_no_difference_at_all() -> None:
    (found,) = paired_bootstrap([alone(np.zeros(10))], draws=100)
    assert found == (0.0, 0.0, 0.0, 1.0)


def test_a_draw_that_asks_nothing_is_left_out() -> None:
    """One of three images has captions: draws without it say nothing of captions."""
    parts = [alone(np.ones(3)), Part(np.full((2, 1), 2.0), np.array([1, 1]))]
    drawn = drawn_figures(parts, draws=200, generator=np.random.default_rng(0))
    assert 0 < len(drawn) < 200
    np.testing.assert_allclose(drawn, 3.0)
