"""The promise, where the truth is known."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import binom

from vacsr.errors import DataError
from vacsr.search.betting import Bounds, mean_is_negative
from vacsr.search.candidates import Candidates
from vacsr.search.certify import Outcomes, Trial, certify, countable_level, image_losses, images_needed, trial_order
from vacsr.search.counted import check_rule
from vacsr.search.risk import fit_answer_rule

TENTH = Bounds(-0.1, 0.9, 0.3)


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
    return Candidates(score, score / 10, None, found, image, np.arange(count), gallery=6)


def alike(rng: np.random.Generator, images: int, *, risk: float) -> Outcomes:
    """Five captions an image. A third of the images is confident, and all their captions are wrong together."""
    image = np.repeat(np.arange(images), 5)
    sure = (rng.random(images) < 0.3)[image]
    wrong = np.where(sure, (rng.random(images) < risk)[image], rng.random(len(image)) < 0.5)
    return Outcomes(np.where(sure, 0.9, 0.5), wrong, image, np.arange(len(image)))


def by_design_effect(found: Outcomes, *, risk: float, level: float) -> bool:
    """An approximate rule to compare with: counts shrunk by the correlation that all queries show, then binomial."""
    rest = found.wrong - (1 - found.value)
    sums, squares, counts = (np.bincount(found.image, part) for part in (rest, rest**2, np.ones(len(rest))))
    alike = np.sum(sums**2 - squares) / np.sum(counts * (counts - 1)) / (squares.sum() / counts.sum())
    given = found.value >= 0.9
    company = np.bincount(found.image[given])
    shrink = 1 + max(0.0, alike) * (np.sum(company**2) / company.sum() - 1)
    return bool(binom.cdf(ceil(found.wrong[given].sum() / shrink), floor(given.sum() / shrink), risk) <= level)


def test_queries_that_fail_together_are_not_taken_for_many() -> None:
    """The risk is just above the bound: passing is the error that δ limits. 600 draws."""
    rng, level, draws = np.random.default_rng(0), 0.1, 600
    trial = [Trial(0.9, Bounds(-0.5, 4.5, np.sqrt(0.3 * 25 * 0.09)))]
    passed, fooled = 0, 0
    for _ in range(draws):
        found = alike(rng, 300, risk=0.101)
        passed += certify(found, trial, risk=0.1, level=level, generator=rng).threshold is not None
        fooled += by_design_effect(found, risk=0.1, level=level)
    assert passed <= draws * level + 2 * np.sqrt(draws * level * (1 - level))
    assert fooled > 1.5 * draws * level  # so this world tells a valid rule from one that is not
    good = [certify(alike(rng, 300, risk=0.02), trial, risk=0.1, level=level, generator=rng) for _ in range(50)]
    assert sum(one.threshold is not None for one in good) > 40  # it is not kept by silence


@pytest.mark.parametrize("per_image", [1, 5])
def test_the_promise_is_kept_as_often_as_it_says(per_image: int) -> None:
    """40 fits. The true risk is measured on 20,000 queries, and a count made on as many images as certified."""
    rng, fits, images = np.random.default_rng(per_image), 40, 900 // per_image + 120
    fresh = world(rng, 20_000 // per_image, per_image=per_image, shared=0.5, hard=-1.0)
    above, broken, answering = 0, 0, 0
    for _ in range(fits):
        found = world(rng, images, per_image=per_image, shared=0.5, hard=-1.0)
        choose = (rng.random(images) < 0.25)[found.image]
        rule = fit_answer_rule(found, choose, risk=0.1, confidence=0.9, generator=rng, measures=("score", "margin"))
        again = check_rule(rule, world(rng, 3 * images // 4, per_image=per_image, shared=0.5, hard=-1.0))
        answering += again.answered > 0
        broken += not again.held(0.1)
        above += not check_rule(rule, fresh).held(0.1)
    assert answering > fits / 2
    assert broken <= fits * 0.1 + 2 * np.sqrt(fits * 0.09)
    level = countable_level(0.9)
    assert above <= fits * level + 2 * np.sqrt(fits * level)


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_more_wrong_answers_never_loosen_the_threshold(seed: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    images = int(rng.integers(5, 120))
    image = rng.integers(images, size=3 * images)
    value = rng.random(len(image))
    found = Outcomes(value, rng.random(len(image)) > value + 0.3, image, np.arange(len(image)))
    worse = found._replace(wrong=found.wrong | np.isin(np.arange(len(image)), rng.integers(len(image), size=more)))
    trials = [Trial(float(at), Bounds(-0.3, 2.7, 0.6)) for at in np.linspace(0.8, 0, 9)]
    first, second = (
        certify(part, trials, risk=0.3, level=0.2, generator=np.random.default_rng(seed)).threshold
        for part in (found, worse)
    )
    assert second is None or (first is not None and second >= first)


def test_certify_stops_at_the_first_failure() -> None:
    value = np.arange(400, 0, -1) / 400
    wrong = np.zeros(400, dtype=bool)
    wrong[200:240] = True  # bad in the middle, so that the loosest would pass by itself
    found = Outcomes(value, wrong, np.arange(400), np.arange(400))

    def kept(*counts: int) -> float | None:
        trials = [Trial(float(value[count - 1]), Bounds(-0.15, 0.85, 0.33)) for count in counts]
        return certify(found, trials, risk=0.15, level=0.1, generator=np.random.default_rng(0)).threshold

    assert kept(100, 200, 240, 400) == value[199]
    assert kept(400) == value[399]
    assert kept(240, 400) is None


def test_losses_by_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    query = rng.integers(30, size=200)
    image, value, wrong = 7 * (query // 3), rng.random(200), rng.random(200) < 0.3
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


def test_what_a_loss_can_be_is_fixed_beforehand() -> None:
    """Rare images with forty captions, all wrong, where five were expected. By image, the risk is just above 10%."""
    rng, bounds, level, draws = np.random.default_rng(2), Bounds(-0.5, 4.5, 1.5), 0.1, 300
    passed = 0
    for draw in range(draws):
        heavy = rng.random(120) < 0.02
        bad = heavy | (rng.random(120) < (0.101 - 0.02) / 0.98)
        image = np.repeat(np.arange(120), np.where(heavy, 40, 5))
        found = Outcomes(np.ones(len(image)), bad[image], image, np.arange(len(image)))
        kept = certify(found, [Trial(0.5, bounds)], risk=0.1, level=level, generator=np.random.default_rng(draw))
        losses = np.where(bad, 4.5, -0.5)[np.random.default_rng(draw).permutation(120)]
        assert (kept.threshold is not None) == mean_is_negative(losses, bounds, level=level)
        passed += kept.threshold is not None
    assert 0 < passed <= draws * level + 2 * np.sqrt(draws * level * (1 - level))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_next_to_nothing_certifies_nothing(count: int) -> None:
    for wrong in (np.zeros(count, dtype=bool), np.ones(count, dtype=bool)):
        found = Outcomes(np.ones(count), wrong, np.arange(count), np.arange(count))
        kept = certify(found, [Trial(0.5, TENTH)], risk=0.1, level=0.1, generator=np.random.default_rng(0))
        assert kept == (None, count, 0, 0)
        assert certify(found, [], risk=0.1, level=0.1, generator=np.random.default_rng(0)).threshold is None


def test_trials_go_from_powerful_to_loose() -> None:
    value = np.linspace(1, 0, 400)
    wrong = np.zeros(400, dtype=bool)
    wrong[200:] = True
    trials = trial_order(Outcomes(value, wrong, np.arange(400), np.arange(400)), risk=0.3)
    thresholds = [trial.threshold for trial in trials]
    assert (np.diff(thresholds) < 0).all()
    assert value[220] < thresholds[0] < value[150]  # begins where most answers are good
    assert thresholds[-1] == value[-1]
    assert all(trial.bounds[:2] == (-0.3, 0.7) and trial.bounds.spread > 0 for trial in trials)
    assert len(trial_order(Outcomes(value[:3], wrong[:3], np.arange(3), np.arange(3)), risk=0.1)) == 1


def test_where_nothing_is_good_enough_nothing_is_answered() -> None:
    rng = np.random.default_rng(0)
    found = world(rng, 200, per_image=1, shared=0.0, hard=6.0)
    rule = fit_answer_rule(found, np.arange(200) < 80, risk=0.02, confidence=0.95, generator=rng)
    assert rule.threshold is None
    checked = check_rule(rule, found)
    assert checked[:4] == (200, 0, 0, 200)
    assert np.isnan(checked.risk)
    assert checked.held(0.02)


def test_too_few_queries_are_refused() -> None:
    found = world(np.random.default_rng(0), 30, per_image=1, shared=0.0)
    refused = "30 queries of 30 images are too few to fit and to certify a risk of 10% — give about 60 images"
    with pytest.raises(DataError, match=refused):
        fit_answer_rule(found, np.arange(30) < 5, risk=0.1, confidence=0.9, generator=np.random.default_rng(0))
    with pytest.raises(DataError, match="a risk of 1% — give about 445 images"):
        fit_answer_rule(found, np.arange(30) < 25, risk=0.01, confidence=0.9, generator=np.random.default_rng(0))


@pytest.mark.parametrize("risk", [0.02, 0.05, 0.3])
def test_with_fewer_images_than_are_said_to_be_needed_even_a_flawless_search_cannot_be_certified(risk: float) -> None:
    level = countable_level(0.9)
    needed = images_needed(risk=risk, level=level)

    def passes(images: int) -> bool:
        count = 3 * images // 4
        found = Outcomes(np.ones(count), np.zeros(count, dtype=bool), np.arange(count), np.arange(count))
        trial = [Trial(0.5, Bounds(-risk, 1 - risk, risk))]
        return certify(found, trial, risk=risk, level=level, generator=np.random.default_rng(0)).threshold is not None

    assert passes(2 * needed)
    assert needed == 60 or not passes(needed - 2)


def test_a_rule_says_what_it_rests_on() -> None:
    """The part that certified, not all, and the level of the test behind the promise."""
    rng = np.random.default_rng(5)
    found = world(rng, 300, per_image=3, shared=0.5, hard=-1.0)
    found = found._replace(query=found.query // 2)  # repeats, and images that share none
    choose = (rng.random(300) < 0.3)[found.image]
    rule = fit_answer_rule(found, choose, risk=0.2, confidence=0.9, generator=rng)
    assert rule.threshold is not None
    assert rule.certified == (~choose).sum()
    assert rule.images == len(np.unique(found.image[~choose]))
    assert rule.level == countable_level(0.9) != pytest.approx(0.1)
    given = rule.of(found) >= rule.threshold
    assert rule.answered == (given & ~choose).sum()
    assert rule.wrong == (given & ~choose & ~found.right[:, 0]).sum()
