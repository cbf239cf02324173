"""The calibration of a small generated world: the fit, what it stores, and its check."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vacsr.data import PairSet
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search.calibrate import (
    DEPTH,
    CalibrateSettings,
    Calibration,
    calibrate,
    check_calibration,
    check_size,
    fit_direction,
)
from vacsr.search.certify import Graded, find_cutoff
from vacsr.search.galleries import Labelled, Lists, simulated_lists
from vacsr.search.index import embedding_provenance, open_index


def drawn(size: int, *, queries: int = 2000, seed: int = 0, lead: float = 4.0) -> Lists:
    """Right scores are normal around ``lead``, wrong ones around 0; five queries of an image are alike."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(queries, size))
    score[:, 0] += lead + rng.normal(size=queries // 5).repeat(5)
    order = (-score).argsort(axis=1)[:, :100]
    return Lists(np.take_along_axis(score, order, 1), order == 0, np.arange(queries) // 5, size)


def test_cutoffs_keep_the_precision_in_every_gallery() -> None:
    sizes = [20, 100, 500]
    settings = CalibrateSettings()
    fitted = fit_direction([drawn(size) for size in sizes], settings)
    assert [row.size for row in fitted.sizes] == sizes
    strictest = 0.0
    for size, row in zip(sizes, fitted.sizes, strict=True):
        graded = drawn(size).graded(fitted.model)
        own = find_cutoff(Graded(graded.grade[:, :DEPTH], graded.right[:, :DEPTH], graded.image), **goal(settings))
        assert own is not None
        strictest = max(strictest, own)
        assert row.cutoff == fitted.cutoff(size) == strictest, "the strictest that a gallery up to this size needs"
        fresh = check_size(drawn(size, seed=1), fitted)
        assert fresh.precision is not None
        assert min(row.precision or 0, fresh.precision) >= 0.9
        assert fresh.answered > 0.2
        assert fresh.held == pytest.approx(0.9, abs=0.04)
        assert fresh.set_cutoff == row.set_cutoff
    assert fitted.cutoff(5000) == fitted.cutoff(500) == strictest
    larger = check_size(drawn(5000, seed=2, queries=500), fitted)
    assert larger.precision is None or larger.precision > 0.85, "grades adapt to a gallery that was not searched"
    assert larger.held is None, "and there is no answer set for it"


def goal(settings: CalibrateSettings) -> dict[str, float]:
    return {"precision": settings.precision, "confidence": settings.confidence}


def test_what_a_row_counts() -> None:
    lists = drawn(50)
    fitted = fit_direction([lists], CalibrateSettings(coverage=0.8))
    row, grade = fitted.sizes[0], fitted.model.apply(lists.score)
    shown = grade[:, :DEPTH] >= row.cutoff
    assert row.answered == pytest.approx(shown[:, 0].mean())
    assert (row.hits, row.r1) == (shown.sum(), lists.right[:, 0].mean())
    assert row.precision == pytest.approx(lists.right[:, :DEPTH][shown].mean())
    assert row.low <= row.precision <= row.high
    alone = fitted.model.apply(lists.without_matches().score)
    assert row.silent == pytest.approx((alone[:, 0] < row.cutoff).mean())
    inside = grade >= row.set_cutoff
    assert row.held == pytest.approx((inside & lists.right).any(1).mean())
    assert row.set_size == pytest.approx(inside.sum(1).mean())
    assert fitted.answer_set(grade, 50) is not None
    np.testing.assert_array_equal(fitted.answer_set(grade, 50), inside.sum(1))
    np.testing.assert_array_equal(fitted.confident(grade, 50), (grade >= row.cutoff).sum(1))


def test_nothing_is_confident_where_nothing_can_be_shown() -> None:
    noise = drawn(100, lead=0.0)
    fitted = fit_direction([noise], CalibrateSettings())
    assert (fitted.cutoff(100), fitted.certified, fitted.sizes[0].silent) == (None, 0, 1.0)
    assert (fitted.confident(fitted.model.apply(noise.score), 100) == 0).all()
    assert not fitted.certifies(20)


def test_queries_with_several_right_items_have_siblings() -> None:
    lists = drawn(60)
    thrice = lists._replace(right=np.arange(60) < 3 + np.zeros((2000, 1)))
    assert fit_direction([thrice], CalibrateSettings()).model.siblings == 2


@pytest.mark.parametrize(("size", "covered"), [(1, True), (120, True), (122, True), (123, False)])
def test_which_sizes_are_covered(size: int, covered: bool, calibration: Calibration) -> None:
    fitted = calibration.t2i
    assert fitted is not None
    assert fitted.sizes[-1].size == 120
    assert fitted.covers(size) is covered
    rows = tuple(row.model_copy(update={"set_cutoff": 0.5}) for row in fitted.sizes)
    fitted = fitted.model_copy(update={"sizes": rows})
    assert (fitted.answer_set(np.ones((1, 5)), size) is not None) is covered
    half = fitted.model_copy(update={"certified": 60})
    assert (half.certifies(60), half.certifies(120)) == (True, False)


def test_a_calibration_says_what_it_was_fitted_to(scorer: PairScorer, pairs: PairSet, tmp_path: Path) -> None:
    settings = CalibrateSettings(precision=0.8, candidates=20, seed=4)
    dev = pairs.subset(range(70))
    fitted = calibrate(scorer, dev, settings, spec="mine", selected_on="dev")
    assert fitted.t2i is not None
    assert fitted.i2t is not None
    assert (fitted.t2i.sizes[-1].size, fitted.i2t.sizes[-1].size, fitted.t2i.candidates) == (70, 350, 20)
    assert (fitted.pairs, fitted.selected_on, fitted.precision, fitted.index) == ("mine", "dev", 0.8, "")
    assert fitted.data != calibrate(scorer, pairs.subset(range(1, 71)), settings).data
    provenance = embedding_provenance(scorer.model, "images")
    index = open_index(f"exact:{tmp_path / 'index'}", dim=scorer.model.dim, provenance=provenance, create=True)
    index.add(pairs.image_ids[70:], scorer.score_set(pairs).images.mean[70:])
    beside = calibrate(scorer, dev, settings, index=index)
    assert beside.t2i is not None
    assert (beside.i2t, beside.own_captions, beside.index) == (None, False, f"exact:{tmp_path / 'index'}")
    assert [row.size for row in beside.t2i.sizes][-1] == 50, "the index is the largest gallery that is searched"


def test_a_check_counts_on_other_pairs(scorer: PairScorer, pairs: PairSet) -> None:
    fitted = calibrate(scorer, pairs.subset(range(60)), CalibrateSettings(candidates=20))
    other = replace(pairs.subset(range(60, 120)), split="other")
    checked = check_calibration(scorer, other, fitted)
    assert fitted.t2i is not None
    lists = [*simulated_lists(scorer, Labelled.of(scorer, other), candidates=20, seed=0, direction="t2i")]
    assert [row.size for row in checked["t2i"]] == [part.size for part in lists]
    assert checked["t2i"][-1].r1 == pytest.approx(lists[-1].right[:, 0].mean())
    assert checked["t2i"][0] == check_size(lists[0], fitted.t2i)


def test_next_to_nothing_is_refused(scorer: PairScorer, pairs: PairSet) -> None:
    with pytest.raises(DataError, match="give 40 or more"):
        calibrate(scorer, pairs.subset(range(39)))
    assert calibrate(scorer, pairs.subset(range(40))).t2i is not None


def test_hits_beyond_the_twentieth_are_never_confident() -> None:
    score = np.tile(np.linspace(1.0, 0.9, 30), (100, 1))
    every = Lists(score, np.ones_like(score, dtype=bool), np.arange(100), 30)
    (row,) = fit_direction([every], CalibrateSettings()).sizes
    assert (row.hits, row.precision) == (20 * 100, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"precision": 0.0}, {"precision": 1.0}, {"confidence": 0.5}, {"confidence": float("nan")}, {"coverage": 1.5},
        {"candidates": 1},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--"):
        CalibrateSettings(**wrong)
