"""The calibration on a small generated world: galleries, lists, the fit, and its check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vacsr.data import PairSet
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import (
    CalibrateSettings,
    Calibration,
    calibrate,
    check_calibration,
    choosing,
    fit_direction,
    labelled_candidates,
    random_galleries,
    search_lists,
    without_matches,
)
from vacsr.search.probabilities import Candidates


def lists(score: np.ndarray, right: np.ndarray, *, depth: int) -> Candidates:
    rows = np.arange(len(score))
    return Candidates(score, score / 10, score[:, :depth] / 5, right, rows, rows, gallery=50)


@pytest.mark.parametrize(("images", "share"), [(40, 0.5), (60, 0.5), (100, 0.3), (2000, 0.25)])
def test_images_choose_or_certify_and_never_both(images: int, share: float) -> None:
    score = np.zeros((3 * images, 2))
    candidates = lists(score, score > 0, depth=1)._replace(image=np.arange(3 * images) % images)
    picked = choosing(candidates, np.random.default_rng(1))
    assert not set(candidates.image[picked]) & set(candidates.image[~picked])
    assert picked.mean() == pytest.approx(share, abs=3 * np.sqrt(share * (1 - share) / images))


@pytest.mark.parametrize(("size", "per_draw", "draws"), [(7, 1, 5), (3, 3, 5), (10, 1, 1)])
def test_galleries_of_a_draw_share_no_image(size: int, per_draw: int, draws: int) -> None:
    galleries = random_galleries(10, size=size, generator=torch.Generator().manual_seed(0))
    assert [len(rows) for rows in galleries] == [size] * per_draw * draws
    for draw in range(draws):
        assert len(set(torch.cat(galleries[per_draw * draw : per_draw * (draw + 1)]).tolist())) == per_draw * size
    assert len(set(torch.cat(galleries).tolist())) == 10, "drawn again until no image is left out"


@pytest.mark.parametrize("size", [1, 11])
def test_galleries_that_cannot_be_made(size: int) -> None:
    with pytest.raises(DataError, match="--gallery 10"):
        random_galleries(10, size=size, generator=torch.Generator())


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_lists_are_those_of_a_plain_loop(direction: Direction, scorer: PairScorer, pairs: PairSet) -> None:
    few = pairs.subset(range(12))
    scores = scorer.score_set(few)
    groups = [torch.arange(6), torch.arange(6, 12)]
    found = labelled_candidates(scores, few, groups, direction=direction, limit=4, depth=2)
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
            np.testing.assert_allclose(found.cosine[row], [float(cosine[cell(item)]) for item in best], rtol=1e-4)
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
    rest = without_matches(lists(score, right, depth=4))
    assert (rest.score.tolist(), (rest.cosine * 10).tolist()) == ([[3.0, 1.0], [8.0, 6.0]],) * 2
    assert rest.sigma is not None
    np.testing.assert_allclose(rest.sigma, [[0.6, 0.2], [1.6, 1.2]])
    assert not rest.right.any()


def test_a_fit_is_checked_in_galleries_of_its_size(scorer: PairScorer, pairs: PairSet) -> None:
    dev, test = pairs.subset(range(70)), replace(pairs.subset(range(70, 120)), split="other")
    settings = CalibrateSettings(gallery=50, candidates=20, depth=10)
    fitted = calibrate(scorer, dev, settings, spec="mine", selected_on="dev")
    assert (fitted.t2i.gallery, fitted.i2t.gallery, fitted.pairs, fitted.selected_on) == (50, 250, "mine", "dev")
    assert fitted.data != calibrate(scorer, pairs.subset(range(1, 71)), settings).data
    checked = check_calibration(scorer, test, fitted)
    searched = search_lists(scorer, test, settings)["t2i"]
    assert searched.sigma is not None
    assert (searched.score.shape, searched.sigma.shape) == ((250, 20), (250, 10))
    first = searched.right[:, 0]
    assert (checked["t2i"].answers.queries, checked["t2i"].r1) == (250, pytest.approx(first.mean()))
    with pytest.raises(DataError, match="--gallery 30"):
        check_calibration(scorer, pairs.subset(range(30)), fitted)


@pytest.mark.parametrize("count", [2, 12])
def test_next_to_nothing_is_refused_before_anything_is_fitted(count: int, scorer: PairScorer, pairs: PairSet) -> None:
    few = pairs.subset(range(count))
    for seed in range(6):  # in some of which one part has no image at all
        with pytest.raises(DataError, match=f"of {count} images are too few .* give 60 images or more"):
            calibrate(scorer, few, CalibrateSettings(candidates=2, depth=2, seed=seed))


@pytest.mark.parametrize(
    ("size", "same"), [(100, True), (80, True), (79, False), (102, True), (103, False), (120, False), (1, False)]
)
def test_which_sizes_of_an_index_count_as_the_same(size: int, same: bool, calibration: Calibration) -> None:
    assert calibration.t2i.model_copy(update={"gallery": 100}).same_size(size) is same


@pytest.mark.parametrize(
    "wrong",
    [
        {"risk": 0.0}, {"risk": 1.0}, {"confidence": 1.5}, {"confidence": 0.49}, {"confidence": 0.99999},
        {"confidence": float("nan")}, {"candidates": 1, "depth": 1}, {"depth": 500}, {"depth": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CalibrateSettings(**wrong)
    for limit in ({"confidence": 0.5}, {"confidence": 0.9999}, {"candidates": 2, "depth": 1}, {"candidates": 20}):
        CalibrateSettings(**limit)  # type: ignore[arg-type]


def test_depth_and_candidates_limit_what_is_fitted(scorer: PairScorer) -> None:
    """Ten candidates, of which the fit of grades and the floor read the first three, the confidence all."""
    rng, count = np.random.default_rng(0), 400
    score = np.sort(rng.normal(size=(count, 10)), axis=1)[:, ::-1]
    right = rng.random((count, 10)) < 0.4
    right[:, 0] = rng.random(count) < 0.9
    candidates, settings = lists(score, right, depth=3), CalibrateSettings(candidates=10, depth=3)
    fitted = fit_direction(scorer, candidates, settings)
    assert (fitted.candidates, fitted.depth, fitted.queries) == (10, 3, count)
    assert fitted.also_floor == np.median(score[:, :3][right[:, :3]])
    assert fitted.r1 == right[~choosing(candidates, np.random.default_rng(0)), 0].mean()
    beyond = candidates._replace(right=np.concatenate((right[:, :3], ~right[:, 3:]), axis=1))
    assert fit_direction(scorer, beyond, settings) == fitted, "labels beyond the depth are not read"
    deeper = fit_direction(scorer, candidates, CalibrateSettings(candidates=10, depth=4))
    assert deeper.grades != fitted.grades
