"""Grades and confidence against plain definitions, and the answer rule where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from vacsr.search import probabilities
from vacsr.search.certify import RiskCheck, check_threshold, countable_level
from vacsr.search.probabilities import (
    AnswerRule,
    Candidates,
    expected_calibration_error,
    fit_answer_rule,
    fit_grades,
    fit_logistic,
    signals,
)


def test_logistic_is_the_penalised_maximum() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) * [1, 5, 0.1] + 2
    y = (rng.random(200) < expit(x[:, 0] - 0.3 * x[:, 1])).astype(float)
    z = np.column_stack(((x - x.mean(0)) / x.std(0), np.ones(200)))

    def loss(w: np.ndarray) -> float:
        p = expit(z @ w)
        return -np.sum(y * np.log(p) + (1 - y) * np.log(1 - p)) + w[:3] @ w[:3] / 2 + 1e-3 * w[3] ** 2 / 2

    best = minimize(loss, np.zeros(4), tol=1e-12).x
    fitted = fit_logistic(x, y)
    np.testing.assert_allclose([*fitted.weight, fitted.bias], best, atol=1e-5)
    np.testing.assert_allclose(fitted.apply(x), expit(z @ best), atol=1e-5)


def test_separable_labels_have_finite_weights() -> None:
    x = np.array([[-1.0], [-2.0], [1.0], [2.0]])
    fit = fit_logistic(x, np.array([0.0, 0.0, 1.0, 1.0]), ridge=1e-3)
    assert np.isfinite([*fit.weight, fit.bias]).all()
    assert fit.apply(x)[2] > 0.99


def test_grades_become_chances_on_pairs_that_the_fit_has_not_seen() -> None:
    rng = np.random.default_rng(1)
    score = rng.normal(size=6000) * 3
    match = (rng.random(6000) < expit(score / 2 - 2)).astype(float)
    calibration, errors = fit_grades(score, match, grade=expit(score), fit=np.arange(6000) < 3000)
    assert errors["ece_own"] == expected_calibration_error(expit(score[3000:]), match[3000:]) > 0.15
    assert max(errors["ece_temperature"], errors["ece_isotonic"]) < 0.03
    temperature = calibration.temperature
    assert temperature.weight[0] / temperature.scale[0] == pytest.approx(0.5, abs=0.05)
    assert temperature.mean == (score.mean(),), "the last fit is to all"
    chance = calibration.apply(np.sort(score))
    assert (np.diff(chance) >= 0).all()
    assert 0 < chance[0] <= chance[-1] < 1


def test_isotonic_wins_where_no_temperature_fits() -> None:
    rng = np.random.default_rng(2)
    score = rng.uniform(size=4000)
    match = (rng.random(4000) < np.where(score > 0.5, 0.9, 0.1)).astype(float)
    calibration, _ = fit_grades(score, match, grade=score, fit=np.arange(4000) < 2000)
    assert calibration.kind == "isotonic"
    np.testing.assert_array_equal(calibration.apply(score), calibration.apply(score, "isotonic"))


def test_calibration_error_by_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    chance, match = rng.random(103), (rng.random(103) < 0.5).astype(float)
    parts = np.array_split(sorted(range(103), key=lambda i: chance[i]), 15)
    expected = sum(len(part) / 103 * abs(chance[part].mean() - match[part].mean()) for part in parts)
    assert expected_calibration_error(chance, match) == pytest.approx(expected)


def world(rng: np.random.Generator, images: int, *, per_image: int, shared: float, hard: float = 0.0) -> Candidates:
    """Lists whose first answer is right with a chance that its margin tells, and that an image's queries share."""
    count = images * per_image
    image = np.repeat(np.arange(images), per_image)
    ease = np.sqrt(shared) * rng.normal(size=images)[image] + np.sqrt(1 - shared) * rng.normal(size=count)
    margin = np.abs(rng.normal(size=count)) * 2
    first = expit(2 * margin + 1.5 * ease - 2 - hard) > rng.random(count)
    rest = np.sort(rng.normal(size=(count, 5)), axis=1)[:, ::-1]
    score = np.concatenate((rest[:, :1] + margin[:, None], rest), axis=1)
    right = np.zeros(score.shape, dtype=bool)
    right[:, 0] = first
    return Candidates(score, score / 10, None, right, image, np.arange(count), gallery=6)


def check(rule: AnswerRule, candidates: Candidates) -> RiskCheck:
    return check_threshold(rule.outcomes(candidates), rule.threshold)


def test_the_guarantee_is_kept_as_often_as_it_says() -> None:
    """40 fits. The true risk is measured on 20,000 queries, and a count made on as many images as certified."""
    per_image, fits, images = 5, 40, 300
    rng = np.random.default_rng(per_image)
    fresh = world(rng, 20_000 // per_image, per_image=per_image, shared=0.5, hard=-1.0)
    above, broken, answering = 0, 0, 0
    for _ in range(fits):
        lists = world(rng, images, per_image=per_image, shared=0.5, hard=-1.0)
        choose = (rng.random(images) < 0.25)[lists.image]
        rule = fit_answer_rule(lists, choose, risk=0.1, confidence=0.9, generator=rng, measures=("score", "margin"))
        again = check(rule, world(rng, 3 * images // 4, per_image=per_image, shared=0.5, hard=-1.0))
        answering += again.answered > 0
        broken += not again.held(0.1)
        above += not check(rule, fresh).held(0.1)
    assert answering > fits / 2
    assert broken <= fits * 0.1 + 2 * np.sqrt(fits * 0.09)
    level = countable_level(0.9)
    assert above <= fits * level + 2 * np.sqrt(fits * level)


def test_where_nothing_is_good_enough_nothing_is_answered() -> None:
    rng = np.random.default_rng(0)
    lists = world(rng, 200, per_image=1, shared=0.0, hard=6.0)
    rule = fit_answer_rule(lists, np.arange(200) < 80, risk=0.02, confidence=0.95, generator=rng)
    counted = check(rule, lists)
    assert (rule.threshold, counted[:4], counted.held(0.02)) == (None, (200, 0, 0, 200), True)
    assert np.isnan(counted.risk)


def test_a_rule_says_what_it_rests_on() -> None:
    """The part that certified, not all, and the level of the test behind the guarantee."""
    rng = np.random.default_rng(5)
    lists = world(rng, 300, per_image=3, shared=0.5, hard=-1.0)
    lists = lists._replace(query=lists.query // 2)  # repeats, and images that share none
    choose = (rng.random(300) < 0.3)[lists.image]
    rule = fit_answer_rule(lists, choose, risk=0.2, confidence=0.9, generator=rng)
    assert rule.threshold is not None
    assert (rule.certified, rule.images) == ((~choose).sum(), len(np.unique(lists.image[~choose])))
    assert rule.level == countable_level(0.9) != pytest.approx(0.1)
    answered = (rule.outcomes(lists).value >= rule.threshold) & ~choose
    assert (rule.answered, rule.wrong) == (answered.sum(), (answered & ~lists.right[:, 0]).sum())


def test_each_query_is_judged_by_a_fit_without_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole images are held out, so none is on both sides; trials rest on these confidences of the best measure."""
    rng, calls, trials = np.random.default_rng(0), list[tuple[np.ndarray, ...]](), list[np.ndarray]()
    plain_fit, plain_order = probabilities._cross_fit, probabilities.trial_order

    def cross_fit(columns: np.ndarray, right: np.ndarray, fold: np.ndarray) -> np.ndarray:
        calls.append((columns, right, fold, plain_fit(columns, right, fold)))
        return calls[-1][-1]

    def order(outcomes: probabilities.Outcomes, *, risk: float) -> list[object]:
        trials.append(outcomes.value)
        return plain_order(outcomes, risk=risk)  # type: ignore[return-value]

    monkeypatch.setattr(probabilities, "_cross_fit", cross_fit)
    monkeypatch.setattr(probabilities, "trial_order", order)
    lists = world(rng, 60, per_image=4, shared=0.5)
    choose = lists.image < 30
    rule = fit_answer_rule(lists, choose, risk=0.2, confidence=0.9, generator=rng, measures=("score", "combined"))
    image = lists.image[choose]
    assert trials[0] is calls[("score", "combined").index(rule.measure)][-1]
    for columns, right, fold, value in calls:
        assert len(np.unique(fold)) > 2
        assert all(len(set(fold[image == one])) == 1 for one in np.unique(image))
        for n in range(0, len(value), 7):
            rest = fold != fold[n]
            expected = fit_logistic(columns[rest], right[rest].astype(float)).apply(columns[n : n + 1])[0]
            assert value[n] == pytest.approx(expected, abs=1e-6)


def test_signals_by_hand() -> None:
    score, cosine = np.array([[2.0, 1.0]]), np.array([[0.4, 0.2]])
    columns = signals(score, cosine, np.array([[0.5]]), spread=2.0, cosine_spread=0.1)
    values = {name: float(column[0]) for name, column in columns.items()}
    assert values == pytest.approx({
        "score": 1.0, "margin": 0.5, "margin6": 0.5, "odds_sharp": 5.0, "odds": 2.0, "odds_soft": 1.0,
        "cosine": 4.0, "cosine_odds": 8.0, "sigma": 0.5, "sigma5": 0.5,
    })  # fmt: skip
    seven = np.array([[7.0, 6, 5, 4, 3, 2, 1]])
    columns = signals(seven, seven, seven / 10, spread=1.0, cosine_spread=1.0)
    assert float(columns["margin6"][0] + columns["sigma5"][0]) == pytest.approx(5.5)
    assert "sigma" not in signals(score, cosine, None, spread=1.0, cosine_spread=1.0)
