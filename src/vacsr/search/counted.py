"""What a rule of answering is worth on queries that it has not seen."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vacsr.search.candidates import Candidates
from vacsr.search.risk import AnswerRule

_NORMAL = NormalDist().inv_cdf(0.975)  # for an interval of 95%


class Interval(NamedTuple):
    """Where a share lies, with 95% confidence."""

    low: float
    high: float


class RiskCheck(NamedTuple):
    """Counts on other queries."""

    queries: int
    answered: int
    wrong: int
    images: int
    """Whose queries they are."""
    interval: Interval = Interval(0.0, 1.0)
    """Of the true risk; approximate."""

    @property
    def coverage(self) -> float:
        """Share that is answered."""
        return self.answered / self.queries

    @property
    def risk(self) -> float:
        """Share of the answers that is wrong; NaN without answers."""
        return self.wrong / self.answered if self.answered else float("nan")

    def held(self, risk: float) -> bool:
        """Is the promise kept, as counted? Who says nothing says nothing wrong."""
        return self.wrong <= risk * self.answered


def check_rule(rule: AnswerRule, found: Candidates) -> RiskCheck:
    """Count what the rule answers, and wrongly."""
    names, image = np.unique(found.image, return_inverse=True)
    if rule.threshold is None:
        return RiskCheck(len(found.score), 0, 0, len(names))
    given, wrong = rule.of(found) >= rule.threshold, ~found.right[:, 0]
    answers, failures = (np.bincount(image, part).astype(np.int64) for part in (given, given & wrong))
    interval = share_interval(failures, answers)
    return RiskCheck(len(given), int(answers.sum()), int(failures.sum()), len(names), interval)


def verdict(found: RiskCheck, rule: AnswerRule) -> str:
    """Was the promise kept? One plain sentence with the figures."""
    promised = f"promised at most {100 * rule.risk:g}% wrong, confidence {100 * rule.confidence:g}%"
    if not found.answered:
        return f"{promised}; nothing was answered, so nothing was wrong."
    low, high = found.interval
    counted = f"{found.risk:.1%} wrong (95% interval {low:.1%} to {high:.1%}), {found.coverage:.1%} answered"
    if found.images < rule.images:  # a count over fewer has more noise than the confidence allows for
        counted += f", over fewer images ({found.images:,}) than certified it ({rule.images:,})"
    if found.held(rule.risk):
        return f"{promised}; held: {counted}."
    blame = "more than chance explains" if low > rule.risk else "which chance may explain"
    return f"{promised}; did NOT hold, {blame}: {counted}."


def share_interval(failures: NDArray[np.int64], answers: NDArray[np.int64]) -> Interval:
    """Wilson's interval of Σ failures / Σ answers, for as many trials as the images are worth. [I], [I]

    Answers about one image fail together. The variance of the ratio over images says how many independent answers
    would be as sure; where none or all failed it says nothing, and each image that is answered counts for one.

    >>> share_interval(np.array([1, 0, 0, 0]), np.array([1, 1, 1, 1])) == share_interval(
    ...     np.array([5, 0, 0, 0]), np.array([5, 5, 5, 5])
    ... )
    True
    """
    total = int(answers.sum())
    if not total:
        return Interval(0.0, 1.0)
    share = float(failures.sum() / total)
    variance = float(((failures - share * answers) ** 2).sum()) / total**2
    trials = min(total, share * (1 - share) / variance) if variance else int((answers > 0).sum())
    pull = _NORMAL**2 / trials
    middle, reach = share + pull / 2, _NORMAL * sqrt(share * (1 - share) / trials + pull / trials / 4)
    return Interval(max(0.0, (middle - reach) / (1 + pull)), min(1.0, (middle + reach) / (1 + pull)))
