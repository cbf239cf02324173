"""Outcomes of queries against plain loops and through a file; the bootstrap against a plain one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError
from vacsr.evaluate.metrics import METRICS
from vacsr.evaluate.report import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds, MatrixScores
from vacsr.evaluate.significance import (
    Outcomes,
    Part,
    drawn_means,
    holm,
    paired_bootstrap,
    read_outcomes,
    write_outcomes,
)
from vacsr.files import write_tensors
from vacsr.scoring.topk import DIRECTIONS

OWNER = torch.tensor([0, 0, 1, 1, 1, 3])  # image 2 has no caption


def pairs(split: str = "test", *, image: str = "i", caption: str = "c") -> MatrixIds:
    images, captions = tuple(f"{image}{n}" for n in range(4)), tuple(f"{caption}{n}" for n in range(6))
    return MatrixIds(images, captions, OWNER, split=split)


@pytest.fixture(scope="module")
def score() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def found(score: Tensor) -> Outcomes:
    (outcomes,) = evaluate_scores(MatrixScores(score), pairs()).outcomes
    return outcomes


def test_against_plain_loops(score: Tensor, found: Outcomes, plain_metrics: Any) -> None:
    assert (found.protocol, found.split) == ("flickr", "test")
    relevant = torch.arange(4)[:, None] == OWNER
    for stored, rows, truth in ((found.i2t, score, relevant), (found.t2i, score.T, relevant.T)):
        for query, (row, positives) in enumerate(zip(rows, truth, strict=True)):
            expected = plain_metrics(row, positives) if positives.any() else dict.fromkeys(METRICS, np.nan)
            for name in METRICS:
                assert float(stored[name][query]) == pytest.approx(expected[name], nan_ok=True)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_holm_against_plain_steps(count: int) -> None:
    """From the smallest on: times the number of tests left, never below the one before, never above 1."""
    p = [round(float(one), 2) for one in np.random.default_rng(count).uniform(0, 0.4, count)]
    corrected, before = {}, 0.0
    for step, (value, test) in enumerate(sorted((value, test) for test, value in enumerate(p))):
        before = corrected[test] = max(before, min(1.0, value * (count - step)))
    assert holm(p) == pytest.approx([corrected[test] for test in range(count)])


def test_a_file_gives_back_what_it_was_given(score: Tensor, tmp_path: Path) -> None:
    given = [
        outcomes
        for values, split in ((score, "test"), (-score, "dev"))
        for outcomes in evaluate_scores(MatrixScores(values), pairs(split)).outcomes
    ]
    write_outcomes(tmp_path / "outcomes.safetensors", given)
    back = read_outcomes(tmp_path / "outcomes.safetensors")
    for before, after in zip(given, back, strict=True):
        for name in ("protocol", "split", "queries"):
            assert getattr(before, name) == getattr(after, name)
        assert torch.equal(before.caption_image, after.caption_image)
        for direction in DIRECTIONS:
            stored = after.of(direction)
            assert before.of(direction).keys() == stored.keys()
            for name, values in before.of(direction).items():
                assert torch.equal(values.nan_to_num(-1), stored[name].nan_to_num(-1))
    write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)}, metadata={"outcomes": '[{"protocol": "flickr"}]'})
    with pytest.raises(DataError, match=r"x\.safetensors does not hold outcomes"):
        read_outcomes(tmp_path / "x.safetensors")


def test_the_checksum_tells_other_queries_apart(score: Tensor, found: Outcomes) -> None:
    """Other images, other captions, and ids that would read the same if they were joined without a mark."""
    (same,) = evaluate_scores(MatrixScores(-score), pairs("dev")).outcomes
    assert found.queries == same.queries
    others = [pairs(image="j"), pairs(caption="d")]
    for split in (2, 3):
        ids = [f"x{n}" for n in range(5)]
        others.append(MatrixIds(tuple(ids[:split]), tuple(ids[split:]), torch.zeros(5 - split, dtype=torch.int64)))
    checksums = [
        evaluate_scores(MatrixScores(score[: len(o.image_ids), : len(o.caption_ids)]), o).outcomes[0].queries
        for o in others
    ]
    assert len({found.queries, *checksums}) == 1 + len(checksums)


def alone(values: np.ndarray, first: int = 0) -> Part:
    """Every query an image of its own."""
    return Part(values.reshape(len(values), -1), first + np.arange(len(values)))


def test_a_draw_is_a_mean_of_the_drawn_images_queries() -> None:
    """The same integers, used one by one, give the same means; images may have any number of queries."""
    values = np.random.default_rng(0).normal(size=(7, 3))
    image = np.array([4, 4, 9, 9, 9, 2, 5])
    found = drawn_means([Part(values, image)], draws=5, generator=np.random.default_rng(9), at_once=8)
    names = [2, 4, 5, 9]
    for draw, chosen in enumerate(np.random.default_rng(9).integers(0, 4, (5, 4))):
        rows = [row for index in chosen for row in range(7) if image[row] == names[index]]
        np.testing.assert_allclose(found[draw], values[rows].mean(axis=0))


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
    assert paired_bootstrap([alone(np.zeros(10))], draws=100) == [(0.0, 0.0, 0.0, 1.0)], "no difference at all"


def test_a_draw_without_queries_is_left_out() -> None:
    """One of three images has captions: draws without it say nothing of captions."""
    parts = [alone(np.ones(3)), Part(np.full((2, 1), 2.0), np.array([1, 1]))]
    drawn = drawn_means(parts, draws=200, generator=np.random.default_rng(0))
    assert 0 < len(drawn) < 200
    np.testing.assert_allclose(drawn, 3.0)
