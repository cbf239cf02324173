"""Histograms and moments against numpy on the whole matrix."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError
from vacsr.evaluate.histograms import BINS, score_histograms
from vacsr.evaluate.score_files import MatrixIds, MatrixScores

OWNER = torch.arange(40).repeat_interleave(3)
PAIRS = MatrixIds(tuple(f"i{n}" for n in range(40)), tuple(f"c{n}" for n in range(120)), OWNER)
OWN = np.arange(40)[:, None] == OWNER.numpy()
LOW = float(torch.finfo(torch.float64).min)
NOT_OWN = torch.from_numpy(~OWN) & (torch.arange(120) % 7 == 0)


class Graded(MatrixScores):
    """With grades, and in blocks that do not divide the rows, one of them empty."""

    def blocks(self) -> Any:
        yield self.score[:0]
        yield from (self.score[start : start + 7] for start in range(0, len(self.score), 7))

    def grade(self, score: Tensor) -> Tensor:
        return (self.score.new_tensor(1.0) * score).sigmoid()  # as of a learned scale, which has a device


@pytest.fixture(scope="module")
def score() -> Tensor:
    scores = 3 * torch.randn(40, 120, generator=torch.Generator().manual_seed(0)) - 1
    scores[OWNER, torch.arange(120)] += 4
    return scores


def check(result: dict[str, Any], values: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> None:
    """Counts, means and spreads; medians to a ten-thousandth of the range."""
    low, high = result["edges"][0], result["edges"][-1]
    for name, part in {"positive": values[own], "negative": values[~own], "all": values.ravel()}.items():
        stats = result[f"{name}_stats"]
        assert stats["mean"] == pytest.approx(part.mean(), rel=1e-9, abs=1e-9)
        assert stats["std"] == pytest.approx(part.std(), rel=1e-6, abs=1e-9)
        assert stats["median"] == pytest.approx(np.median(part), abs=1.01e-4 * (high - low))
        if name != "all":
            off = np.abs(np.subtract(result[name], np.histogram(part, BINS, (low, high))[0]))
            assert sum(result[name]) == part.size
            assert off.max() <= 1, "a value on an edge may fall either way"


@pytest.mark.parametrize("scale", ["score", "grade"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_against_numpy(score: Tensor, scale: str, dtype: torch.dtype) -> None:
    result = score_histograms(Graded(score.to(dtype)), PAIRS)[scale]
    values = (score.to(dtype) if scale == "score" else score.to(dtype).sigmoid()).double().numpy()
    ends = (values.min(), values.max()) if scale == "score" else (0.0, 1.0)
    assert result["edges"] == pytest.approx(np.linspace(*ends, BINS + 1).tolist())
    check(result, values, OWN)


@pytest.mark.gpu
def test_cuda_equals_cpu(score: Tensor) -> None:
    expected, result = (score_histograms(Graded(score.to(device)), PAIRS) for device in ("cpu", "cuda"))
    for name, part in expected.items():
        assert np.abs(np.subtract(result[name]["negative"], part["negative"])).max() <= 1
        assert result[name]["all_stats"] == pytest.approx(part["all_stats"], rel=1e-5)


def test_a_foreign_score_has_no_grade(score: Tensor) -> None:
    result = score_histograms(MatrixScores(score), PAIRS)
    assert result["grade"] is None
    check(result["score"], score.double().numpy(), OWN)


@pytest.mark.parametrize("mask", [-1e9, LOW])
def test_masked_pairs_leave_finite_numbers(score: Tensor, mask: float) -> None:
    """A very low score keeps a pair from being found; the labelled pairs' numbers stay exact."""
    values = score.double().masked_fill(NOT_OWN, mask)
    result = score_histograms(MatrixScores(values), PAIRS)["score"]
    own = values.numpy()[OWN]
    assert result["positive_stats"] == pytest.approx({"mean": own.mean(), "median": np.median(own), "std": own.std()})
    assert sum(result["negative"]) == values.numel() - len(own)
    assert result["negative"][0] == int(NOT_OWN.sum())
    assert np.isfinite([*result["negative_stats"].values(), *result["all_stats"].values()]).all()


def test_few_and_equal_scores() -> None:
    result = score_histograms(MatrixScores(torch.full((40, 120), 2.5)), PAIRS)["score"]
    assert result["positive_stats"] == {"mean": 2.5, "median": 2.5, "std": 0.0}
    assert (sum(result["positive"]), sum(result["negative"])) == (120, 40 * 120 - 120)
    one = MatrixIds(("a",), ("x", "y"), torch.tensor([0, 0]))
    result = score_histograms(MatrixScores(torch.tensor([[1.0, 2.0]])), one)["score"]
    assert sum(result["negative"]) == 0
    assert np.isnan(list(result["negative_stats"].values())).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(score: Tensor, value: float) -> None:
    values = score.clone()
    values[5, 3] = value
    with pytest.raises(DataError, match="NaN or infinity"):
        score_histograms(MatrixScores(values), PAIRS)
