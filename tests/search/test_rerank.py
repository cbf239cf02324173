"""Policies on lists made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vacsr.errors import UsageError
from vacsr.search.lcb import LcbRule
from vacsr.search.logistic import Logistic
from vacsr.search.missed import MissedRule
from vacsr.search.rerank import NO_ANSWER, Abstain, ByScore, LowerBound, Missed, Scored, choose_policy
from vacsr.search.risk import AnswerRule


def scored(sigma: list[float] | None, *, confidence: float | None = 0.5) -> Scored:
    score = np.array([3.0, 2.9, 1.0, 0.0])
    return Scored(
        ids=list("abcd"), metadata=[{}] * 4, cosine=score / 10, score=score, grade=score / 4,
        sigma=None if sigma is None else np.array(sigma), confidence=confidence,
    )  # fmt: skip


def rule(threshold: float | None) -> AnswerRule:
    return AnswerRule(
        measure="score", signals=("score",), logistic=Logistic(mean=(0.0,), scale=(1.0,), weight=(1.0,), bias=0.0),
        spread=1.0, cosine_spread=1.0, threshold=threshold, risk=0.1, confidence=0.9, level=0.04,
        certified=100, images=100, answered=50, wrong=2,
    )  # fmt: skip


def lcb(weight: float, depth: int = 3) -> LowerBound:
    return LowerBound(LcbRule(weight=weight, depth=depth, r1=0.5, r1_fitted=0.5))


def test_score_keeps_the_order() -> None:
    assert ByScore().apply(scored([1.0, 2.0])).order.tolist() == [0, 1, 2, 3]
    assert ByScore().apply(scored(None)).order.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("weight", "order"), [(0.0, [0, 1, 2, 3]), (1.0, [1, 0, 2, 3]), (-3.0, [2, 0, 1, 3]), (100.0, [1, 0, 2, 3])]
)
def test_lcb_is_score_less_lambda_sigma_among_the_first(weight: float, order: list[int]) -> None:
    assert lcb(weight).apply(scored([0.3, 0.1, 1.0])).order.tolist() == order


def test_lcb_moves_nothing_beyond_its_depth_nor_without_sigma() -> None:
    assert lcb(5.0, depth=1).apply(scored([9.0, 0.0, 0.0])).order.tolist() == [0, 1, 2, 3]
    assert lcb(5.0).apply(scored(None)).order.tolist() == [0, 1, 2, 3]


def test_equal_values_keep_their_order() -> None:
    assert lcb(0.1).apply(scored([1.0, 0.0, 0.0])).order.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("threshold", "confidence", "answered", "why"),
    [
        (0.5, 0.5, True, ""),
        (0.6, 0.5, False, "50%, 60% is asked for"),
        (None, 0.99, False, "no threshold kept a risk of 10%"),
        (0.5, None, False, "nothing to compare"),
        (0.5, float("nan"), False, "nan%, 50% is asked for"),
    ],
)
def test_abstain_answers_or_says_why_not(
    threshold: float | None, confidence: float | None, answered: bool, why: str
) -> None:
    found = Abstain(rule(threshold)).apply(scored(None, confidence=confidence))
    assert found.answered is answered
    assert why in found.reason
    assert found.reason.startswith(NO_ANSWER) is not answered
    assert found.order.tolist() == [0, 1, 2, 3]


def test_missed_prefers_the_uncertain_among_equals() -> None:
    chosen = MissedRule(score_mean=0.0, score_scale=1.0, sigma_mean=0.0, sigma_scale=1.0, sigma_weight=0.1, floor=2.0)
    assert Missed(chosen, depth=4).apply(scored([0.0, 2.0, 2.0, 2.0])).order.tolist() == [1, 0, 2, 3]
    assert Missed(chosen, depth=4).apply(scored(None)).order.tolist() == [0, 1, 2, 3]


def test_policies_by_name_need_what_they_rest_on() -> None:
    assert choose_policy("score", None).name == "score"
    with pytest.raises(UsageError, match="score, lcb, abstain, missed"):
        choose_policy("best", None)
    for name in ("lcb", "abstain", "missed"):
        with pytest.raises(UsageError, match="vacsr calibrate"):
            choose_policy(name, None)
