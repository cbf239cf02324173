"""Calibration of scores, λ, missed matches, and the whole fit on a small generated world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import (
    CalibrateSettings,
    calibrate,
    check_calibration,
    choosing,
    search_lists,
    without_matches,
)
from vacsr.search.calibration import load_calibration, save_calibration
from vacsr.search.candidates import Candidates, labelled_candidates, random_galleries
from vacsr.search.certify import countable_level
from vacsr.search.grades import expected_calibration_error, fit_grades
from vacsr.search.lcb import check_lcb, fit_lcb
from vacsr.search.logistic import fit_logistic
from vacsr.search.missed import fit_missed
from vacsr.search.provenance import model_digest
from vacsr.search.unseen import check_apart, check_unseen, seen_images


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    found = load_pairs("synthetic:images=120,seed=3", split="train")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module")
def scorer(pairs: PairSet) -> PairScorer:
    config = BackboneConfig(spec="features:", head=HeadConfig(dim=16))
    model = MatchingModel.build(
        VacsrConfig(),
        config,
        image_dim=pairs.images.shape[1],
        text_dim=pairs.texts.shape[1],
        fit=pairs,
        seed=0,
    )
    return PairScorer(model, device="cpu")


def lists(rng: np.random.Generator, count: int, *, sigma_helps: float) -> Candidates:
    """Two likely candidates; σ of the right one is lower where it helps."""
    right = np.zeros((count, 4), dtype=bool)
    right[np.arange(count), rng.integers(2, size=count)] = True
    score = np.tile(np.array([1.0, 0.9, 0.0, -1.0]), (count, 1))
    sigma = rng.normal(size=(count, 4)) * 0.1 - sigma_helps * right
    return Candidates(score, score, sigma, right, np.arange(count), np.arange(count), gallery=4)


def test_logistic_is_the_penalised_maximum() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) * [1, 5, 0.1] + 2
    y = (rng.random(200) < expit(x[:, 0] - 0.3 * x[:, 1])).astype(float)
    z = np.column_stack(((x - x.mean(0)) / x.std(0), np.ones(200)))

    def loss(w: np.ndarray) -> float:
        p = expit(z @ w)
        return -np.sum(y * np.log(p) + (1 - y) * np.log(1 - p)) + w[:3] @ w[:3] / 2 + 1e-3 * w[3] ** 2 / 2

    best = minimize(loss, np.zeros(4), tol=1e-12).x
    found = fit_logistic(x, y)
    np.testing.assert_allclose([*found.weight, found.bias], best, atol=1e-4)
    np.testing.assert_allclose(found.apply(x), expit(z @ best), atol=1e-4)


def test_grades_become_chances_on_pairs_that_the_fit_has_not_seen() -> None:
    rng = np.random.default_rng(1)
    score = rng.normal(size=6000) * 3
    match = (rng.random(6000) < expit(score / 2 - 2)).astype(float)
    found = fit_grades(score, match, grade=expit(score), fit=np.arange(6000) < 3000)
    assert found.ece.own > 0.15
    assert found.ece.temperature < 0.03
    assert found.ece.isotonic < 0.03
    assert found.calibration.temperature.weight[0] / found.calibration.temperature.scale[0] == pytest.approx(
        0.5, abs=0.05
    )
    chance = found.calibration.apply(np.sort(score))
    assert (np.diff(chance) >= 0).all()
    assert 0 < chance[0] <= chance[-1] < 1


def test_isotonic_wins_where_no_temperature_fits() -> None:
    rng = np.random.default_rng(2)
    score = rng.uniform(size=4000)
    match = (rng.random(4000) < np.where(score > 0.5, 0.9, 0.1)).astype(float)
    assert fit_grades(score, match, grade=score, fit=np.arange(4000) < 2000).calibration.kind == "isotonic"


def test_calibration_error_by_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    chance, match = rng.random(103), (rng.random(103) < 0.5).astype(float)
    order = sorted(range(103), key=lambda i: chance[i])
    parts = np.array_split(order, 15)
    expected = sum(len(part) / 103 * abs(chance[part].mean() - match[part].mean()) for part in parts)
    assert expected_calibration_error(chance, match) == pytest.approx(expected)


def test_lambda_has_the_sign_that_helps_and_is_zero_where_none_does() -> None:
    rng, choose = np.random.default_rng(4), np.arange(300) < 120
    helps, hurts = (fit_lcb(lists(rng, 300, sigma_helps=sign), choose, depth=4) for sign in (0.5, -0.5))
    assert helps.weight > 0 > hurts.weight
    assert min(helps.r1_fitted, hurts.r1_fitted) > 0.9
    fresh = lists(rng, 300, sigma_helps=0.5)
    assert check_lcb(helps, fresh).by_lcb > check_lcb(helps, fresh).by_score + 0.3
    assert fit_lcb(fresh._replace(sigma=None), choose, depth=4).weight == 0


def test_lambda_stays_only_if_it_gains_where_it_was_not_chosen() -> None:
    """σ helps the queries that choose and not the others, as luck would have it; then the other way round."""
    rng, choose = np.random.default_rng(7), np.arange(300) < 120
    lucky, rest = lists(rng, 300, sigma_helps=0.5), lists(rng, 300, sigma_helps=-0.5)
    mixed = lucky._replace(
        right=np.where(choose[:, None], lucky.right, rest.right),
        sigma=np.where(choose[:, None], lucky.sigma, rest.sigma),
    )
    rule = fit_lcb(mixed, choose, depth=4)
    held_out = mixed.right[~choose, 0].mean()
    assert (rule.weight, rule.r1, rule.r1_fitted) == (0.0, held_out, held_out)
    kept = [
        fit_lcb(lists(rng, 300, sigma_helps=0.0), choose, depth=4).weight != 0 for _ in range(40)
    ]  # one standard error: a gain by chance in a sixth of the cases
    assert sum(kept) <= 40 * 0.16 + 3 * np.sqrt(40 * 0.16 * 0.84)


def test_half_of_the_labelled_matches_lie_above_the_floor() -> None:
    rng = np.random.default_rng(5)
    found = lists(rng, 101, sigma_helps=-0.2)
    rule = fit_missed(found, np.arange(101) < 40, depth=4)
    value = rule.of(found.score, found.sigma)
    assert (value[found.right] >= rule.floor).mean() == pytest.approx(0.5, abs=0.02)


def test_the_weight_of_sigma_for_missed_matches_is_learned_and_has_to_gain_elsewhere() -> None:
    rng, choose = np.random.default_rng(6), np.arange(300) < 75
    above, below = lists(rng, 300, sigma_helps=-0.5), lists(rng, 300, sigma_helps=0.5)
    assert fit_missed(above, choose, depth=4).sigma_weight > 0 > fit_missed(below, choose, depth=4).sigma_weight
    mixed = above._replace(
        right=np.where(choose[:, None], above.right, below.right),
        sigma=np.where(choose[:, None], above.sigma, below.sigma),
    )
    assert fit_missed(mixed, choose, depth=4).sigma_weight == 0
    assert fit_missed(above._replace(sigma=None), choose, depth=4).sigma_weight == 0
    nothing = above._replace(right=np.zeros_like(above.right))
    assert fit_missed(nothing, choose, depth=4).sigma_weight == 0


def test_the_weight_is_the_one_of_a_plain_loop() -> None:
    """The share of pairs in order, counted pair by pair."""
    rng, choose = np.random.default_rng(8), np.arange(60) < 30
    found = lists(rng, 60, sigma_helps=-0.15)
    rule = fit_missed(found, choose, depth=4)
    assert found.sigma is not None
    best: dict[float, float] = {}
    for weight in (0.0, 0.05, -0.05, 0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.5, -0.5):
        value = rule.model_copy(update={"sigma_weight": weight}).of(found.score, found.sigma)
        shares = []
        for row, right in zip(value[choose], found.right[choose], strict=True):
            pairs = [(i, j) for i in range(4) for j in range(4) if right[i] and not right[j]]
            shares.append(np.mean([row[i] > row[j] for i, j in pairs]))
        best[weight] = float(np.mean(shares))
    assert rule.sigma_weight == max(best, key=lambda weight: best[weight]) != 0


@pytest.mark.parametrize(("images", "share"), [(40, 0.5), (60, 0.5), (100, 0.3), (2000, 0.25)])
def test_images_choose_or_certify_and_never_both(images: int, share: float) -> None:
    found = lists(np.random.default_rng(0), 3 * images, sigma_helps=0.0)
    found = found._replace(image=np.arange(3 * images) % images)
    picked = choosing(found, np.random.default_rng(1))
    assert not set(found.image[picked]) & set(found.image[~picked])
    assert picked.mean() == pytest.approx(share, abs=3 * np.sqrt(share * (1 - share) / images))


def test_a_gallery_of_more_than_half_is_drawn_again_so_that_no_image_is_left_out() -> None:
    found = random_galleries(10, size=7, generator=torch.Generator().manual_seed(0))
    assert [len(rows) for rows in found] == [7] * 5
    assert len(set(torch.cat(found).tolist())) == 10


def test_galleries_of_a_draw_share_no_image() -> None:
    found = random_galleries(10, size=3, generator=torch.Generator().manual_seed(0))
    assert len(found) == 15  # five draws of three
    for draw in range(5):
        assert len(set(torch.cat(found[3 * draw : 3 * draw + 3]).tolist())) == 9
    assert len(random_galleries(10, size=10, generator=torch.Generator())) == 1
    with pytest.raises(DataError, match="--gallery 10"):
        random_galleries(10, size=11, generator=torch.Generator())


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_lists_are_those_of_a_plain_loop(direction: str, scorer: PairScorer, pairs: PairSet) -> None:
    few = pairs.subset(range(12))
    scores = scorer.score_set(few)
    groups = [torch.arange(6), torch.arange(6, 12)]
    found = labelled_candidates(scores, few, groups, direction=direction, limit=4, depth=2)  # type: ignore[arg-type]
    matrix, cosine = scores.score, scores.images.mean @ scores.texts.mean.T
    row = 0
    for group in groups:
        own = [m for m in range(len(few)) if int(few.caption_image[m]) in group.tolist()]
        queries, items = (group.tolist(), own) if direction == "i2t" else (own, group.tolist())
        for query in queries:
            cell = (lambda item, q=query: (q, item)) if direction == "i2t" else (lambda item, q=query: (item, q))
            near = sorted(items, key=lambda item, c=cell: -float(cosine[c(item)]))[:4]
            best = sorted(near, key=lambda item, c=cell: -float(matrix[c(item)]))
            np.testing.assert_allclose(found.score[row], [float(matrix[cell(item)]) for item in best], rtol=1e-4)
            right = [int(few.caption_image[cell(item)[1]]) == cell(item)[0] for item in best]
            assert found.right[row].tolist() == right
            row += 1
    assert row == len(found.score)
    assert found.sigma is not None
    assert found.sigma.shape == (row, 2)
    assert found.gallery == (30 if direction == "i2t" else 6)


def test_lists_without_matches_keep_their_order() -> None:
    score = np.array([[4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 6.0, 5.0]])
    right = np.array([[True, False, True, False], [False, True, False, False]])
    found = without_matches(Candidates(score, score, score / 10, right, np.arange(2), np.arange(2), gallery=4))
    assert found.score.tolist() == [[3.0, 1.0], [8.0, 6.0]]
    assert found.sigma is not None
    np.testing.assert_allclose(found.sigma, [[0.3, 0.1], [0.8, 0.6]])
    assert not found.right.any()


def test_fit_save_load_check(scorer: PairScorer, pairs: PairSet, tmp_path: Path) -> None:
    dev, test = pairs.subset(range(70)), replace(pairs.subset(range(70, 120)), split="other")
    found = calibrate(scorer, dev, CalibrateSettings(gallery=50, candidates=20, depth=10))
    assert (found.t2i.gallery, found.i2t.gallery) == (50, 250)
    scorer.model.save_pretrained(tmp_path)
    save_calibration(tmp_path / "search.json", found)
    assert load_calibration(tmp_path, model=model_digest(scorer.model)) == found
    checked = check_calibration(scorer, test, found)
    assert checked["t2i"].answers.queries == 250
    first = search_lists(scorer, test, CalibrateSettings(gallery=50, candidates=20, depth=10))["t2i"].right[:, 0]
    assert checked["t2i"].first.by_score == pytest.approx(first.mean())
    with pytest.raises(DataError, match="--gallery 30"):
        check_calibration(scorer, pairs.subset(range(30)), found)
    with pytest.raises(DataError, match="other weights"):
        load_calibration(tmp_path, model="another")
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(DataError, match="vacsr calibrate"):
        load_calibration(tmp_path, model="any")
    (tmp_path / "search.json").unlink()
    assert load_calibration(tmp_path, model="any") is None


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_what_chose_does_not_certify(direction: Direction, scorer: PairScorer, pairs: PairSet) -> None:
    """The counts beside the threshold are those of the other images, in galleries that repeat them."""
    plan = CalibrateSettings(gallery=40, candidates=20, depth=10, risk=0.4, confidence=0.8, seed=2)
    rule = calibrate(scorer, pairs, plan).of(direction).answer
    found = search_lists(scorer, pairs, plan)[direction]
    rest = found.take(~choosing(found, np.random.default_rng(2)))
    assert rule.images == len(np.unique(rest.image)) < 120
    assert rule.certified == len(rest.score) > rule.images
    assert rule.level == countable_level(0.8)


def test_the_first_of_each_list_is_known(scorer: PairScorer, pairs: PairSet) -> None:
    scores, few = scorer.score_set(pairs), torch.arange(30)
    found = labelled_candidates(scores, pairs, [few], direction="t2i", limit=30, depth=5)
    assert found.first is not None
    assert found.first.tolist() == scores.score[:30, found.query].argmax(0).tolist()
    some = found.take(np.arange(4))
    assert some.first is not None
    assert some.first.tolist() == found.first[:4].tolist()
    assert without_matches(found).first is None


@pytest.mark.parametrize("count", [2, 12])
def test_next_to_nothing_is_refused_before_anything_is_fitted(count: int, scorer: PairScorer, pairs: PairSet) -> None:
    few = pairs.subset(range(count))
    for seed in range(6):  # in some of which one part has no image at all
        with pytest.raises(DataError, match=f"of {count} images are too few .* give about 60 images or more"):
            calibrate(scorer, few, CalibrateSettings(candidates=2, depth=2, seed=seed))


@pytest.mark.parametrize(
    ("size", "same"), [(100, True), (80, True), (79, False), (102, True), (103, False), (120, False), (1, False)]
)
def test_a_larger_index_is_another_size_and_a_smaller_one_only_if_much(
    size: int, same: bool, scorer: PairScorer, pairs: PairSet
) -> None:
    fitted = calibrate(scorer, pairs, CalibrateSettings(candidates=20, depth=8)).t2i
    assert fitted.model_copy(update={"gallery": 100}).same_size(size) is same


@pytest.mark.parametrize(
    "wrong",
    [
        {"risk": 0.0}, {"confidence": 1.5}, {"confidence": 0.49}, {"confidence": 0.99999}, {"confidence": float("nan")},
        {"candidates": 1, "depth": 1}, {"depth": 500},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        CalibrateSettings(**wrong)  # type: ignore[arg-type]


def test_the_ends_of_confidence_are_allowed() -> None:
    assert [CalibrateSettings(confidence=end).confidence for end in (0.5, 0.9999)] == [0.5, 0.9999]


def test_an_image_is_known_by_its_name_and_a_caption() -> None:
    trained = load_pairs("synthetic:images=20,held_out=6", split="train")
    again = load_pairs("synthetic:held_out=6,images=20", split="all")
    assert seen_images(again, trained) == list(trained.image_ids)
    assert seen_images(load_pairs("synthetic:images=20,held_out=6", split="dev"), trained) == []
    assert trained.captions is not None
    others = replace(trained, captions=tuple(f"{text} elsewhere" for text in trained.captions))
    assert seen_images(others, trained) == []
    one = replace(others, captions=(*others.captions[:-1], trained.captions[-1]))  # type: ignore[index]
    assert seen_images(one, trained) == [trained.image_ids[-1]]
    assert seen_images(replace(others, captions=None), trained) == list(trained.image_ids)
    check_unseen(others, trained)
    with pytest.raises(DataError, match=r"20 of 32 images of split 'all' were trained on \(first train-0000\)"):
        check_unseen(again, trained)
    with pytest.raises(DataError, match="share 20 images"):
        check_apart(trained, again)
