"""The report of a hand-made scorer, against plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vacsr.data import PairSet
from vacsr.errors import UsageError
from vacsr.evaluate import galleries
from vacsr.evaluate.exact import exact_metrics, exact_truth
from vacsr.evaluate.judgments import Judgments, judged_split, read_judgments
from vacsr.evaluate.retrieval import PROTOCOLS, check_protocols, dev_rsum, evaluate_retrieval
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScores
from vacsr.scoring.folded import BlockScorer

IMAGES, EACH = 30, 3


class MatrixBlocks(BlockScorer):
    """The walk of the real one over a given matrix."""

    def __init__(self, scorer: MatrixScorer) -> None:
        self.scorer, self.limits = scorer, None

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        return self.scorer.block(v, t)


class MatrixScorer:
    """Scores and uncertainties are entries of given matrices; embeddings are row numbers."""

    def __init__(self, score: Tensor, sigma: Tensor | None) -> None:
        self.score, self.sigma, self.computed = score, sigma, 0
        self.engine = MatrixBlocks(self)
        self.model = SimpleNamespace(method=SimpleNamespace(grade=torch.sigmoid))

    def block(self, v: Embedding, t: Embedding) -> Tensor:
        self.computed += 1
        return self.score[v.mean[:, 0].long()][:, t.mean[:, 0].long()]

    def score_set(self, pairs: PairSet) -> PairScores:
        rows, cols = (torch.arange(float(n)).unsqueeze(1) for n in self.score.shape)
        return PairScores(self, Embedding(rows), Embedding(cols))  # type: ignore[arg-type]

    def uncertainty_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor | None:
        return None if self.sigma is None else self.sigma[rows, cols]

    def score_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor:
        return self.score[rows, cols]


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    shuffled = torch.randperm(IMAGES * EACH, generator=torch.Generator().manual_seed(3))
    owners = torch.arange(IMAGES).repeat_interleave(EACH)[shuffled]
    names = [f"i{n}.jpg" for n in range(IMAGES)]
    seen: dict[int, int] = {}
    ids = []
    for owner in owners.tolist():
        ids.append(f"{names[owner]}#{seen.setdefault(owner, 0)}")
        seen[owner] += 1
    return PairSet(torch.ones(IMAGES, 2), torch.ones(len(owners), 2), tuple(names), tuple(ids), owners, split="test")


@pytest.fixture(scope="module")
def score(pairs: PairSet) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    own = (torch.arange(IMAGES).unsqueeze(1) == pairs.caption_image).float()
    return torch.randn(own.shape, generator=generator) + 1.5 * own


@pytest.fixture(scope="module")
def sigma(score: Tensor) -> Tensor:
    return torch.rand(score.shape, generator=torch.Generator().manual_seed(1))


def evaluate(scorer: MatrixScorer, pairs: PairSet, **options: Any) -> dict[str, Any]:
    (result,) = evaluate_retrieval(scorer, pairs, **options).results  # type: ignore[arg-type]
    return result


def plain_direction(score: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> dict[str, float]:
    """Query by query, with a sort."""
    figures: dict[str, list[float]] = {key: [] for key in ("r1", "r5", "r10", "map_at_r", "r_precision", "median_rank")}
    for row, truth in zip(score, own, strict=True):
        hits = truth[np.lexsort((np.arange(len(row)), -row))]
        count = int(truth.sum())
        best = int(np.argmax(hits)) + 1
        for k in (1, 5, 10):
            figures[f"r{k}"].append(100 * (best <= k))
        top = hits[:count]
        figures["r_precision"].append(100 * top.mean())
        figures["map_at_r"].append(100 * float((top * top.cumsum() / np.arange(1, count + 1)).sum()) / count)
        figures["median_rank"].append(best)
    return {key: float(np.median(v) if key == "median_rank" else np.mean(v)) for key, v in figures.items()}


def owners(pairs: PairSet) -> np.ndarray[Any, Any]:
    own: np.ndarray[Any, Any] = np.arange(IMAGES)[:, None] == pairs.caption_image.numpy()[None]
    return own


def test_retrieval_against_plain_numpy(pairs: PairSet, score: Tensor) -> None:
    result = evaluate(MatrixScorer(score, None), pairs)
    own = owners(pairs)
    assert result["i2t"] == pytest.approx(plain_direction(score.numpy(), own))
    assert result["t2i"] == pytest.approx(plain_direction(score.numpy().T, own.T))
    recalls = [result[d][k] for d in ("i2t", "t2i") for k in ("r1", "r5", "r10")]
    assert result["rsum"] == pytest.approx(sum(recalls))
    assert (result["protocol"], result["split"], result["uncertainty"]) == ("flickr", "test", None)
    assert dev_rsum(MatrixScorer(score, None).score_set(pairs), pairs) == pytest.approx(result["rsum"])


def test_uncertainty_against_plain_numpy(pairs: PairSet, score: Tensor, sigma: Tensor) -> None:
    found = evaluate(MatrixScorer(score, sigma), pairs)["uncertainty"]
    for direction in ("i2t", "t2i"):
        s, u, own = score.double().numpy(), sigma.double().numpy(), owners(pairs)
        if direction == "t2i":
            s, u, own = s.T, u.T, own.T
        first = s.argmax(1)
        query = np.arange(len(s))
        spread, hit = u[query, first], own[query, first].astype(float)
        bins = np.array_split(np.argsort(spread, kind="stable"), 10)
        means = [hit[part].mean() for part in bins]
        assert found[f"corr_r1_{direction}"] == pytest.approx(stats.pearsonr(range(10), means).statistic)
        assert found[f"bins_{direction}"]["r1"] == pytest.approx(means)
        assert found[f"bins_{direction}"]["sigma"] == pytest.approx([spread[part].mean() for part in bins])
        loss = 1 - hit[np.argsort(spread)]
        assert found[f"aurc_{direction}"] == pytest.approx(100 * (loss.cumsum() / np.arange(1, len(loss) + 1)).mean())
        order = np.argsort(-s, axis=1, kind="stable")[:, :10]
        top = np.take_along_axis(u, order, 1)
        quality = [plain_direction(s[n : n + 1], own[n : n + 1])["map_at_r"] for n in query]
        expected = [stats.pearsonr(top[:, : k + 1].mean(1), quality).statistic for k in range(10)]
        assert found[f"topk_{direction}"]["raw"] == pytest.approx(expected)
        assert len(found[f"topk_{direction}"]["binned"]) == 10


def test_a_certain_scorer_that_knows_its_errors(pairs: PairSet, score: Tensor) -> None:
    """σ low where the best hit is right: a strong negative correlation and an AURC below the error rate."""
    own = torch.from_numpy(owners(pairs))
    knowing = torch.where(own, 0.1, 0.9) + 0.05 * torch.rand(own.shape, generator=torch.Generator().manual_seed(2))
    result = evaluate(MatrixScorer(score, knowing), pairs)
    for direction in ("i2t", "t2i"):
        assert result["uncertainty"][f"corr_r1_{direction}"] < -0.8
        assert result["uncertainty"][f"aurc_{direction}"] < 0.6 * (100 - result[direction]["r1"])


def test_a_large_matrix_is_streamed_with_the_same_result(
    pairs: PairSet, score: Tensor, sigma: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = MatrixScorer(score, sigma)
    expected = evaluate(kept, pairs)
    monkeypatch.setattr(galleries, "_MATRIX", 1)
    streamed = MatrixScorer(score, sigma)
    assert evaluate(streamed, pairs) == expected
    assert kept.computed == 1
    assert streamed.computed > 1


def write_judgments(folder: Path, pairs: PairSet) -> tuple[Path, Path]:
    """Every image with its own first caption and two captions of others."""
    draw = np.random.default_rng(0)
    expert, crowd = ["image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3"], []
    for n, image in enumerate(pairs.image_ids):
        for other in (n, (n + 1) % IMAGES, (n + 7) % IMAGES):
            ratings = draw.integers(3, 5, 3) if other == n else draw.integers(1, 5, 3)
            expert.append("\t".join([image, pairs.image_ids[other], "0", *map(str, ratings)]))
            crowd.append(f"{image}\t{pairs.image_ids[other]}\t1\t{draw.integers(0, 7) / 6}")
    expert.append("unknown.jpg\tunknown.jpg\t0\t4\t4\t4")
    files = folder / "expert.tsv", folder / "crowd.tsv"
    files[0].write_text("\n".join(expert) + "\n", encoding="utf-8")
    files[1].write_text("\n".join(["image\tcaption_image\tcaption_index\tyes_share", *crowd]) + "\n", encoding="utf-8")
    return files


def values_of(judged: Judgments, matrix: Tensor, pairs: PairSet) -> np.ndarray[Any, Any]:
    places = zip(judged.image_ids, judged.caption_ids, strict=True)
    return np.array([float(matrix[pairs.image_ids.index(i), pairs.caption_ids.index(c)]) for i, c in places])


def test_judgments_against_scipy(pairs: PairSet, score: Tensor, sigma: Tensor, tmp_path: Path) -> None:
    judged = [read_judgments(path) for path in write_judgments(tmp_path, pairs)]
    result = evaluate(MatrixScorer(score, sigma), pairs, judgments=judged)
    for key, parity in (("judgments", "judged-test"), ("judgments_dev", "judged-dev")):
        found = result[key]
        for part, tau, variant in ((judged[0], "expert_tau_c", "c"), (judged[1], "crowd_tau_b", "b")):
            rows = [
                n for n, name in enumerate(part.image_ids) if name in pairs.image_ids and judged_split(name) == parity
            ]
            known = part.take(rows)
            value = values_of(known, score, pairs)
            assert found[tau] == pytest.approx(100 * stats.kendalltau(value, known.grades, variant=variant).statistic)
            across = ~known.same_image
            single = known.grades[:, None] if known.ratings is None else known.ratings
            repeated = np.repeat(value[across], single.shape[1])
            published = stats.kendalltau(repeated, single[across].ravel(), variant=variant).statistic
            assert found[f"{tau}_published"] == pytest.approx(100 * published)
            assert found[f"{part.kind}_spearman"] == pytest.approx(100 * stats.spearmanr(value, known.grades).statistic)
            assert found[f"{part.kind}_pairs"] == len(rows)
        auroc = result["uncertainty"] if key == "judgments" else found
        known = judged[0].take(
            [
                n
                for n, name in enumerate(judged[0].image_ids)
                if name in pairs.image_ids and judged_split(name) == parity
            ]
        )
        across, spread = ~known.same_image, values_of(known, sigma, pairs)
        false = known.grades[across] >= 3
        test = stats.mannwhitneyu(spread[across][false], spread[across][~false])
        assert auroc["auroc_false_negative"] == pytest.approx(100 * test.statistic / (false.sum() * (~false).sum()))


def test_judgments_of_other_images_add_nothing(pairs: PairSet, score: Tensor) -> None:
    elsewhere = Judgments("crowd", ("x", "y"), ("x#0", "y#0"), np.array([0.0, 1.0]), None, np.array([True, True]))
    result = evaluate(MatrixScorer(score, None), pairs, judgments=[elsewhere])
    assert "judgments" not in result
    assert "judgments_dev" not in result


def test_a_cosine_has_judgments_but_no_uncertainty(pairs: PairSet, score: Tensor, tmp_path: Path) -> None:
    judged = [read_judgments(write_judgments(tmp_path, pairs)[0])]
    result = evaluate(MatrixScorer(score, None), pairs, judgments=judged)
    assert result["uncertainty"] is None
    assert "auroc_false_negative" not in result["judgments"]
    assert 0 <= result["judgments"]["auroc_false_negative_score"] <= 100


def test_markdown_and_json(pairs: PairSet, score: Tensor, sigma: Tensor, tmp_path: Path) -> None:
    judged = [read_judgments(path) for path in write_judgments(tmp_path, pairs)]
    report = evaluate_retrieval(MatrixScorer(score, sigma), pairs, judgments=judged)  # type: ignore[arg-type]
    (result,) = report.results
    assert report.to_json() == {"schema": 1, "results": [result]}
    head, rule, row = report.to_markdown().splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == 10
    assert f"| {result['rsum']:.1f} |" in row
    assert f"{result['uncertainty']['corr_r1_i2t']:.2f} / " in row
    assert row.endswith(f"| {result['judgments']['expert_tau_c']:.1f} | {result['judgments']['crowd_tau_b']:.1f} |")
    plain = evaluate_retrieval(MatrixScorer(score, None), pairs).to_markdown()  # type: ignore[arg-type]
    assert plain.splitlines()[2].endswith("| – / – | – | – |")


def test_fewer_items_than_the_top_ten(score: Tensor, sigma: Tensor) -> None:
    few = PairSet(torch.ones(2, 1), torch.ones(3, 1), ("a", "b"), ("a#0", "b#0", "b#1"), torch.tensor([0, 1, 1]))
    result = evaluate(MatrixScorer(score[:2, :3], sigma[:2, :3]), few)
    assert result["i2t"]["r10"] == result["t2i"]["r5"] == 100
    assert len(result["uncertainty"]["topk_i2t"]["raw"]) == 3
    assert len(result["uncertainty"]["topk_t2i"]["raw"]) == 2


def test_an_unknown_protocol_is_refused_before_scoring(pairs: PairSet, score: Tensor) -> None:
    scorer = MatrixScorer(score, None)
    with pytest.raises(UsageError, match="unknown protocol 'coco-9k' — choose from: flickr"):
        evaluate(scorer, pairs, protocols=["flickr", "coco-9k"])
    assert scorer.computed == 0
    check_protocols(PROTOCOLS)


def test_curves_and_exact_grades_stand_in_the_result(pairs: PairSet, score: Tensor, sigma: Tensor) -> None:
    """All of it from scores that were computed once."""
    grades = torch.from_numpy(owners(pairs)).float().maximum((sigma > 0.9).float())
    truth = exact_truth(grades, pairs.caption_image)
    scorer = MatrixScorer(score, sigma)
    result = evaluate(scorer, pairs, truth=truth)
    assert scorer.computed == 1
    exact = exact_metrics(scorer.score_set(pairs), truth)._asdict()
    assert result["exact"] == exact
    assert result["exact"]["auroc_false_negative"] == 100, "the uncertain pairs are the matches without a label"
    assert sum(result["scores"]["grade"]["positive"]) == IMAGES * EACH
    assert result["scores"]["grade"]["edges"][::25] == [0.0, 0.5, 1.0]
    assert result["scores"]["score"]["all_stats"]["mean"] == pytest.approx(float(score.mean()), abs=1e-6)
    assert "exact" not in evaluate(MatrixScorer(score, sigma), pairs)


def test_the_risk_of_the_least_uncertain(pairs: PairSet, score: Tensor, sigma: Tensor) -> None:
    found = evaluate(MatrixScorer(score, sigma), pairs)["uncertainty"]
    s, u, own = score.double().numpy(), sigma.double().numpy(), owners(pairs)
    for direction in ("i2t", "t2i"):
        if direction == "t2i":
            s, u, own = s.T, u.T, own.T
        query, first = np.arange(len(s)), s.argmax(1)
        wrong = 1.0 - own[query, first][np.argsort(u[query, first])]
        curve = found[f"risk_{direction}"]
        assert curve["coverage"] == pytest.approx(list(range(5, 101, 5)))
        for share, risk in zip(curve["coverage"], curve["risk"], strict=True):
            answered = math.ceil(round(share * len(s)) / 100)
            assert risk == pytest.approx(100 * wrong[:answered].mean()), (direction, share)
