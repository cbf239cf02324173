"""The demo's figures, from its findings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from vacsr.demo.findings import DIRECTIONS, Direction, Findings, TopAnswers
from vacsr.demo.text import KIND_NAMES
from vacsr.evaluate.uncertainty import binned_correlation, risk_coverage
from vacsr.report.figures import Array, Group, distributions
from vacsr.report.html import Html
from vacsr.report.lines import Line, Marks, lines

BINS = 10
_STEPS = 60  # points of a risk–coverage curve
_FIRST = 0.05  # coverage at which the curve begins: before, it rests on a handful of queries


def sigma_by_kind(found: Findings) -> Html:
    """Distributions of σ, one for each kind of pair."""
    sigma = {kind: values.uncertainty for kind, values in found.kinds.items()}
    return _by_kind(found, sigma, label="uncertainty σ", title="Uncertainty by kind of pair")


def score_by_kind(name: str, found: Findings) -> Html:
    """Distributions of a method's score, one for each kind of pair."""
    score: dict[str, Tensor | None] = {kind: values.score for kind, values in found.kinds.items()}
    label = "score (logit)" if found.kinds["positives"].uncertainty is not None else "score (cosine)"
    return _by_kind(found, score, label=label, title=f"Score of {name} by kind of pair")


def _by_kind(found: Findings, values: Mapping[str, Tensor | None], *, label: str, title: str) -> Html:
    groups = []
    for kind, name in KIND_NAMES.items():
        drawn = values[kind]
        array = np.empty(0) if drawn is None else _array(drawn)
        groups.append(Group(name, array, kind, found.kinds[kind].total))
    return distributions(groups, label=label, title=title)


def accuracy_by_sigma(top: TopAnswers, *, direction: Direction) -> Html:
    """How often the best answer is right in ten bins of its σ, by the labels and by the truth."""
    assert top.uncertainty is not None, "drawn for methods with an uncertainty"
    drawn = []
    for name, right, style in (
        ("wholly true", top.true, "vacsr"),
        ("the official match (R@1)", top.labelled, "infonce dashed"),
    ):
        bins = binned_correlation(top.uncertainty, right, bins=min(BINS, max(2, len(right))))
        place = np.arange(1, len(bins.bin_score) + 1, dtype=np.float64)
        drawn.append(Line(name, place, 100 * bins.bin_score, style, dots=True))
    return lines(
        drawn,
        x_label="ten equal groups of queries, from low σ to high σ",
        y_label="best answer is …, percent of the queries",
        title=f"Accuracy of the best answer by its uncertainty, {DIRECTIONS[direction]}",
        marks=Marks(drawn[0].x.tolist()),
    )


def risk_by_coverage(findings: Mapping[str, Findings], *, direction: Direction) -> Html:
    """Mistakes among the answers kept, when only the surest are kept: by score for all, and by σ where there is one."""
    drawn = []
    for name, found in findings.items():
        top = found.top[direction]
        drawn.append(_risk(f"{name}, surest by score", -top.score, top.true, style=name))
        if top.uncertainty is not None:
            drawn.append(_risk(f"{name}, surest by σ", top.uncertainty, top.true, style=f"{name} dashed"))
    return lines(
        drawn,
        x_label="share of the queries kept, surest first (percent)",
        y_label="best answer is not wholly true, percent of those kept",
        title=f"Mistakes among the surest answers, {DIRECTIONS[direction]}",
    )


def _risk(name: str, doubt: Tensor, right: Tensor, *, style: str) -> Line:
    curve = risk_coverage(doubt, 1.0 - right)
    wanted = np.linspace(_FIRST, 1.0, _STEPS)
    return Line(name, 100 * wanted, 100 * np.interp(wanted, curve.coverage, curve.risk), style)


def _array(values: Tensor) -> Array:
    array: Array = values.double().numpy()
    return array
