"""How each query fared, against plain loops, and through a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError
from vacsr.evaluate.outcomes import Outcomes, QueryOutcomes, read_outcomes, write_outcomes
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores
from vacsr.files import read_tensors, write_tensors
from vacsr.report.queries import contributions

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


def plain(row: list[float], relevant: set[int]) -> tuple[float, float, float]:
    """Best rank, mAP@R and R-precision of one query."""
    order = sorted(range(len(row)), key=lambda item: (-row[item], item))
    ranks = sorted(1 + order.index(item) for item in relevant)
    within = [(number + 1) / rank for number, rank in enumerate(ranks) if rank <= len(ranks)]
    return ranks[0], sum(within) / len(ranks), len(within) / len(ranks)


def outcome(found: QueryOutcomes, query: int) -> tuple[float, float, float]:
    assert found.r_precision is not None
    return float(found.best_rank[query]), float(found.average_precision[query]), float(found.r_precision[query])


def test_against_plain_loops(score: Tensor, found: Outcomes) -> None:
    assert (found.protocol, found.split) == ("flickr", "test")
    for image in (0, 1, 3):
        own = {caption for caption, owner in enumerate(OWNER.tolist()) if owner == image}
        assert outcome(found.i2t, image) == pytest.approx(plain(score[image].tolist(), own))
    assert all(value != value for value in outcome(found.i2t, 2)), "NaN: it is not asked"
    for caption, owner in enumerate(OWNER.tolist()):
        assert outcome(found.t2i, caption) == pytest.approx(plain(score[:, caption].tolist(), {owner}))


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


def test_a_file_from_before_r_precision_was_kept(score: Tensor, tmp_path: Path) -> None:
    new, old = tmp_path / "new.safetensors", tmp_path / "old.safetensors"
    write_outcomes(new, evaluate_scores(MatrixScores(score), pairs()).outcomes)
    tensors, metadata = read_tensors(new)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".r_precision")}
    assert len(kept) == len(tensors) - 2
    write_tensors(old, kept, metadata=metadata)
    (before,), (now,) = read_outcomes(old), read_outcomes(new)
    assert (before.i2t.r_precision, before.t2i.r_precision) == (None, None)
    for key in ("test.mean.r_precision", "test.i2t.r_precision", "test.t2i.r_precision"):
        assert contributions(before, key) is None
        assert contributions(now, key) is not None
        assert contributions(replace(now, t2i=before.t2i), key) is None or key == "test.i2t.r_precision"
    for key in ("test.rsum", "test.mean.map_at_r", "test.i2t.r1"):
        same, expected = contributions(before, key), contributions(now, key)
        assert same is not None
        assert expected is not None
        assert same.keys() == expected.keys()
        assert all(np.array_equal(same[way], expected[way], equal_nan=True) for way in same)
    write_outcomes(tmp_path / "again.safetensors", [before])
    assert set(read_tensors(tmp_path / "again.safetensors")[0]) == set(kept), "what is not known is not written"


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
