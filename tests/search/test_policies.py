"""Policies on lists made by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from vacsr.errors import UsageError
from vacsr.search.policies import NO_ANSWER, RETIRED, Abstain, Scored, choose_policy, offered
from vacsr.search.probabilities import AnswerRule, Logistic


def scored(confidence: float | None = None) -> Scored:
    score = np.array([3.0, 2.9, 1.0, 0.0])
    return Scored(list("abcd"), [{}] * 4, score / 10, score, score / 4, None, confidence)


def rule(threshold: float | None) -> AnswerRule:
    return AnswerRule(
        measure="score", signals=("score",), logistic=Logistic(mean=(0.0,), scale=(1.0,), weight=(1.0,), bias=0.0),
        spread=1.0, cosine_spread=1.0, threshold=threshold, risk=0.1, confidence=0.9, level=0.04,
        certified=100, images=100, answered=50, wrong=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("threshold", "confidence", "answered", "why"),
    [
        (0.5, 0.5, True, ""),
        (0.5 + 1e-12, 0.5, False, "the risk bound needs"),
        (0.6, 0.5, False, "50%, the risk bound needs 60%"),
        (None, 0.99, False, "no threshold met a risk of 10%"),
        (0.5, None, False, "no second candidate"),
        (0.5, float("nan"), False, "nan%, the risk bound needs 50%"),
    ],
)
def test_abstain(threshold: float | None, confidence: float | None, answered: bool, why: str) -> None:
    ranked = Abstain(rule(threshold)).apply(scored(confidence))
    assert ranked.answered is answered
    assert why in ranked.reason
    assert ranked.reason.startswith(NO_ANSWER) is not answered
    assert list(ranked.order) == [0, 1, 2, 3]


def test_policies_by_name() -> None:
    assert offered(None) == ["score"]
    assert list(choose_policy("score", None).apply(scored()).order) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="use one of score, abstain"):
        choose_policy("best", None)
    with pytest.raises(UsageError, match="vacsr calibrate"):
        choose_policy("abstain", None)
    for retired in RETIRED:
        with pytest.raises(UsageError, match=r"was removed.* — use one of score, abstain"):
            choose_policy(retired, None)


def test_the_names_are_read_without_torch() -> None:
    script = "import sys, vacsr.search.policies; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
