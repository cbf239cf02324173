"""Histograms and moments against numpy on the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vacsr.evaluate.curves import BINS, Spot, Tally, score_curves
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores

OWNER = torch.arange(40).repeat_interleave(3)
PAIRS = MatrixIds(tuple(f"i{n}" for n in range(40)), tuple(f"c{n}" for n in range(120)), OWNER)


class Graded(MatrixScores):
    """With grades, and in blocks that do not divide the rows."""

    def blocks(self) -> Any:
        return iter(self.score[start : start + 7] for start in range(0, len(self.score), 7))

    def grade(self, score: Tensor) -> Tensor:
        return score.sigmoid()


@pytest.fixture(scope="module")
def score() -> Tensor:
    scores = 3 * torch.randn(40, 120, generator=torch.Generator().manual_seed(0)) - 1
    scores[OWNER, torch.arange(120)] += 4
    return scores


def plain(values: np.ndarray[Any, Any], own: np.ndarray[Any, Any], *, edges: list[float]) -> dict[str, Any]:
    parts = {"positive": values[own], "negative": values[~own], "all": values.ravel()}
    counts = {name: np.histogram(part, BINS, (edges[0], edges[-1]))[0].tolist() for name, part in parts.items()}
    stats = {
        f"{name}_stats": {"mean": part.mean(), "median": np.median(part), "std": part.std()}
        for name, part in parts.items()
    }
    return {"counts": counts, **stats}


@pytest.mark.parametrize("scale", ["score", "grade"])
def test_against_numpy(score: Tensor, scale: str) -> None:
    found = score_curves(Graded(score), PAIRS)[scale]
    values = (score if scale == "score" else score.sigmoid()).double().numpy()
    own = np.arange(40)[:, None] == OWNER.numpy()
    ends = (values.min(), values.max()) if scale == "score" else (0.0, 1.0)
    assert found["edges"] == pytest.approx(np.linspace(*ends, BINS + 1).tolist())
    expected = plain(values, own, edges=found["edges"])
    for name in ("positive", "negative"):
        off = np.abs(np.subtract(found[name], expected["counts"][name]))
        assert sum(found[name]) == sum(expected["counts"][name])
        assert off.max() <= 1, "a value on an edge may fall either way in float32"
    width = (ends[1] - ends[0]) / BINS / 1024
    for name in ("positive_stats", "negative_stats", "all_stats"):
        assert found[name]["mean"] == pytest.approx(expected[name]["mean"])
        assert found[name]["std"] == pytest.approx(expected[name]["std"])
        near = np.sort(values[own] if name[0] == "p" else values[~own] if name[0] == "n" else values.ravel())
        middle = near[(len(near) - 1) // 2]  # the lower of two middle values
        assert abs(found[name]["median"] - middle) <= width


def test_a_foreign_score_has_no_grade(score: Tensor) -> None:
    curves = score_curves(MatrixScores(score), PAIRS)
    assert curves["grade"] is None
    assert curves["score"] == score_curves(Graded(score), PAIRS)["score"]


def test_equal_scores() -> None:
    found = score_curves(MatrixScores(torch.full((40, 120), 2.5)), PAIRS)["score"]
    assert found["positive_stats"] == found["all_stats"] == {"mean": 2.5, "median": 2.5, "std": 0.0}
    assert (sum(found["positive"]), sum(found["negative"])) == (120, 40 * 120 - 120)


def test_nothing_but_labelled_pairs() -> None:
    found = score_curves(MatrixScores(torch.tensor([[1.0, 2.0]])), MatrixIds(("a",), ("x", "y"), torch.tensor([0, 0])))
    assert sum(found["score"]["negative"]) == 0
    assert np.isnan(list(found["score"]["negative_stats"].values())).all()


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=50), st.integers(1, 49))
def test_what_is_left_is_what_was_not_taken(values: list[float], cut: int) -> None:
    every, some, rest = (Tally(Spot(0.0, 1.0)) for _ in range(3))
    cut = min(cut, len(values) - 1)
    every.add(torch.tensor(values))
    some.add(torch.tensor(values[:cut]))
    rest.add(torch.tensor(values[cut:]))
    left = every.less(some)
    assert left.shown() == rest.shown()
    assert left.stats() == pytest.approx(rest.stats(), abs=1e-7)
