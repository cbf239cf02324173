"""How well classes are recognised: accuracy, its harmonic mean over base and new, calibration, selective accuracy.

Everything is computed from one row of logits per photo. Shares come out in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.uncertainty import Values, as_vector, aurc, check_length, risk_coverage

BINS = 15
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Answers(NamedTuple):
    """What a method says of N photos. All [N] and on the CPU."""

    predicted: Tensor
    """int64, the class with the largest logit, the first of equal ones."""
    correct: Tensor
    """bool"""
    confidence: Tensor
    """float64, the predicted class's softmax at the method's own scale."""
    grade: Tensor | None = None
    """float64, the predicted class's sigmoid, for methods whose logits are grades."""
    uncertainty: Tensor | None = None
    """float64, of the pair of photo and predicted class, for methods that have one."""


def answers(logits: Tensor, labels: Tensor, *, uncertainty: Tensor | None = None, graded: bool = False) -> Answers:
    """Of some photos. logits [B, C], labels [B], uncertainty [B, C]

    >>> got = answers(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    >>> got.predicted.tolist(), got.correct.tolist(), got.confidence.round(decimals=3).tolist()
    ([0, 0], [True, False], [0.881, 0.5])
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        shapes = f"{list(logits.shape)} and {list(labels.shape)}"
        raise ShapeMismatch(f"logits and labels are {shapes}, expected [B, C] and [B] — give one label per row")
    if not bool(logits.isfinite().all()):
        raise DataError("some logits are not finite — train with a lower train.lr, or in fp32")
    exact = logits.detach().double()
    best = exact.max(dim=1)
    first = (exact == best.values.unsqueeze(1)).to(torch.uint8).argmax(dim=1)  # argmax itself may take any of equals
    own = first.unsqueeze(1)
    sigma = None if uncertainty is None else uncertainty.detach().double().gather(1, own).squeeze(1).cpu()
    return Answers(
        predicted=first.cpu(),
        correct=(first == labels.to(first.device)).cpu(),
        confidence=exact.softmax(dim=1).gather(1, own).squeeze(1).cpu(),
        grade=best.values.sigmoid().cpu() if graded else None,
        uncertainty=sigma,
    )


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Batches of one test set as one."""

    def joined(name: str) -> Tensor | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else torch.cat(columns)

    return Answers(
        predicted=torch.cat([part.predicted for part in parts]),
        correct=torch.cat([part.correct for part in parts]),
        confidence=torch.cat([part.confidence for part in parts]),
        grade=joined("grade"),
        uncertainty=joined("uncertainty"),
    )


def harmonic_mean(base: float, new: float) -> float:
    """HM = 2·base·new / (base + new), 0 where both are.

    >>> harmonic_mean(80.0, 60.0), harmonic_mean(0.0, 0.0)
    (68.57142857142857, 0.0)
    """
    return 2.0 * base * new / (base + new) if base + new > 0 else 0.0


class BaseNewScore(NamedTuple):
    """Accuracies of one data set, in percent."""

    base: float
    new: float


def hm_of_averages(scores: Sequence[BaseNewScore]) -> float:
    """The usual average row: HM of the mean base and the mean new accuracy over data sets.

    >>> scores = [BaseNewScore(80, 60), BaseNewScore(100, 50)]
    >>> round(hm_of_averages(scores), 2), round(mean_of_hms(scores), 2)
    (68.28, 67.62)
    """
    _some(scores)
    base, new = (sum(column) / len(scores) for column in zip(*scores, strict=True))
    return harmonic_mean(base, new)


def mean_of_hms(scores: Sequence[BaseNewScore]) -> float:
    """The other rule: the mean over data sets of each one's HM. It is what the VACSR paper prints for its own row."""
    _some(scores)
    return sum(harmonic_mean(score.base, score.new) for score in scores) / len(scores)


def _some(scores: Sequence[BaseNewScore]) -> None:
    if not scores:
        raise UsageError("an average over no data sets — give at least one")


def calibration_error(confidence: Values, correct: Values, *, bins: int = BINS) -> float:
    """Expected calibration error, a share: |accuracy − mean confidence| of equal-width bins, weighted by their counts.

    Bin k of n holds (k/n, (k+1)/n], the first one 0 too. confidence [N] in 0 to 1, correct [N] 0/1

    >>> round(calibration_error([0.9, 0.9, 0.6], [1, 0, 1]), 6)
    0.4
    """
    sure, hit = as_vector("confidence", confidence), as_vector("correct", correct)
    check_length(sure, hit)
    if not len(sure):
        raise DataError("no answers to calibrate — give at least one")
    if sure.min() < 0 or sure.max() > 1:
        raise DataError(f"confidences span {sure.min():.3g} to {sure.max():.3g}, expected 0 to 1 — give probabilities")
    edges = np.arange(1, bins) / bins
    place = np.digitize(sure, edges, right=True)
    gap = np.bincount(place, hit, bins) - np.bincount(place, sure, bins)
    return float(np.abs(gap).sum() / len(sure))


def selective(uncertainty: Values, correct: Values, *, coverages: Sequence[float] = COVERAGES) -> dict[str, Any]:
    """Accuracy of the surest share of the photos, at each coverage, and the area under risk and coverage; in percent.

    Photos of equal uncertainty count with their mean. uncertainty [N], correct [N] 0/1

    >>> selective([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 1], coverages=(0.5, 1.0))
    {'coverage': [50.0, 100.0], 'accuracy': [100.0, 75.0], 'aurc': 14.583333333333332}
    """
    loss = 1.0 - as_vector("correct", correct)
    risk = risk_coverage(uncertainty, loss).risk
    last = [max(int(np.ceil(share * len(risk) - 1e-9)), 1) - 1 for share in coverages]
    return {
        "coverage": [100.0 * share for share in coverages],
        "accuracy": [100.0 * (1.0 - float(risk[place])) for place in last],
        "aurc": 100.0 * aurc(uncertainty, loss),
    }


def fewshot_result(
    split: str, found: Answers, *, classes: int, bins: int = BINS, coverages: Sequence[float] = COVERAGES
) -> dict[str, Any]:
    """One entry of report.json: accuracy, expected calibration error and selective accuracy of one test set.

    ``selective`` has a curve by ``confidence`` for every method, and one by ``uncertainty`` for those that have it;
    ``ece_grade`` is that of the sigmoid, where logits are grades.
    """
    result: dict[str, Any] = {
        "split": split,
        "accuracy": 100.0 * float(found.correct.double().mean()),
        "samples": len(found.correct),
        "classes": classes,
        "ece": 100.0 * calibration_error(found.confidence, found.correct, bins=bins),
    }
    if found.grade is not None:
        result["ece_grade"] = 100.0 * calibration_error(found.grade, found.correct, bins=bins)
    result["selective"] = {"confidence": selective(-found.confidence, found.correct, coverages=coverages)}
    if found.uncertainty is not None:
        result["selective"]["uncertainty"] = selective(found.uncertainty, found.correct, coverages=coverages)
    return result


def fewshot_table(report: Mapping[str, Any]) -> str:
    """A report as a Markdown table: a row for each test set, and the harmonic mean where there is one.

    >>> rows = [{"split": "base", "accuracy": 80.0, "ece": 2.0, "samples": 50, "classes": 12}]
    >>> print(fewshot_table({"results": rows, "hm": 70.0}))
    | split | classes | photos | accuracy | ECE |
    |---|---:|---:|---:|---:|
    | base | 12 | 50 | 80.00 | 2.00 |
    | HM | | | 70.00 | |
    """
    lines = ["| split | classes | photos | accuracy | ECE |", "|---|---:|---:|---:|---:|"]
    for row in report["results"]:
        counts = f"{row['classes']:,} | {row['samples']:,}"
        lines.append(f"| {row['split']} | {counts} | {row['accuracy']:.2f} | {row['ece']:.2f} |")
    if "hm" in report:
        lines.append(f"| HM | | | {report['hm']:.2f} | |")
    return "\n".join(lines)
