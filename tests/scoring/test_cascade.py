from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import vacsr.scoring.cascade as cascade
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores, choose_prefilter, recall_of_prefilter
from vacsr.scoring.bounds import binomial_tail, mean_level, miss_rate_bound
from vacsr.scoring.cascade import prefilter_ranks

IMAGES, TEXTS = 60, 90
METHODS: list[dict[str, Any]] = [
    {"name": "vacsr"},
    {"name": "vacsr", "adapter": {"mixing": "head"}},
    {"name": "sigmoid"},
]
every_method = pytest.mark.parametrize("raw", METHODS, ids=str)
both_ways = pytest.mark.parametrize("direction", ["i2t", "t2i"])
Direction = Literal["i2t", "t2i"]


def scores_of(raw: dict[str, Any], *, images: int = IMAGES, texts: int = TEXTS) -> PairScores:
    """Of a random model whose order is far from the cosine's."""
    model = MatchingModel.build(
        method_config(raw), BackboneConfig(head=HeadConfig(dim=8)), image_dim=6, text_dim=4, seed=1
    )
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(images, 6, generator=generator), torch.randn(texts, 4, generator=generator)
    model.backbone.fit(x, y)
    with torch.no_grad():
        for p in model.method.parameters():  # type: ignore[attr-defined]
            p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return PairScorer(model, device="cpu").score_all(x, y)


def matrices(scores: PairScores, direction: Direction) -> tuple[Tensor, Tensor]:
    """Scores and cosines, queries in rows."""
    score, cosine = scores.score, scores.images.mean @ scores.texts.mean.T
    return (score, cosine) if direction == "i2t" else (score.T, cosine.T)


def order(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda j: (-float(row[j]), j))


def by_hand(scores: PairScores, k: int, m: int, direction: Direction) -> list[list[int]]:
    found = []
    for row, cosine in zip(*matrices(scores, direction), strict=True):
        candidates = set(order(cosine)[:m])
        found.append([j for j in order(row) if j in candidates][:k])
    return found


@every_method
@both_ways
@pytest.mark.parametrize("m", [5, 20, 59])
def test_two_stages_are_a_ranking_of_the_highest_cosines(
    raw: dict[str, Any], direction: Direction, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "_QUERIES", 17)
    scores = scores_of(raw)
    got = scores.topk(5, direction=direction, prefilter=m)
    assert "score" not in vars(scores)
    assert got.index.tolist() == by_hand(scores, 5, m, direction)
    torch.testing.assert_close(got.score, matrices(scores, direction)[0].gather(1, got.index), atol=1e-5, rtol=1e-5)


@both_ways
def test_as_many_candidates_as_items_are_exact(direction: Direction) -> None:
    scores = scores_of(METHODS[0])
    exact = scores.topk(5, direction=direction)
    for m in (TEXTS, 10_000):
        assert torch.equal(scores.topk(5, direction=direction, prefilter=m).index, exact.index)


@both_ways
def test_equal_scores_go_by_index(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(METHODS[0])
    monkeypatch.setattr(scores.scorer.blocks, "block", lambda v, t: torch.zeros(len(v.mean), len(t.mean)))
    expected = [sorted(order(row)[:7])[:3] for row in matrices(scores, direction)[1]]
    assert scores.topk(3, direction=direction, prefilter=7).index.tolist() == expected


@both_ways
def test_recall_is_counted(direction: Direction) -> None:
    scores = scores_of(METHODS[0])
    ms = [3, 5, 20, 60, 90]
    got = recall_of_prefilter(scores, 3, ms, direction=direction)
    found = []
    for row, cosine in zip(*matrices(scores, direction), strict=True):
        found.append([len(set(order(row)[:3]) & set(order(cosine)[:m])) for m in ms])
    count = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(got.recall, count.mean(dim=0) / 3)
    torch.testing.assert_close(got.complete, (count == 3).double().mean(dim=0))
    assert 0 < got.recall[0] < got.recall[2] < 1
    assert got.candidates.tolist() == ms


@both_ways
def test_the_choice_is_the_smallest_that_passes(direction: Direction) -> None:
    """Every number of candidates tried in turn, with scipy's bound, on all queries."""
    scores = scores_of(METHODS[0])
    queries, items = matrices(scores, direction)[0].shape
    k, recall = 4, 0.8
    got = choose_prefilter(scores, k, recall=recall, sample=1000, direction=direction)
    curve = recall_of_prefilter(scores, k, range(k, items + 1), direction=direction)
    level = 0.05 / math.e
    for m, share in zip(curve.candidates.tolist(), curve.recall.tolist(), strict=True):
        missed = math.ceil(round((1 - share) * queries, 6))
        bound = 1 - stats.beta.ppf(1 - level, missed + 1, queries - missed) if missed < queries else 0.0
        if bound >= recall:
            assert got.candidates == m
            assert got.recall == pytest.approx(share)
            assert got.at_least == pytest.approx(bound)
            break
    else:
        pytest.fail("nothing passes")
    assert got.queries == queries
    assert recall <= got.at_least < got.recall


def test_a_sample_is_drawn_by_its_seed() -> None:
    scores = scores_of(METHODS[0], images=400)
    found = [choose_prefilter(scores, 1, recall=0.8, sample=100, seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) > 1
    assert {choice.queries for choice in found} == {100}


def test_the_choice_holds_as_often_as_it_says() -> None:
    """Over many samples, the chosen number has the wanted recall on all queries in 95% of cases or more."""
    scores = scores_of(METHODS[0], images=600)
    ranks = prefilter_ranks(scores, 2)
    good = 0
    for seed in range(60):
        choice = choose_prefilter(scores, 2, recall=0.9, confidence=0.9, sample=80, seed=seed)
        good += bool((ranks < choice.candidates).double().mean() >= 0.9)
    assert good >= 54


def test_too_few_queries_are_refused() -> None:
    scores = scores_of(METHODS[0])
    with pytest.raises(UsageError, match=r"60 queries cannot show a recall of 0\.99, .*; 398 can — pass sample=398"):
        choose_prefilter(scores, 10)
    with pytest.raises(UsageError, match="; 299 can"):
        choose_prefilter(scores, 1)


@pytest.mark.parametrize("given_", [{"recall": 1.0}, {"recall": 0.0}, {"confidence": 1.0}])
def test_a_certain_recall_cannot_be_asked_for(given_: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="both lie between 0 and 1"):
        choose_prefilter(scores_of(METHODS[0]), 1, **given_)  # type: ignore[arg-type]


def test_fewer_candidates_than_asked_for() -> None:
    with pytest.raises(UsageError, match="prefilter is 4, k is 5: too few to choose from — use prefilter=50"):
        scores_of(METHODS[0]).topk(5, prefilter=4)


def test_more_asked_for_than_there_is() -> None:
    scores = scores_of(METHODS[0])
    with pytest.raises(UsageError, match=r"prefilter is 50, .* — leave it out: all 90 are scored then"):
        scores.topk(10**6, prefilter=50)
    with pytest.raises(UsageError, match=r"prefilter is 50, .* — leave it out: all 60 are scored then"):
        scores.topk(10**6, prefilter=50, direction="t2i")
    assert scores.topk(10**6, prefilter=90).index.shape == (IMAGES, TEXTS)


@both_ways
@pytest.mark.parametrize(("images", "texts"), [(0, TEXTS), (IMAGES, 0), (0, 0)])
def test_there_is_no_recall_of_nothing(direction: Direction, images: int, texts: int) -> None:
    full = scores_of(METHODS[0])
    some = [side._replace(mean=side.mean[:n]) for side, n in ((full.images, images), (full.texts, texts))]
    scores = PairScores(full.scorer, *some)
    for call in (
        lambda: choose_prefilter(scores, 1, recall=0.5, direction=direction),
        lambda: recall_of_prefilter(scores, 1, [5], direction=direction),
    ):
        with pytest.raises(UsageError, match=f"here are {images} images and {texts} texts — score some of both"):
            call()


@pytest.mark.parametrize("sample", [0, -1, 7.5])
def test_a_sample_is_a_whole_number(sample: float) -> None:
    with pytest.raises(UsageError, match=f"sample is {sample}, expected a whole number from 1 on — use sample=1000"):
        choose_prefilter(scores_of(METHODS[0]), 1, recall=0.5, sample=sample)  # type: ignore[arg-type]


def test_no_queries() -> None:
    scores = scores_of(METHODS[0])
    none = PairScores(scores.scorer, scores.images._replace(mean=scores.images.mean[:0]), scores.texts)
    assert none.topk(3, prefilter=7).index.shape == (0, 3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 2000), st.floats(1e-6, 0.5))
def test_the_bound_is_clopper_and_pearsons(missed: int, trials: int, level: float) -> None:
    missed = min(missed, trials)
    expected = 1.0 if missed == trials else float(stats.beta.ppf(1 - level, missed + 1, trials - missed))
    assert miss_rate_bound(missed, trials, level=level) == pytest.approx(expected, rel=1e-7)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 50), st.integers(50, 3000), st.floats(1e-6, 1 - 1e-6))
def test_the_tail_is_binomial(count: int, trials: int, rate: float) -> None:
    assert binomial_tail(count, trials, rate) == pytest.approx(float(stats.binom.cdf(count, trials, rate)), abs=1e-9)


def test_shares_need_a_stricter_level_than_hits() -> None:
    assert mean_level(0.05, parts=1) == 0.05
    assert mean_level(0.05, parts=10) == pytest.approx(0.05 / math.e)
