"""The report of a hand-made scorer, against plain numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vacsr.data import PairSet
from vacsr.errors import UsageError
from vacsr.evaluate import protocols
from vacsr.evaluate.agreement import Judgments, false_negative_auroc, grade_agreement, judged_split, read_judgments
from vacsr.evaluate.metrics import METRICS, best_ranks
from vacsr.evaluate.report import dev_rsum, evaluate_retrieval
from vacsr.evaluate.significance import contributions, is_query_mean
from vacsr.evaluate.truth import exact_metrics, exact_truth

IMAGES, EACH = 30, 3


class MatrixScorer:
    """A scorer and its scores: entries of given matrices. Passes over the scores are counted until they are kept."""

    def __init__(self, score: Tensor, sigma: Tensor | None = None) -> None:
        self.matrix, self.sigma, self.computed, self.kept = score, sigma, 0, False

    def score_set(self, pairs: PairSet) -> MatrixScorer:
        return self

    def blocks(self) -> Iterator[Tensor]:
        self.computed += not self.kept
        yield from self.matrix.split(7)

    @property
    def score(self) -> Tensor:
        self.computed += not self.kept
        self.kept = True
        return self.matrix

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        return self.matrix[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        return None if self.sigma is None else self.sigma[rows, cols]

    def grade(self, score: Tensor) -> Tensor:
        return score.sigmoid()

    def disagreement(self, rows: Tensor, cols: Tensor) -> None:
        return None

    def vectors(self) -> None:
        return None

    def temperature(self) -> float:
        return 1.0

    def against(self, texts: Tensor | Sequence[str]) -> None:
        return None


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    shuffled = torch.randperm(IMAGES * EACH, generator=torch.Generator().manual_seed(3))
    owners = torch.arange(IMAGES).repeat_interleave(EACH)[shuffled]
    names = [f"i{n}.jpg" for n in range(IMAGES)]
    ids = [f"{names[owner]}#{owners[:n].tolist().count(owner)}" for n, owner in enumerate(owners.tolist())]
    return PairSet(torch.ones(IMAGES, 2), torch.ones(len(owners), 2), tuple(names), tuple(ids), owners, split="test")


@pytest.fixture(scope="module")
def own(pairs: PairSet) -> Tensor:
    return torch.arange(IMAGES).unsqueeze(1) == pairs.caption_image


@pytest.fixture(scope="module")
def score(own: Tensor) -> Tensor:
    return torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) + 1.5 * own


@pytest.fixture(scope="module")
def sigma(score: Tensor) -> Tensor:
    return torch.rand(score.shape, generator=torch.Generator().manual_seed(1))


def evaluate(scorer: MatrixScorer, pairs: PairSet, **options: Any) -> dict[str, Any]:
    (result,) = evaluate_retrieval(scorer, pairs, **options).results
    return result


def directions(*matrices: Tensor) -> dict[str, tuple[Any, ...]]:
    """The matrices as queries see them."""
    return {
        "i2t": tuple(matrix.double().numpy() for matrix in matrices),
        "t2i": tuple(matrix.double().numpy().T for matrix in matrices),
    }


def test_retrieval_against_plain_python(pairs: PairSet, score: Tensor, own: Tensor, plain_metrics: Any) -> None:
    result = evaluate(MatrixScorer(score), pairs)
    for direction, (scores, relevant) in directions(score, own).items():
        queries = [plain_metrics(*both) for both in zip(scores, relevant, strict=True)]
        expected = {name: 100 * np.mean([one[name] for one in queries]) for name in METRICS}
        expected["median_rank"] = np.median([one["median_rank"] for one in queries])
        expected["queries"] = len(queries)
        assert result[direction] == pytest.approx(expected)
    recalls = [result[d][k] for d in ("i2t", "t2i") for k in ("r1", "r5", "r10")]
    assert result["rsum"] == pytest.approx(sum(recalls))
    assert (result["protocol"], result["split"], result["uncertainty"]) == ("flickr", "test", None)
    assert dev_rsum(MatrixScorer(score).score_set(pairs), pairs) == pytest.approx(result["rsum"])


def test_uncertainty_against_plain_numpy(
    pairs: PairSet, score: Tensor, sigma: Tensor, own: Tensor, plain_metrics: Any
) -> None:
    result = evaluate(MatrixScorer(score, sigma), pairs)["uncertainty"]
    for direction, (s, u, relevant) in directions(score, sigma, own).items():
        order = np.argsort(-s, axis=1, kind="stable")
        top, query = np.take_along_axis(u, order, 1)[:, :10], np.arange(len(s))
        spread, hit = top[:, 0], relevant[query, order[:, 0]]
        bins = np.array_split(np.argsort(spread, kind="stable"), 10)
        means = [hit[part].mean() for part in bins]
        assert result[f"corr_r1_{direction}"] == pytest.approx(stats.pearsonr(range(10), means).statistic)
        assert result[f"bins_{direction}"]["r1"] == pytest.approx(means)
        assert result[f"bins_{direction}"]["sigma"] == pytest.approx([spread[part].mean() for part in bins])
        loss = 1 - hit[np.argsort(spread)]
        assert result[f"aurc_{direction}"] == pytest.approx(100 * (loss.cumsum() / np.arange(1, len(loss) + 1)).mean())
        curve = result[f"risk_{direction}"]
        assert curve["coverage"] == pytest.approx(list(range(5, 101, 5)))
        answered = [math.ceil(round(share * len(s)) / 100) for share in curve["coverage"]]
        assert curve["risk"] == pytest.approx([100 * loss[:count].mean() for count in answered])
        quality = [plain_metrics(*both)["map_at_r"] for both in zip(s, relevant, strict=True)]
        expected = [stats.pearsonr(top[:, : k + 1].mean(1), quality).statistic for k in range(10)]
        assert result[f"topk_{direction}"]["raw"] == pytest.approx(expected)
        assert len(result[f"topk_{direction}"]["binned"]) == 10


def test_a_large_matrix_is_streamed_with_the_same_result(
    pairs: PairSet, score: Tensor, sigma: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, streamed = MatrixScorer(score, sigma), MatrixScorer(score, sigma)
    expected = evaluate(kept, pairs)
    monkeypatch.setattr(protocols, "_MATRIX", 1)
    assert evaluate(streamed, pairs) == expected
    assert kept.computed == 1 < streamed.computed


@pytest.fixture
def judged(pairs: PairSet, tmp_path: Path) -> list[Judgments]:
    """Every image with its own first caption and two captions of others, by experts and by the crowd."""
    draw = np.random.default_rng(0)
    lines = {"expert": ["rating_1\trating_2\trating_3"], "crowd": ["yes_share"]}
    names = [*pairs.image_ids, "unknown.jpg"]
    places = [(n, other % len(names)) for n in range(len(names)) for other in (n, n + 1, n + 7)]
    lines = {kind: [f"image\tcaption_image\tcaption_index\t{columns[0]}"] for kind, columns in lines.items()}
    for n, other in places:
        lines["expert"].append("\t".join([names[n], names[other], "0", *map(str, draw.integers(1, 5, 3))]))
        lines["crowd"].append(f"{names[n]}\t{names[other]}\t1\t{draw.integers(0, 7) / 6}")
    for kind, rows in lines.items():
        (tmp_path / kind).write_text("\n".join(rows), encoding="utf-8")
    return [read_judgments(tmp_path / kind) for kind in lines]


def test_judged_pairs_are_looked_up_by_their_names(
    pairs: PairSet, score: Tensor, sigma: Tensor, judged: list[Judgments]
) -> None:
    result = evaluate(MatrixScorer(score, sigma), pairs, judgments=judged)
    for key, half in (("judgments", "judged-test"), ("judgments_dev", "judged-dev")):
        expected = {}
        for part in judged:
            ids = zip(part.image_ids, part.caption_ids, strict=True)
            known = [i in pairs.image_ids and c in pairs.caption_ids and judged_split(i) == half for i, c in ids]
            part = part.take(np.flatnonzero(known).tolist())
            rows = [pairs.image_ids.index(name) for name in part.image_ids]
            cols = [pairs.caption_ids.index(name) for name in part.caption_ids]
            expected |= grade_agreement(score[rows, cols], part)
            if part.kind == "expert":
                expected["auroc_false_negative_score"] = false_negative_auroc(score[rows, cols], part)
                by_sigma = false_negative_auroc(sigma[rows, cols], part)
        if key == "judgments":  # the half to report: beside the other uncertainty metrics
            assert result["uncertainty"]["auroc_false_negative"] == pytest.approx(by_sigma)
        else:
            expected["auroc_false_negative"] = by_sigma
        assert result[key] == pytest.approx(expected)
    plain = evaluate(MatrixScorer(score), pairs, judgments=judged)
    assert plain["uncertainty"] is None
    assert "auroc_false_negative" not in plain["judgments"]
    elsewhere = Judgments("crowd", ("x", "y"), ("x#0", "y#0"), np.array([[0.0], [1.0]]), np.array([True, True]))
    assert not {"judgments", "judgments_dev"} & evaluate(MatrixScorer(score), pairs, judgments=[elsewhere]).keys()


def test_markdown_and_json(pairs: PairSet, score: Tensor, sigma: Tensor, judged: list[Judgments]) -> None:
    report = evaluate_retrieval(MatrixScorer(score, sigma), pairs, judgments=judged)
    (result,) = report.results
    assert report.to_dict() == {"schema": 1, "results": [result]}
    table, *more = report.to_markdown().split("\n\n")
    head, rule, row = table.splitlines()
    assert [part.split(" | ")[0] for part in more] == ["| uncertainty", "| grades"]
    assert f"| sigma | test | {result['uncertainty']['aurc_i2t']:.1f} / " in more[0]
    assert f"| crowd (τ-b) | test | {result['grades']['crowd']['pairs']} | " in more[1]
    assert f"expert τ-c {result['grades']['expert']['tau_published']:.1f}" in repr(report)
    assert head.count("|") == rule.count("|") == row.count("|") == 10
    assert f"| {result['rsum']:.1f} | {result['i2t']['map_at_r']:.1f} / {result['t2i']['map_at_r']:.1f} |" in row
    assert f"{result['uncertainty']['corr_r1_i2t']:.2f} / " in row
    assert row.endswith(f"| {result['judgments']['expert_tau_c']:.1f} | {result['judgments']['crowd_tau_b']:.1f} |")
    plain = evaluate_retrieval(MatrixScorer(score), pairs).to_markdown()
    assert "σ" not in plain
    assert "τ" not in plain


def test_a_metric_is_one_line(pairs: PairSet, score: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new entry of METRICS is reported, shown, stored and tested for significance."""
    before = evaluate_retrieval(MatrixScorer(score), pairs)
    monkeypatch.setitem(METRICS, "first_rank", lambda ranks: 1 / best_ranks(ranks))
    report = evaluate_retrieval(MatrixScorer(score), pairs)
    (result,) = report.results
    i2t, t2i = result["i2t"]["first_rank"], result["t2i"]["first_rank"]
    assert "| first_rank i2t/t2i |" in report.to_markdown()
    assert f"| {i2t:.1f} / {t2i:.1f} |" in report.to_markdown()
    assert is_query_mean("test.mean.first_rank")
    assert not is_query_mean("test.mean.second_rank")
    added = contributions(report.outcomes[0], "test.mean.first_rank")
    assert added is not None
    assert sum(float(np.nanmean(values)) for values in added.values()) == pytest.approx((i2t + t2i) / 2)
    assert contributions(before.outcomes[0], "test.mean.first_rank") is None, "outcomes that were stored without it"


def test_fewer_items_than_the_top_ten(score: Tensor, sigma: Tensor) -> None:
    few = PairSet(torch.ones(2, 1), torch.ones(3, 1), ("a", "b"), ("a#0", "b#0", "b#1"), torch.tensor([0, 1, 1]))
    result = evaluate(MatrixScorer(score[:2, :3], sigma[:2, :3]), few)
    assert result["i2t"]["r10"] == result["t2i"]["r5"] == 100
    assert len(result["uncertainty"]["topk_i2t"]["raw"]) == 3
    assert len(result["uncertainty"]["topk_t2i"]["raw"]) == 2


def test_an_unknown_protocol_is_refused_before_scoring(pairs: PairSet, score: Tensor) -> None:
    scorer = MatrixScorer(score)
    with pytest.raises(UsageError, match="'coco-9k' — choose from: flickr"):
        evaluate(scorer, pairs, protocols=["flickr", "coco-9k"])
    assert scorer.computed == 0


def test_exact_grades_and_histograms_are_in_the_result(
    pairs: PairSet, score: Tensor, sigma: Tensor, own: Tensor
) -> None:
    """All of it from scores that were computed once."""
    truth = exact_truth(own.float().maximum((sigma > 0.9).float()), pairs.caption_image)
    scorer = MatrixScorer(score, sigma)
    result = evaluate(scorer, pairs, truth=truth)
    assert scorer.computed == 1
    assert result["exact"] == exact_metrics(scorer.score_set(pairs), truth)
    assert result["exact"]["auroc_false_negative"] == 100, "the uncertain pairs are the matches without a label"
    assert sum(result["scores"]["grade"]["positive"]) == IMAGES * EACH
    assert result["scores"]["score"]["all_stats"]["mean"] == pytest.approx(float(score.mean()), abs=1e-6)
    assert "exact" not in evaluate(MatrixScorer(score, sigma), pairs)
