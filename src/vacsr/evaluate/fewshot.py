"""How well classes are recognised: accuracy, its harmonic mean over base and new, calibration, selective accuracy.

Everything is computed from one row of logits per photo. Shares come out in percent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate.report import markdown_table
from vacsr.evaluate.uncertainty import Values, as_vector, check_length, risk_at, selective_risk

Metrics = dict[str, Any]  # by split, as in a report, and by name where several splits make one
BINS = 15
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Answers(NamedTuple):
    """What a method says of N photos. All [N] and on the CPU."""

    predicted: Tensor  # int64, the class with the largest logit, the first of equal ones
    correct: Tensor  # bool
    confidence: Tensor  # float64, the predicted class's softmax at the method's own scale
    grade: Tensor | None = None  # float64, the predicted class's sigmoid, for methods whose logits are grades
    uncertainty: Tensor | None = None  # float64, of the pair of photo and predicted class, for methods that have one


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
    best = exact.max(dim=1).values
    first = (exact == best.unsqueeze(1)).to(torch.uint8).argmax(dim=1)  # argmax itself may take any of equals
    column = first.unsqueeze(1)
    sigma = None if uncertainty is None else uncertainty.detach().double().gather(1, column).squeeze(1).cpu()
    return Answers(
        predicted=first.cpu(),
        correct=(first == labels.to(first.device)).cpu(),
        confidence=exact.softmax(dim=1).gather(1, column).squeeze(1).cpu(),
        grade=best.sigmoid().cpu() if graded else None,
        uncertainty=sigma,
    )


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Batches of one test set as one."""
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return Answers(*columns)  # type: ignore[arg-type]


def harmonic_mean(base: float, new: float) -> float:
    """HM = 2·base·new / (base + new), 0 where both are."""
    return 2.0 * base * new / (base + new) if base + new > 0 else 0.0


def joint_metrics(splits: Mapping[str, Mapping[str, Any]]) -> Metrics:
    """Metrics over the splits of one report: ``hm`` of base and new, ``mean_target`` of all but the source.

    Accuracies are numbers, or arrays with one number per bootstrap draw.

    >>> joint_metrics({"base": {"accuracy": 80.0}, "new": {"accuracy": 60.0}})
    {'hm': 68.57142857142857}
    >>> joint_metrics({"source": {"accuracy": 70.0}, "sketch": {"accuracy": 50.0}, "blur": {"accuracy": 30.0}})
    {'mean_target': 40.0}
    """
    accuracy = {split: result["accuracy"] for split, result in splits.items()}
    joint: Metrics = {}
    if {"base", "new"} <= accuracy.keys():
        hm = np.vectorize(harmonic_mean, otypes=[float])(accuracy["base"], accuracy["new"])
        joint["hm"] = hm if hm.ndim else float(hm)
    targets = [value for split, value in accuracy.items() if split != "source"]
    if "source" in accuracy and targets:
        joint["mean_target"] = _mean(targets)
    return joint


def averaged_metrics(reports: Sequence[Mapping[str, Any]]) -> Metrics:
    """Over data sets: the mean of each split's metrics, the joint metrics of these means, and the mean HM.

    ``hm`` is that of the averages, ``mean_hm`` the mean of the HMs: papers have printed either as the average.
    """
    shared = [
        name
        for name, result in reports[0].items()
        if isinstance(result, Mapping) and "accuracy" in result and all(name in r for r in reports)
    ]
    averages: Metrics = {}
    for split in shared:
        known = [name for name in ("accuracy", "ece") if all(name in report[split] for report in reports)]
        averages[split] = {name: _mean([report[split][name] for report in reports]) for name in known}
    averages |= joint_metrics(averages)
    if all("hm" in report for report in reports):
        averages["mean_hm"] = _mean([report["hm"] for report in reports])
    return averages


def _mean(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def calibration_error(confidence: Values, correct: Values, *, bins: int = BINS) -> float:
    """Expected calibration error, a share: |accuracy − mean confidence| of equal-width bins, weighted by their counts.

    Bin k of n holds (k/n, (k+1)/n], the first one 0 too. confidence [N] in 0 to 1, correct [N] 0/1

    >>> round(calibration_error([0.9, 0.9, 0.6], [1, 0, 1]), 6)
    0.4
    """
    sure, hit = as_vector("confidence", confidence), as_vector("correct", correct)
    check_length(sure, hit)
    index = np.digitize(sure, np.arange(1, bins) / bins, right=True)
    gap = np.bincount(index, hit, bins) - np.bincount(index, sure, bins)
    return float(np.abs(gap).sum() / len(sure))


def selective(uncertainty: Values, correct: Values, *, coverages: Sequence[float] = COVERAGES) -> dict[str, Any]:
    """Accuracy of the surest share of the photos, at each coverage, and the area under risk and coverage; in percent.

    Photos of equal uncertainty count with their mean. uncertainty [N], correct [N] 0/1

    >>> selective([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 1], coverages=(0.5, 1.0))
    {'coverage': [50.0, 100.0], 'accuracy': [100.0, 75.0], 'aurc': 14.583333333333332}
    """
    risk = selective_risk(uncertainty, 1.0 - as_vector("correct", correct))
    return {
        "coverage": [100.0 * share for share in coverages],
        "accuracy": (100.0 * (1.0 - risk_at(risk, coverages))).tolist(),
        "aurc": 100.0 * float(risk.mean()),
    }


def fewshot_result(
    split: str, answers: Answers, *, classes: int, bins: int = BINS, coverages: Sequence[float] = COVERAGES
) -> dict[str, Any]:
    """One entry of report.json: accuracy, expected calibration error and selective accuracy of one test set.

    ``selective`` has a curve by ``confidence`` for every method, and one by ``uncertainty`` for those that have it;
    ``ece_grade`` is that of the sigmoid, where logits are grades.
    """
    result: dict[str, Any] = {
        "split": split,
        "accuracy": 100.0 * float(answers.correct.double().mean()),
        "samples": len(answers.correct),
        "classes": classes,
        "ece": 100.0 * calibration_error(answers.confidence, answers.correct, bins=bins),
    }
    if answers.grade is not None:
        result["ece_grade"] = 100.0 * calibration_error(answers.grade, answers.correct, bins=bins)
    result["selective"] = {"confidence": selective(-answers.confidence, answers.correct, coverages=coverages)}
    if answers.uncertainty is not None:
        result["selective"]["uncertainty"] = selective(answers.uncertainty, answers.correct, coverages=coverages)
    return result


def fewshot_table(report: Mapping[str, Any]) -> str:
    """A report as a Markdown table: a row for each test set, and the harmonic mean where there is one.

    >>> rows = [{"split": "base", "accuracy": 80.0, "ece": 2.0, "samples": 50, "classes": 12}]
    >>> print(fewshot_table({"results": rows, "hm": 70.0}))
    | split | classes | photos | accuracy | ECE |
    | --- | ---: | ---: | ---: | ---: |
    | base | 12 | 50 | 80.00 | 2.00 |
    | HM |  |  | 70.00 |  |
    """
    rows = [
        [row["split"], f"{row['classes']:,}", f"{row['samples']:,}", f"{row['accuracy']:.2f}", f"{row['ece']:.2f}"]
        for row in report["results"]
    ]
    if "hm" in report:
        rows.append(["HM", "", "", f"{report['hm']:.2f}", ""])
    return markdown_table(["split", "classes", "photos", "accuracy", "ECE"], rows, align="---:")
