"""What a rule is worth on other queries: counts, intervals, the verdict, and hubs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from vacsr.search.candidates import Candidates
from vacsr.search.counted import RiskCheck, check_rule, share_interval, verdict
from vacsr.search.hubs import hub_share
from vacsr.search.logistic import Logistic
from vacsr.search.risk import AnswerRule


def by_score(threshold: float | None) -> AnswerRule:
    """Answers by the score alone, in units of 1."""
    return AnswerRule(
        measure="score", signals=("score",), logistic=Logistic(mean=(0.0,), scale=(1.0,), weight=(1.0,), bias=0.0),
        spread=1.0, cosine_spread=1.0, threshold=threshold, risk=0.1, confidence=0.9, level=0.04,
        certified=100, images=3, answered=50, wrong=2,
    )  # fmt: skip


def test_a_confidence_that_equals_the_threshold_is_an_answer() -> None:
    score = np.column_stack(([1.0, 2.0, 3.0, 2.0], np.zeros(4)))
    right = np.array([[True, False], [False, False], [True, False], [True, False]])
    found = Candidates(score, score, None, right, np.array([5, 5, 8, 9]), np.arange(4), gallery=2)
    at_two = float(by_score(0.5).of(found)[1])
    assert check_rule(by_score(at_two), found)[:4] == (4, 3, 1, 3)
    assert check_rule(by_score(np.nextafter(at_two, 1)), found)[:4] == (4, 1, 0, 3)
    assert check_rule(by_score(None), found)[:4] == (4, 0, 0, 3)


def test_hubs_are_counted_by_the_images_that_they_mislead() -> None:
    """Item 7 comes first for every second image. The rest of the wrong answers are scattered, and few each."""
    image = np.repeat(np.arange(300), np.where(np.arange(300) % 2 == 0, 3, 1))  # whom the hub misleads, it does thrice
    count = len(image)
    score = np.column_stack((np.where(image < 200, 2.0, 0.0), np.zeros(count)))
    right = np.zeros((count, 2), dtype=bool)
    right[:, 0] = image % 4 == 3
    first = np.where(image % 2 == 0, 7, 1000 + image)
    found = Candidates(score, score, None, right, image, np.arange(count), gallery=300, first=first)
    # Of 200 images that are answered 150 are misled: 100 by the hub, 50 by an item each. 151 items come first, and two
    # of them are looked at.
    assert hub_share(by_score(0.7), found) == pytest.approx((100 + 1) / 150)
    assert hub_share(by_score(0.7), found.take(image >= 190)) == pytest.approx(5 / 7)  # one of 56
    scattered = found._replace(first=1000 + image)
    assert hub_share(by_score(0.7), scattered) == 0.0
    assert hub_share(by_score(None), found) == 0.0
    assert hub_share(by_score(0.7), found._replace(first=None)) == 0.0
    nothing_wrong = found._replace(right=np.ones_like(right))
    assert hub_share(by_score(0.7), nothing_wrong) == 0.0


def wilson(misses: int, trials: int) -> tuple[float, float]:
    found = binomtest(misses, trials).proportion_ci(method="wilson")
    return found.low, found.high


def test_the_interval_is_wilsons_for_queries_alone_and_for_those_that_fail_together_one_each() -> None:
    failures = (np.arange(80) < 8).astype(np.int64)
    assert share_interval(failures, np.ones(80, dtype=np.int64)) == pytest.approx(wilson(8, 80))
    assert share_interval(5 * failures, np.full(80, 5)) == pytest.approx(wilson(8, 80))
    scattered = share_interval(np.repeat([2, 1, 0], [1, 38, 41]), np.full(80, 5))  # 40 of 400, hardly together
    assert wilson(8, 80)[0] < scattered.low < 0.1 < scattered.high < wilson(8, 80)[1]
    assert share_interval(np.zeros(40, dtype=np.int64), np.full(40, 5)) == pytest.approx(wilson(0, 40))
    assert share_interval(np.full(3, 5), np.full(3, 5)) == pytest.approx(wilson(3, 3))
    assert share_interval(np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)) == (0.0, 1.0)


def test_the_interval_covers_the_truth_of_queries_that_fail_together() -> None:
    rng, missed = np.random.default_rng(3), 0
    for _ in range(300):
        answers = rng.integers(0, 6, size=200)
        failures = rng.binomial(answers, rng.beta(0.3, 2.7, size=200))  # a risk of 10%, differing between images
        low, high = share_interval(failures, answers)
        missed += not low <= 0.1 <= high
    assert missed <= 300 * 0.05 + 3 * np.sqrt(300 * 0.05)


def test_the_verdict_is_plain() -> None:
    rule = by_score(0.5).model_copy(update={"images": 50})
    assert "nothing was answered" in verdict(RiskCheck(100, 0, 0, 50), rule)
    held = RiskCheck(100, 50, 4, 50, share_interval(np.repeat([1, 0], [4, 46]), np.ones(50, dtype=np.int64)))
    assert "; held: 8.0% wrong (95% interval 3.2% to 18.8%), 50.0% answered." in verdict(held, rule)
    few = ", 50.0% answered, over fewer images (49) than certified it (50)."
    assert verdict(held._replace(images=49), rule).endswith(few)
    luck = held._replace(wrong=6)
    assert "did NOT hold, which chance may explain: 12.0% wrong" in verdict(luck, rule)
    bad = RiskCheck(100, 50, 25, 50, share_interval(np.repeat([1, 0], [25, 25]), np.ones(50, dtype=np.int64)))
    assert "did NOT hold, more than chance explains: 50.0% wrong" in verdict(bad, rule)
