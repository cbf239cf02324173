"""Histograms and moments against numpy on the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vacsr.errors import DataError
from vacsr.evaluate import curves
from vacsr.evaluate.curves import BINS, score_curves
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores
from vacsr.evaluate.selection import Selection

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
    compare(found, plain(values, own, edges=found["edges"]), exact=scale == "score")


def compare(found: dict[str, Any], expected: dict[str, Any], *, exact: bool = True) -> None:
    for name in ("positive", "negative"):
        off = np.abs(np.subtract(found[name], expected["counts"][name]))
        assert sum(found[name]) == sum(expected["counts"][name])
        assert off.max() <= 1, "a value on an edge may fall either way"
    for name in ("positive_stats", "negative_stats", "all_stats"):
        median = expected[name].pop("median")
        assert found[name].pop("median") == (median if exact else pytest.approx(median, abs=1e-7))
        assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_cuda_equals_cpu(score: Tensor, kind: torch.dtype) -> None:
    expected = score_curves(Graded(score.to(kind)), PAIRS)
    found = score_curves(Graded(score.to("cuda", kind)), PAIRS)
    for name, curve in expected.items():
        for part in ("positive", "negative"):
            assert np.abs(np.subtract(found[name][part], curve[part])).max() <= 1, "on an edge it may fall either way"
        for part in ("positive_stats", "negative_stats", "all_stats"):
            assert found[name][part] == pytest.approx(curve[part], rel=1e-5)


def test_a_foreign_score_has_no_grade(score: Tensor) -> None:
    found = score_curves(MatrixScores(score), PAIRS)
    assert found["grade"] is None
    same(found["score"], score_curves(Graded(score), PAIRS)["score"])


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert found[key] == (pytest.approx(value, rel=1e-12) if key.endswith("stats") else value)


def test_equal_scores() -> None:
    found = score_curves(MatrixScores(torch.full((40, 120), 2.5)), PAIRS)["score"]
    assert found["positive_stats"] == found["all_stats"] == {"mean": 2.5, "median": 2.5, "std": 0.0}
    assert (sum(found["positive"]), sum(found["negative"])) == (120, 40 * 120 - 120)


def test_nothing_but_labelled_pairs() -> None:
    found = score_curves(MatrixScores(torch.tensor([[1.0, 2.0]])), MatrixIds(("a",), ("x", "y"), torch.tensor([0, 0])))
    assert sum(found["score"]["negative"]) == 0
    assert np.isnan(list(found["score"]["negative_stats"].values())).all()


LOW = {kind: float(torch.finfo(kind).min) for kind in (torch.float32, torch.float64)}
NOT_OWN = (torch.arange(40)[:, None] != OWNER) & (torch.arange(120) % 7 == 0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (torch.float64, lambda s: s),
        (torch.float32, lambda s: s.masked_fill(NOT_OWN, LOW[torch.float32])),
        (torch.float64, lambda s: s.masked_fill(NOT_OWN, LOW[torch.float64])),
        (torch.float64, lambda s: s.masked_fill(NOT_OWN, -1e9)),
        (torch.float64, lambda s: 1e-300 * s),
        (torch.float64, lambda s: 5e-324 * (1000 * s).round()),
        (torch.float64, lambda s: 1e307 * s),
        (torch.float64, lambda s: torch.where(s > 0, 0.3, -1.0) * 10.0 ** (100 * s.abs().clamp(max=3))),
        (torch.float32, lambda s: s.round()),
        (torch.float32, lambda s: 1e6 + s),
        (torch.float32, lambda s: -s.abs()),
        (torch.float32, lambda s: torch.zeros_like(s) * s.sign()),
        (torch.float64, lambda s: torch.full_like(s, -1.7e308)),
    ],
    ids=[
        "double",
        "mask32",
        "mask64",
        "mask-1e9",
        "tiny",
        "subnormal",
        "huge",
        "decades",
        "ties",
        "far",
        "negative",
        "zeros",
        "equal",
    ],
)
def test_any_finite_scores(score: Tensor, kind: torch.dtype, change: Any) -> None:
    """Against numpy with more digits than float64 has, in blocks, positives apart from what masks others."""
    values = change(score.to(kind))
    with_more = values.numpy().astype(np.longdouble)
    if np.finfo(np.longdouble).max <= np.finfo(np.float64).max:
        pytest.skip("numpy has no wider floats here")
    own = np.arange(40)[:, None] == OWNER.numpy()
    found = score_curves(Blocked(values), PAIRS)["score"]
    ends = (with_more.min(), with_more.max())
    assert found["edges"][0] == ends[0]
    assert found["edges"][-1] == ends[1]
    assert np.isfinite(found["edges"]).all()
    parts = {"positive": with_more[own], "negative": with_more[~own], "all": with_more.ravel()}
    for name, part in parts.items():
        said = found[f"{name}_stats"]
        assert said["median"] == float(np.median(part)), name
        # Below the smallest normal number a float has fewer digits.
        assert said["mean"] == pytest.approx(float(part.mean()), rel=1e-9, abs=max(1e-323, 1e-12 * float(part.std())))
        assert said["std"] == pytest.approx(float(part.std()), rel=1e-9, abs=1e-323)
    width = (ends[1] - ends[0]) / BINS
    if width:
        for name in ("positive", "negative"):
            place = np.clip(np.floor((parts[name] - ends[0]) / width), 0, BINS - 1).astype(int)
            expected = np.bincount(place, minlength=BINS)
            assert np.abs(expected - found[name]).sum() <= 4, "a value on an edge may fall either way"


def test_a_small_range_far_from_zero(score: Tensor) -> None:
    """A few dozen different numbers are all that float64 has here; the spread is that of these."""
    values = 1e6 + 1e-9 * score.double()
    found = score_curves(Blocked(values), PAIRS)["score"]
    steps = ((values - values.min()) / 2.0**-33).numpy()  # whole
    own = np.arange(40)[:, None] == OWNER.numpy()
    for name, part in {"positive": steps[own], "negative": steps[~own], "all": steps.ravel()}.items():
        middle = float(values.min()) + float(np.median(part)) * 2.0**-33
        assert found[f"{name}_stats"]["median"] == middle
        assert found[f"{name}_stats"]["std"] == pytest.approx(part.std() * 2.0**-33, rel=1e-6)


class Blocked(MatrixScores):
    """In blocks of seven rows, one of them empty."""

    def blocks(self) -> Any:
        yield self.score[:0]
        yield from (self.score[start : start + 7] for start in range(0, len(self.score), 7))


@pytest.mark.parametrize("size", [1, 100, 500])
def test_rows_are_looked_at_a_few_at_a_time(score: Tensor, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_curves(MatrixScores(score), PAIRS)["score"]
    monkeypatch.setattr(curves, "_CHUNK", size)
    same(score_curves(Blocked(score), PAIRS)["score"], whole)


@pytest.mark.parametrize("captions", [1, 2, 3, 4])
def test_few_pairs(captions: int) -> None:
    """One value, and even and odd numbers of each kind."""
    values = torch.randn(3, captions, generator=torch.Generator().manual_seed(captions))
    owner = torch.tensor([2, 0, 2, 2])[:captions]
    names = tuple("wxyz"[:captions])
    found = score_curves(MatrixScores(values), MatrixIds(("a", "b", "c"), names, owner))["score"]
    own = np.arange(3)[:, None] == owner.numpy()
    compare(found, plain(values.double().numpy(), own, edges=found["edges"]))


def test_one_pair() -> None:
    found = score_curves(MatrixScores(torch.tensor([[0.25]])), MatrixIds(("a",), ("x",), torch.tensor([0])))["score"]
    assert found["positive_stats"] == found["all_stats"] == {"mean": 0.25, "median": 0.25, "std": 0.0}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(score: Tensor, value: float) -> None:
    values = score.clone()
    values[5, 3] = value
    with pytest.raises(DataError, match="NaN or infinity"):
        score_curves(MatrixScores(values), PAIRS)


@given(
    st.sampled_from([32, 64]).flatmap(
        lambda width: st.tuples(
            st.just(width), st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False), min_size=2)
        )
    ),
    st.data(),
)
def test_ranks_are_found_in_passes(given_values: tuple[int, list[float]], data: st.DataObject) -> None:
    width, values = given_values
    cut = data.draw(st.integers(0, len(values) - 1))
    every, rest = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1 - cut))
    given_floats = torch.tensor(values, dtype=torch.float32 if width == 32 else torch.float64)
    selection = Selection(every=[every], rest=[rest])
    passes = 0
    while not selection.found:
        selection.add(given_floats[:1])
        selection.add(given_floats[1:])
        selection.settle(given_floats[:cut])
        passes += 1
    assert passes == width // 16
    assert selection.of_all().tolist() == [sorted(given_floats.tolist())[every]]
    assert selection.of_rest().tolist() == [sorted(given_floats[cut:].tolist())[rest]]
