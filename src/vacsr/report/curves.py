"""The figures of a comparison that come from reports: what σ is worth, how scores lie, how training went."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vacsr.report.figures import Array, Counts, histograms
from vacsr.report.html import Html
from vacsr.report.lines import Line, Marks, fitted, lines
from vacsr.report.records import Curve, RunRecord, entry, mean_curve, runs_of

Direction = Literal["i2t", "t2i"]
DIRECTIONS: dict[Direction, str] = {"i2t": "image to text", "t2i": "text to image"}
"""As a person would say it."""
Kind = Literal["grade", "score"]
KINDS: tuple[Kind, ...] = ("grade", "score")
"""Of numbers whose distribution is stored."""
_SMOOTH = 40  # points of a loss curve


class Drawn(NamedTuple):
    """Whose curves are drawn: some rows of one setting, each in its colour."""

    runs: Sequence[RunRecord]
    setting: str
    styles: Mapping[str, str]
    """Classes of page.css by row; only these rows are drawn."""
    split: str

    def seeds(self, row: str) -> list[RunRecord]:
        """The runs of a row in this setting."""
        return runs_of(self.runs, row=row, setting=self.setting)

    def without_sigma(self, row: str) -> bool:
        """Whether every report of a row, in any setting, says that its method has no σ."""
        found = [run.report.get(self.split) or {} for run in self.runs if run.row == row]
        return bool(found) and all("uncertainty" in report and report["uncertainty"] is None for report in found)

    def curves(self, *keys: str) -> Iterator[tuple[str, Curve]]:
        """A list of the reports, averaged over seeds, by row."""
        for row in self.styles:
            found = mean_curve([entry(run, self.split, *keys) for run in self.seeds(row)])
            if found is not None:
                yield row, found

    def figure(self, row: str, *keys: str) -> float:
        """A figure of the reports, averaged over seeds; NaN where there is none."""
        found = mean_curve([[entry(run, self.split, *keys)] for run in self.seeds(row)])
        return float("nan") if found is None else float(found.mean[0])

    def line(self, row: str, x: Array, curve: Curve, *, scale: float = 1.0, extra: str = "") -> Line:
        """A curve in the row's colour, with a band where there are several seeds."""
        spread = scale * curve.std if curve.seeds > 1 else None
        name = f"{row}{', ' + extra if extra else ''}"
        style = f"{self.styles[row]}{' dashed' if extra == 'raw' else ''}"
        return Line(name, x, scale * curve.mean, style, dots=len(x) <= 12, spread=spread)


class Made(NamedTuple):
    """A figure, and whose curves are in it."""

    picture: Html
    rows: Collection[str]


def accuracy_by_sigma(drawn: Drawn, direction: Direction) -> Made | None:
    """R@1 in equal groups of queries, from low σ of the best answer to high; None where no row has a σ."""
    curves = dict(drawn.curves("uncertainty", f"bins_{direction}", "r1"))
    found = [
        drawn.line(
            row,
            np.arange(1.0, len(curve.mean) + 1),
            curve,
            scale=100.0,
            extra=f"r = {drawn.figure(row, 'uncertainty', f'corr_r1_{direction}'):z.2f}",
        )
        for row, curve in curves.items()
    ]
    if not found:
        return None
    picture = lines(
        found,
        x_label="equal groups of queries, from low σ to high σ",
        y_label="R@1, percent",
        title=f"R@1 by the uncertainty of the best answer, {DIRECTIONS[direction]}, {drawn.setting}",
        marks=Marks(max((entry.x for entry in found), key=len).tolist()),
    )
    return Made(picture, curves)


def sigma_by_rank(drawn: Drawn, direction: Direction) -> Made | None:
    """Pearson's r between the mean σ of the first K answers and mAP@R, K = 1…10; None where no row has a σ."""
    binned = list(drawn.curves("uncertainty", f"topk_{direction}", "binned"))
    raw = list(drawn.curves("uncertainty", f"topk_{direction}", "raw")) if len(binned) <= 3 else []
    found = [
        drawn.line(row, np.arange(1.0, len(curve.mean) + 1), curve, extra=kind)
        for kind, curves in (("binned", binned), ("raw", raw))
        for row, curve in curves
    ]
    if not found:
        return None
    picture = lines(
        found,
        x_label="K: σ is the mean over the first K answers",
        y_label="Pearson's r with mAP@R",
        title=f"Correlation of σ with mAP@R, {DIRECTIONS[direction]}, {drawn.setting}",
        marks=Marks(max((entry.x for entry in found), key=len).tolist()),
        ends=(-1.0, max(0.1, fitted(found)[1])),
        digits=2,
    )
    return Made(picture, dict(binned))


def risk_by_coverage(drawn: Drawn, direction: Direction) -> Made | None:
    """Mistakes among the answers kept when the least uncertain are kept first; None where no row has a σ."""
    coverage = dict(drawn.curves("uncertainty", f"risk_{direction}", "coverage"))
    risk = {
        row: curve
        for row, curve in drawn.curves("uncertainty", f"risk_{direction}", "risk")
        if row in coverage and len(coverage[row].mean) == len(curve.mean)
    }
    found = [
        drawn.line(
            row,
            coverage[row].mean,
            curve,
            extra=f"area {drawn.figure(row, 'uncertainty', f'aurc_{direction}'):.1f}",
        )
        for row, curve in risk.items()
    ]
    if not found:
        return None
    picture = lines(
        found,
        x_label="share of the queries kept, lowest σ first (percent)",
        y_label="best answer is no labelled match, percent of those kept",
        title=f"Mistakes among the surest answers, {DIRECTIONS[direction]}, {drawn.setting}",
    )
    return Made(picture, risk)


def dev_by_epoch(drawn: Drawn) -> Made | None:
    """What model choice saw: dev RSUM after each epoch; None where nobody has logged it."""
    found = []
    for row in drawn.styles:
        logs = [_logged(run, "dev_rsum", "epoch") for run in drawn.seeds(row)]
        curve = mean_curve([values for _, values in logs])
        if curve is not None:
            epochs = next(np.array(at) for at, values in logs if len(values) == len(curve.mean))
            found.append(drawn.line(row, epochs, curve)._replace(dots=False))
    if not found:
        return None
    title = f"Dev RSUM by epoch, {drawn.setting}"
    picture = lines(found, x_label="epoch", y_label="dev RSUM", title=title, ends=fitted(found))
    return Made(picture, [line.name for line in found])


def loss_by_step(drawn: Drawn) -> Made | None:
    """The training loss of the first seed, in percent of where it began: losses themselves are of unequal kinds."""
    found = []
    for row in drawn.styles:
        for run in drawn.seeds(row)[:1]:
            at, values = _logged(run, "loss", "step")
            if len(values) > 1 and values[0] > 0:
                step, loss = _thinned(np.array(at), np.array(values))
                found.append(Line(row, step, 100 * loss / values[0], drawn.styles[row]))
    if not found:
        return None
    title = f"Training loss by step, {drawn.setting}"
    picture = lines(found, x_label="step", y_label="loss, percent of its first value", title=title)
    return Made(picture, [line.name for line in found])


def _logged(run: RunRecord, key: str, place: str) -> tuple[list[float], list[float]]:
    """Where and what was logged under a key."""
    rows = [row for row in run.history if isinstance(row.get(key), int | float) and row.get(place) is not None]
    return [float(row[place]) for row in rows], [float(row[key]) for row in rows]


def _thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """Means over neighbours, where there are more points than a small figure can show."""
    if len(x) <= _SMOOTH:
        return x, y
    thin = [np.array([part.mean() for part in np.array_split(values, _SMOOTH)]) for values in (x, y)]
    return thin[0], thin[1]


def score_histogram(run: RunRecord, split: str, kind: Kind) -> Html | None:
    """How a run's scores lie for labelled pairs and for all others; None where it was not counted."""
    found = entry(run, split, "scores", kind)
    if not isinstance(found, Mapping):
        return None
    groups = []
    for key, name, style in (("positive", "labelled", "positives"), ("negative", "others", "easy")):
        stats = found.get(f"{key}_stats") or {}
        groups.append(Counts(name, np.array(found[key], dtype=np.float64), style, _stats(stats), stats.get("median")))
    label = "grade, from 0 to 1" if kind == "grade" else "score, as the method ranks by it"
    edges = np.array(found["edges"], dtype=np.float64)
    return histograms(groups, edges=edges, label=label, title=f"{kind.capitalize()}s of {run.row}, {run.setting}")


def all_pairs(run: RunRecord, split: str, kind: Kind) -> str:
    """Mean, median and deviation over all pairs, labelled or not, in words; empty where unknown."""
    said = _stats(entry(run, split, "scores", kind, "all_stats") or {})
    return f"All pairs: {said}." if said else ""


def _stats(stats: Mapping[str, Any]) -> str:
    """All with the same digits, zeros too; what would round to nothing is told to be less than the last digit.

    >>> _stats({"mean": 0.03, "median": 0.0001, "std": 0.25})
    'mean 0.030 · median <0.001 · std 0.250'
    """
    known = {key: float(stats[key]) for key in ("mean", "median", "std") if stats.get(key) is not None}
    digits = 3 if max(map(abs, known.values()), default=0.0) < 10 else 2
    return " · ".join(f"{key} {_rounded(value, digits)}" for key, value in known.items())


def _rounded(value: float, digits: int) -> str:
    least = 10.0**-digits
    if 0 < abs(value) < least / 2:
        return f"<{least:g}" if value > 0 else f">-{least:g}"
    return f"{value:z.{digits}f}"
