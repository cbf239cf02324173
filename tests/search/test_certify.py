"""Cutoffs that hold, where the truth is known: the bound of a share, cutoffs that it certifies, and answer sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from vacsr.search.certify import (
    FEW,
    Graded,
    count_shown,
    countable_level,
    find_cutoff,
    find_set_cutoff,
    share_bound,
)


def singles(grade: np.ndarray, right: np.ndarray) -> Graded:
    """One query per image, with one hit."""
    return Graded(grade[:, None], right[:, None], np.arange(len(grade)))


@given(st.integers(1, 400), st.integers(0, 400), st.sampled_from([0.025, 0.035, 0.1]))
def test_one_hit_per_image_has_the_bound_of_clopper_and_pearson(hits: int, wrong: int, level: float) -> None:
    wrong = min(wrong, hits)
    exact = binomtest(wrong, hits).proportion_ci(1 - 2 * level, method="exact").high
    bound = share_bound(np.arange(hits) < wrong, np.ones(hits), level=level)
    # The variance over images is counted with n − 1, so the hits are worth a little less than their number.
    assert exact - 1e-9 <= bound <= exact + 1.0 / hits


def test_hits_that_fail_together_count_once() -> None:
    wrong, once = np.eye(60)[0] + np.eye(60)[1], np.ones(60)
    assert share_bound(5 * wrong, 5 * once, level=0.1) == pytest.approx(share_bound(wrong, once, level=0.1))
    spread = np.concatenate((np.ones(10), np.zeros(50)))
    assert share_bound(spread, 5 * once, level=0.1) < share_bound(5 * wrong, 5 * once, level=0.1)


def test_bounds_of_nothing_and_of_failures_alone() -> None:
    assert share_bound(np.zeros(3), np.zeros(3), level=0.1) == 1.0
    assert share_bound(np.ones(3), np.ones(3), level=0.1) == 1.0
    assert share_bound(np.zeros(300), np.eye(300)[0], level=0.1) > 0.8, "images without hits say nothing"


def test_the_cutoff_is_the_first_that_passes_of_a_plain_list() -> None:
    rng = np.random.default_rng(0)
    grade = np.sort(rng.random((300, 4)), axis=1)[:, ::-1]
    right, image = rng.random((300, 4)) < grade**0.3, np.arange(300) // 3
    cutoff = find_cutoff(Graded(grade, right, image), precision=0.9, confidence=0.8)
    values, count = sorted(grade.ravel(), reverse=True), 1200.0
    while True:
        some = values[int(count) - 1]
        wrong = [int(((grade >= some) & ~right)[image == one].sum()) for one in range(100)]
        hits = [int((grade >= some)[image == one].sum()) for one in range(100)]
        if share_bound(np.array(wrong), np.array(hits), level=countable_level(0.8)) <= 0.1:
            break
        count *= 0.9
    assert cutoff == some
    assert cutoff > grade.min()


def test_no_cutoff_where_hits_are_few_or_wrong() -> None:
    sure = np.linspace(1, 0, 1000)
    asked = {"precision": 0.9, "confidence": 0.9}
    assert find_cutoff(singles(sure, sure > 2), **asked) is None
    assert find_cutoff(singles(sure[: FEW - 1], sure[: FEW - 1] > 0), **asked) is None
    assert find_cutoff(singles(sure, sure >= 0), **asked) == 0.0
    for count in (FEW - 1, FEW):  # whatever is asked of them
        cutoff = find_cutoff(singles(sure[:count], sure[:count] > 0), precision=0.5, confidence=0.6)
        assert (cutoff is None) == (count < FEW)


def world(rng: np.random.Generator, images: int, captions: int = 5) -> Graded:
    """Queries of one image fail together: half of a hit's luck is the image's. A hit of grade g is right with g."""
    shared, own = rng.normal(size=(images, 1)), rng.normal(size=(images, captions))
    luck = np.argsort(np.argsort(0.7**0.5 * shared + 0.3**0.5 * own, axis=None)).reshape(images, captions)
    grade = np.clip(rng.beta(2, 1, size=(images, 1)) + rng.normal(0, 0.05, size=(images, captions)), 0, 1)
    right = (luck + 0.5) / luck.size < grade
    return Graded(grade.reshape(-1, 1), right.reshape(-1, 1), np.arange(images).repeat(captions))


@pytest.mark.slow
def test_the_guarantee_holds_in_a_thousand_simulated_worlds() -> None:
    """The true precision above a cutoff is the mean grade there: each hit is right with the chance of its grade."""
    rng = np.random.default_rng(0)
    every = world(rng, 200_000).grade
    broken, given_up, counted = 0, 0, 0
    for _ in range(1000):
        cutoff = find_cutoff(world(rng, 300), precision=0.9, confidence=0.9)
        given_up += cutoff is None
        if cutoff is not None:
            broken += bool(every[every >= cutoff].mean() < 0.9)
            other = count_shown(world(rng, 300), cutoff)
            counted += other.wrong > 0.1 * other.hits
    assert given_up < 50
    assert broken <= 100, "a true precision below 90% in at most 10% of the worlds"
    assert counted <= 100 + 3 * 90**0.5, "and a counted one, up to the noise of a thousand"


@pytest.mark.filterwarnings("ignore:.*conformalization dataset has less labels:UserWarning")
@settings(deadline=None)
@given(st.integers(10, 200), st.integers(0, 1000), st.sampled_from([0.6, 0.8, 0.9]))
def test_sets_are_those_of_mapie_with_one_caption_per_image(count: int, seed: int, coverage: float) -> None:
    classification = pytest.importorskip("mapie.classification")
    rng = np.random.default_rng(seed)
    chance, label = rng.dirichlet(np.ones(5), size=count), rng.integers(5, size=count)

    class Known:
        """A fitted classifier that has the chances ready."""

        classes_ = np.arange(5)

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def fit(self, *_: Any) -> Known:
            return self

        def predict(self, rows: np.ndarray) -> np.ndarray:
            return chance[rows[:, 0]].argmax(1)

        def predict_proba(self, rows: np.ndarray) -> np.ndarray:
            return chance[rows[:, 0]]

    rows = np.arange(count)[:, None]
    mapie = classification.SplitConformalClassifier(Known(), confidence_level=coverage, conformity_score="lac")
    mapie.conformalize(rows, label)
    _, sets = mapie.predict_set(rows)
    cutoff = find_set_cutoff(chance[np.arange(count), label], np.arange(count), coverage=coverage)
    assert cutoff is not None
    np.testing.assert_array_equal(chance >= cutoff - 1e-9, sets[:, :, 0])


def test_images_weigh_alike_in_a_set() -> None:
    best = np.array([0.1] * 8 + [0.5, 0.6, 0.7])
    image = np.array([0] * 8 + [1, 2, 3])
    assert find_set_cutoff(best, image, coverage=0.8) == 0.1, "eight bad queries of one image are one image of four"
    assert find_set_cutoff(best, np.arange(11), coverage=0.3) == 0.1
    assert find_set_cutoff(best, image, coverage=0.6) == 0.5
    none = np.where(best < 0.3, -np.inf, best)
    assert find_set_cutoff(none, image, coverage=0.8) is None, "nothing holds what is not among the candidates"


def test_sets_hold_at_the_asked_rate() -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(200):
        best = np.clip(rng.normal(size=(2, 100, 1)) + 0.5 * rng.normal(size=(2, 100, 5)), -9, 9)
        cutoff = find_set_cutoff(best[0].ravel(), np.arange(100).repeat(5), coverage=0.9)
        held.append((best[1] >= cutoff).mean())
    assert np.mean(held) == pytest.approx(0.905, abs=0.01)


@pytest.mark.parametrize("cutoff", [None, 0.5, 0.9, 2.0])
def test_counts(cutoff: float | None) -> None:
    grade = np.array([[0.9, 0.5], [0.8, 0.4], [0.3, 0.2]])
    right = np.array([[True, False], [False, True], [True, True]])
    shown = count_shown(Graded(grade, right, np.array([4, 4, 7])), cutoff)
    expected = {None: (0, 0, 0), 0.5: (2, 3, 2), 0.9: (1, 1, 0), 2.0: (0, 0, 0)}[cutoff]
    assert (shown.answered, shown.hits, shown.wrong) == expected
    assert (shown.queries, shown.images, shown.coverage) == (3, 2, expected[0] / 3)
    assert np.isnan(shown.precision) if not shown.hits else shown.precision == 1 - shown.wrong / shown.hits
    low, high = shown.interval
    assert 0 <= low <= high <= 1
