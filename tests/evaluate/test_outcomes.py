"""How each query fared, against plain loops, and through a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError
from vacsr.evaluate.outcomes import Outcomes, read_outcomes, write_outcomes
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores
from vacsr.files import write_tensors

OWNER = torch.tensor([0, 0, 1, 1, 1, 3])  # image 2 has no caption


def pairs(split: str = "test", prefix: str = "i") -> MatrixIds:
    return MatrixIds(tuple(f"{prefix}{n}" for n in range(4)), tuple(f"c{n}" for n in range(6)), OWNER, split=split)


@pytest.fixture(scope="module")
def score() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def found(score: Tensor) -> Outcomes:
    (outcomes,) = evaluate_scores(MatrixScores(score), pairs()).outcomes
    return outcomes


def plain(row: list[float], relevant: set[int]) -> tuple[float, float]:
    """Best rank and mAP@R of one query."""
    order = sorted(range(len(row)), key=lambda item: (-row[item], item))
    ranks = sorted(1 + order.index(item) for item in relevant)
    within = [(number + 1) / rank for number, rank in enumerate(ranks) if rank <= len(ranks)]
    return ranks[0], sum(within) / len(ranks)


def test_against_plain_loops(score: Tensor, found: Outcomes) -> None:
    assert (found.protocol, found.split) == ("flickr", "test")
    for image in (0, 1, 3):
        own = {caption for caption, owner in enumerate(OWNER.tolist()) if owner == image}
        outcome = float(found.i2t.best_rank[image]), float(found.i2t.average_precision[image])
        assert outcome == pytest.approx(plain(score[image].tolist(), own))
    assert found.i2t.best_rank[2].isnan()
    assert found.i2t.average_precision[2].isnan()
    for caption, owner in enumerate(OWNER.tolist()):
        outcome = float(found.t2i.best_rank[caption]), float(found.t2i.average_precision[caption])
        assert outcome == pytest.approx(plain(score[:, caption].tolist(), {owner}))


def test_the_averages_are_the_results(score: Tensor) -> None:
    report = evaluate_scores(MatrixScores(score), pairs())
    (result,), (found,) = report.results, report.outcomes
    for way in ("i2t", "t2i"):
        best = found.of(way).best_rank  # type: ignore[arg-type]
        asked = best[~best.isnan()]
        assert result[way]["r1"] == pytest.approx(100 * float((asked <= 1).double().mean()))
        precision = found.of(way).average_precision  # type: ignore[arg-type]
        assert result[way]["map_at_r"] == pytest.approx(100 * float(precision.nanmean()))
    assert "outcomes" not in report.to_json()


def test_a_file_gives_back_what_it_was_given(score: Tensor, tmp_path: Path) -> None:
    given = [*evaluate_scores(MatrixScores(score), pairs()).outcomes,
             *evaluate_scores(MatrixScores(-score), pairs("dev")).outcomes]  # fmt: skip
    write_outcomes(tmp_path / "outcomes.safetensors", given)
    back = read_outcomes(tmp_path / "outcomes.safetensors")
    assert [(one.protocol, one.split, one.queries) for one in back] == [
        (one.protocol, one.split, one.queries) for one in given
    ]
    for before, after in zip(given, back, strict=True):
        for way in ("i2t", "t2i"):
            for old, new in zip(before.of(way), after.of(way), strict=True):  # type: ignore[arg-type]
                assert torch.equal(old.nan_to_num(-1), new.nan_to_num(-1))
    write_outcomes(tmp_path / "none.safetensors", [])
    assert read_outcomes(tmp_path / "none.safetensors") == ()


def test_the_digest_tells_other_queries_apart(score: Tensor, found: Outcomes) -> None:
    (same,) = evaluate_scores(MatrixScores(-score), pairs("dev")).outcomes
    (other,) = evaluate_scores(MatrixScores(score), pairs(prefix="j")).outcomes
    assert found.queries == same.queries != other.queries


def test_a_file_of_something_else(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(DataError, match=r"x\.safetensors does not hold outcomes"):
        read_outcomes(tmp_path / "x.safetensors")
    write_tensors(tmp_path / "y.safetensors", {"a": torch.ones(1)}, metadata={"outcomes": '[{"protocol": "flickr"}]'})
    with pytest.raises(DataError, match="does not hold outcomes"):
        read_outcomes(tmp_path / "y.safetensors")
