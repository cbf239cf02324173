"""The promise, where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import beta

from vacsr.errors import DataError
from vacsr.search.candidates import Candidates
from vacsr.search.certify import Outcomes, certify, design_effect, failure_correlation, trial_order
from vacsr.search.risk import check_rule, fit_answer_rule


def world(rng: np.random.Generator, images: int, *, per_image: int, shared: float, hard: float = 0.0) -> Candidates:
    """Lists whose first answer is right with a chance that its margin tells, and that an image's queries share."""
    count = images * per_image
    image = np.repeat(np.arange(images), per_image)
    ease = np.sqrt(shared) * rng.normal(size=images)[image] + np.sqrt(1 - shared) * rng.normal(size=count)
    margin = np.abs(rng.normal(size=count)) * 2
    right = expit(2 * margin + 1.5 * ease - 2 - hard) > rng.random(count)
    rest = np.sort(rng.normal(size=(count, 5)), axis=1)[:, ::-1]
    score = np.concatenate((rest[:, :1] + margin[:, None], rest), axis=1)
    found = np.zeros(score.shape, dtype=bool)
    found[:, 0] = right
    return Candidates(score, score / 10, None, found, image, gallery=6)


def outcomes(value: NDArray[np.float64], wrong: NDArray[np.bool_]) -> Outcomes:
    return Outcomes(value, wrong, np.arange(len(value)), 0.0)


@pytest.mark.parametrize("per_image", [1, 5])
def test_the_promise_is_kept_as_often_as_it_says(per_image: int) -> None:
    """40 fits; the true risk of each rule is measured on 20,000 fresh queries."""
    rng = np.random.default_rng(per_image)
    fresh = world(rng, 20_000 // per_image, per_image=per_image, shared=0.5, hard=-1.0)
    broken, answering = 0, 0
    for _ in range(40):
        found = world(rng, 300, per_image=per_image, shared=0.5, hard=-1.0)
        choose = (rng.random(300) < 0.4)[found.image]
        rule = fit_answer_rule(found, choose, risk=0.1, confidence=0.9, generator=rng, measures=("score", "margin"))
        checked = check_rule(rule, fresh)
        answering += checked.answered > 0
        broken += checked.answered > 0 and checked.risk > 0.1
    assert answering > 20  # it is not kept by silence
    assert broken <= 40 * 0.1 + 2 * np.sqrt(40 * 0.09)


def test_where_nothing_is_good_enough_nothing_is_answered() -> None:
    rng = np.random.default_rng(0)
    found = world(rng, 200, per_image=1, shared=0.0, hard=6.0)
    rule = fit_answer_rule(found, np.arange(200) < 80, risk=0.02, confidence=0.95, generator=rng)
    assert rule.threshold is None
    assert check_rule(rule, found) == (200, 0, 0)
    assert np.isnan(check_rule(rule, found).risk)


def test_certify_stops_at_the_first_failure_and_gives_clopper_pearson() -> None:
    value = np.arange(100, 0, -1) / 100
    wrong = np.zeros(100, dtype=bool)
    wrong[[30, 35, 60, 61, 62, 63, 64, 65, 66, 67]] = True
    thresholds = np.array([0.71, 0.61, 0.35, 0.01])  # 30, 40, 66 and 100 answers with 0, 2, 8 and 10 wrong
    found = certify(outcomes(value, wrong), thresholds, risk=0.15, confidence=0.9)
    assert found[:3] == (0.61, 40, 2)
    assert found.bound == pytest.approx(beta.ppf(0.9, 3, 38))
    # The last would pass by itself: order is what counts.
    assert beta.ppf(0.9, 11, 90) < 0.16
    assert certify(outcomes(value, wrong), thresholds[3:], risk=0.16, confidence=0.9).threshold == 0.01
    assert certify(outcomes(value, wrong), thresholds[2:], risk=0.16, confidence=0.9).threshold is None


def test_queries_that_fail_together_count_for_one() -> None:
    image = np.repeat(np.arange(30), 5)
    wrong = np.repeat(np.arange(30) < 2, 5)
    value = np.ones(150)
    assert design_effect(image, 1.0) == 5.0
    alone = certify(Outcomes(value, wrong, image, 0.0), np.array([0.5]), risk=0.12, confidence=0.9)
    together = certify(Outcomes(value, wrong, image, 1.0), np.array([0.5]), risk=0.12, confidence=0.9)
    assert alone.threshold == 0.5
    assert together.threshold is None
    loose = certify(Outcomes(value, wrong, image, 1.0), np.array([0.5]), risk=0.3, confidence=0.9)
    assert loose.bound == pytest.approx(beta.ppf(0.9, 3, 28))


def test_answers_that_are_all_wrong_certify_nothing() -> None:
    wrong = Outcomes(np.ones(7), np.ones(7, dtype=bool), np.repeat([0, 1], [3, 4]), 0.3)
    assert certify(wrong, np.array([0.5]), risk=0.9, confidence=0.5) == (None, 0, 0, 1.0)


def test_correlation_is_that_of_pairs_within_an_image() -> None:
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(40), 3)
    wrong = rng.random(120) < 0.3
    chance = rng.uniform(0.4, 0.9, 120)
    rest = wrong - (1 - chance)
    products = [rest[i] * rest[j] for i in range(120) for j in range(120) if i != j and image[i] == image[j]]
    expected = np.mean(products) / np.mean(rest**2)
    assert failure_correlation(chance, wrong, image) == pytest.approx(max(0.0, expected))
    assert failure_correlation(chance, wrong, np.arange(120)) == 0.0
    assert failure_correlation(np.full(120, 0.5), np.repeat(rng.random(40) < 0.5, 3), image) == pytest.approx(1.0)


def test_trials_go_from_powerful_to_loose() -> None:
    value = np.linspace(1, 0, 200)
    wrong = np.zeros(200, dtype=bool)
    wrong[100:] = True
    order = trial_order(value, wrong, 0.3)
    assert (np.diff(order) < 0).all()
    assert order[0] > value[120]  # begins where the answers are good
    assert order[-1] == value[-1]


def test_too_few_queries_are_refused() -> None:
    found = world(np.random.default_rng(0), 30, per_image=1, shared=0.0)
    with pytest.raises(DataError, match="too few"):
        fit_answer_rule(found, np.arange(30) < 5, risk=0.1, confidence=0.9, generator=np.random.default_rng(0))
