"""The plots of a comparison, from the reports of its runs: uncertainty, scores and training.

To add a plot, write a function like :func:`dev_by_epoch` and add it to :data:`SIGMA_PLOTS` or :data:`TRAINING_PLOTS`
with its title and caption.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from vacsr.pages.plots import Array, Histogram, Line, histogram_plot, line_plot, value_range

DIRECTION_NAMES = {"i2t": "image to text", "t2i": "text to image"}
MOST = 8  # rows in a plot, unless more are asked for
_FIXED = ("vacsr", "infonce", "sigmoid")  # methods that always have the same colour
_HUES = tuple(f"hue-{number}" for number in range(1, 9))
_SMOOTH = 40  # points of a loss curve


class RunRecord(NamedTuple):
    """One finished run of a comparison."""

    row: str
    setting: str
    seed: int
    report: Mapping[str, Any]
    """Its results by split (`test`) and by split and protocol (`test/eccv`), with the keys of the evaluation JSON."""
    history: Sequence[Mapping[str, Any]] = ()
    """The rows of metrics.jsonl: loss terms with their step, and `dev_rsum` at the end of an epoch."""
    folder: Path | None = None  # the run folder, where the model still exists


class Plot(NamedTuple):
    """A drawn plot and the words around it."""

    title: str
    picture: Markup
    caption: str = ""  # key of the caption in the template, or the caption itself
    missing: tuple[str, ...] = ()  # rows that were run and have no data for it: a curve alone might mislead


class PlotGroup(NamedTuple):
    """The plots of one setting."""

    setting: str
    plots: tuple[Plot, ...]
    not_run: tuple[str, ...] = ()  # rows without a run in this setting


class Curve(NamedTuple):
    """A curve averaged over seeds."""

    mean: Array  # [P], NaN where no seed has a value
    std: Array  # [P], 0 for a single seed
    seeds: int


class RowStyle(NamedTuple):
    colour: str
    dashed: bool = False


def follow(report: Any, *keys: str) -> Any:
    """A part of nested mappings and lists, whose items are numbered from 0; None where there is no such part."""
    for key in keys:
        if isinstance(report, list):
            report = dict(zip(map(str, range(len(report))), report, strict=True))
        report = report.get(key) if isinstance(report, Mapping) else None
    return report


def mean_curve(curves: Sequence[Sequence[float | None] | None]) -> Curve | None:
    """Mean and sample deviation over seeds, point by point; None where no seed has the curve.

    Curves of another length than the first are left out: their points are not the same.

    >>> mean_curve([[1.0, None], [3.0, 5.0]]).mean
    array([2., 5.])
    """
    known = [np.array([np.nan if v is None else v for v in curve], dtype=np.float64) for curve in curves if curve]
    known = [curve for curve in known if len(curve) == len(known[0])]
    if not known:
        return None
    values = np.ma.masked_invalid(np.stack(known))
    counts = values.count(axis=0)
    squares = (values - values.mean(axis=0)).filled(0.0) ** 2
    std = np.sqrt(squares.sum(axis=0) / np.maximum(counts - 1, 1))
    return Curve(np.ma.filled(values.mean(axis=0).astype(np.float64), np.nan), std, len(known))


def row_styles(rows: Sequence[str]) -> dict[str, RowStyle]:
    """A colour per row: its own for the best known methods, numbered for others, then dashed.

    >>> [style.colour for style in row_styles(["infonce", "vacsr-paper", "vacsr-default", "pcmepp"]).values()]
    ['infonce', 'hue-1', 'vacsr', 'hue-2']
    """
    owners: dict[str, str] = {}
    for method in _FIXED:
        alike = [row for row in rows if row == method or row.startswith(f"{method}-")]
        named = [row for row in alike if row in (method, f"{method}-default")]
        owners |= {row: method for row in (named or alike)[:1]}
    free = [RowStyle(hue) for hue in _HUES] + [RowStyle(name, dashed=True) for name in (*_FIXED, *_HUES)]
    left = iter(free)
    return {row: RowStyle(owners[row]) if row in owners else next(left, RowStyle("easy")) for row in rows}


class Curves(NamedTuple):
    """The runs of one setting, and the rows to draw of them."""

    runs: Sequence[RunRecord]
    setting: str
    styles: Mapping[str, RowStyle]  # of the rows to draw
    split: str

    def seeds(self, row: str) -> list[RunRecord]:
        """The runs of a row, by seed."""
        runs = [run for run in self.runs if (run.row, run.setting) == (row, self.setting)]
        return sorted(runs, key=lambda run: run.seed)

    def without_sigma(self, row: str) -> bool:
        """Whether every report of a row, in any setting, says that its method has no σ."""
        reports = [run.report.get(self.split) or {} for run in self.runs if run.row == row]
        return bool(reports) and all("uncertainty" in report and report["uncertainty"] is None for report in reports)

    def means(self, *keys: str) -> Iterator[tuple[str, Curve]]:
        """A list of the reports, averaged over seeds, by row."""
        for row in self.styles:
            curve = mean_curve([follow(run.report, self.split, *keys) for run in self.seeds(row)])
            if curve is not None:
                yield row, curve

    def mean(self, row: str, *keys: str) -> float:
        """A number of the reports, averaged over seeds; NaN where there is none."""
        curve = mean_curve([[follow(run.report, self.split, *keys)] for run in self.seeds(row)])
        return float("nan") if curve is None else float(curve.mean[0])

    def line(self, row: str, curve: Curve, *, x: Array | None = None, scale: float = 1.0, extra: str = "") -> Line:
        """A curve in the row's colour, with a band where there are several seeds."""
        style = self.styles[row]
        return Line(
            f"{row}, {extra}" if extra else row,
            np.arange(1.0, len(curve.mean) + 1) if x is None else x,
            scale * curve.mean,
            style.colour,
            dashed=style.dashed or extra == "raw",
            dots=len(curve.mean) <= 12,
            std=scale * curve.std if curve.seeds > 1 else None,
        )


class Lines(NamedTuple):
    """The lines of a plot, each with its row, and the words around them; without lines there is no plot."""

    lines: Sequence[tuple[str, Line]]
    title: str
    x_label: str
    y_label: str
    numbered: bool = False  # whether every point has its tick
    y_range: tuple[float, float] | None = None
    digits: int = 1


def accuracy_by_sigma(curves: Curves, direction: str) -> Lines:
    """R@1 in equal groups of queries, from low σ of the best answer to high."""
    lines = []
    for row, curve in curves.means("uncertainty", f"bins_{direction}", "r1"):
        correlation = f"r = {curves.mean(row, 'uncertainty', f'corr_r1_{direction}'):z.2f}"
        lines.append((row, curves.line(row, curve, scale=100, extra=correlation)))
    title = f"R@1 by the uncertainty of the best answer, {DIRECTION_NAMES[direction]}, {curves.setting}"
    return Lines(lines, title, "equal groups of queries, from low σ to high σ", "R@1, percent", numbered=True)


def risk_by_coverage(curves: Curves, direction: str) -> Lines:
    """Errors among the queries that are answered when the least uncertain are answered first."""
    coverage = dict(curves.means("uncertainty", f"risk_{direction}", "coverage"))
    lines = []
    for row, curve in curves.means("uncertainty", f"risk_{direction}", "risk"):
        if row in coverage and len(coverage[row].mean) == len(curve.mean):
            area = f"area {curves.mean(row, 'uncertainty', f'aurc_{direction}'):.1f}"
            lines.append((row, curves.line(row, curve, x=coverage[row].mean, extra=area)))
    title = f"Errors among the most certain answers, {DIRECTION_NAMES[direction]}, {curves.setting}"
    x_label = "queries answered, lowest σ first (percent)"
    return Lines(lines, title, x_label, "best answer is not a labelled match, percent")


def sigma_by_rank(curves: Curves, direction: str) -> Lines:
    """Pearson's r between the mean σ of the first K answers and mAP@R; raw too where there is room."""
    means = {kind: list(curves.means("uncertainty", f"topk_{direction}", kind)) for kind in ("binned", "raw")}
    kinds = ("binned", "raw") if len(means["binned"]) <= 3 else ("binned",)
    lines = [(row, curves.line(row, curve, extra=kind)) for kind in kinds for row, curve in means[kind]]
    title = f"Correlation of σ with mAP@R, {DIRECTION_NAMES[direction]}, {curves.setting}"
    top = max(0.1, value_range([line for _, line in lines])[1])
    return Lines(
        lines, title, "K: σ is the mean over the first K answers", "Pearson's r with mAP@R", numbered=True,
        y_range=(-1.0, top), digits=2,
    )  # fmt: skip


def dev_by_epoch(curves: Curves) -> Lines:
    """What model selection saw: dev RSUM after each epoch."""
    lines = []
    for row in curves.styles:
        logs = [_logged(run, "dev_rsum", "epoch") for run in curves.seeds(row)]
        curve = mean_curve([values for _, values in logs])
        if curve is not None:
            epochs = next(np.array(x) for x, values in logs if len(values) == len(curve.mean))
            lines.append((row, curves.line(row, curve, x=epochs)._replace(dots=False)))
    y_range = value_range([line for _, line in lines])
    return Lines(lines, f"Dev RSUM by epoch, {curves.setting}", "epoch", "dev RSUM", y_range=y_range)


def loss_by_step(curves: Curves) -> Lines:
    """The training loss of the first seed, in percent of its first value: losses differ in kind."""
    lines = []
    for row, style in curves.styles.items():
        for run in curves.seeds(row)[:1]:
            logged = _logged(run, "loss", "step")
            first = next(iter(logged[1]), 0.0)
            if len(logged[1]) > 1 and first > 0:
                parts = min(_SMOOTH, len(logged[1]))
                x, y = (np.array([part.mean() for part in np.array_split(np.array(one), parts)]) for one in logged)
                lines.append((row, Line(row, x, 100 * y / first, style.colour, style.dashed)))
    return Lines(lines, f"Training loss by step, {curves.setting}", "step", "loss, percent of its first value")


SIGMA_PLOTS: tuple[tuple[Callable[[Curves, str], Lines], str, str], ...] = (
    (accuracy_by_sigma, "σ and R@1", "If σ is informative, the line falls. r is the correlation over the groups."),
    (
        risk_by_coverage,
        "Most certain answers only",
        "On the right all queries are answered; an informative σ makes the line fall to the left. The area is that "
        "below the line.",
    ),
    (sigma_by_rank, "σ of the first K and mAP@R", "Near −1: a low σ of the first answers predicts a good ranking."),
)
"""Function, title and caption; one plot per direction."""
TRAINING_PLOTS: tuple[tuple[Callable[[Curves], Lines], str, str], ...] = (
    (dev_by_epoch, "Dev RSUM", "The y axis need not begin at 0."),
    (loss_by_step, "Loss", "First seed. The losses differ in kind."),
)


def sigma_plots(curves: Curves) -> PlotGroup:
    """What σ says of R@1 and mAP@R, and what is gained by answering only where σ is low."""
    rows = [row for row in curves.styles if not curves.without_sigma(row)]
    drawn = [
        (plot(curves, direction), f"{title}, {name}", caption)
        for plot, title, caption in SIGMA_PLOTS
        for direction, name in DIRECTION_NAMES.items()
    ]
    return _group(curves, rows, drawn)


def training_plots(curves: Curves) -> PlotGroup:
    drawn = [(plot(curves), title, caption) for plot, title, caption in TRAINING_PLOTS]
    return _group(curves, list(curves.styles), drawn)


def _group(curves: Curves, rows: Sequence[str], drawn: Sequence[tuple[Lines, str, str]]) -> PlotGroup:
    ran = [row for row in rows if curves.seeds(row)]
    plots = []
    for plot, title, caption in drawn:
        if plot.lines:
            rows_drawn, lines = zip(*plot.lines, strict=True)
            picture = line_plot(
                lines, title=plot.title, x_label=plot.x_label, y_label=plot.y_label, y_range=plot.y_range,
                ticks=max((line.x for line in lines), key=len).tolist() if plot.numbered else None, digits=plot.digits,
            )  # fmt: skip
            plots.append(Plot(title, picture, caption, tuple(row for row in ran if row not in rows_drawn)))
    return PlotGroup(curves.setting, tuple(plots), tuple(row for row in rows if row not in ran))


def score_plots(curves: Curves) -> PlotGroup:
    """Grades and scores of labelled pairs and of all others, for the first seed of each row."""
    first = [seeds[0] for row in curves.styles if (seeds := curves.seeds(row))]
    plots = [
        Plot(f"{run.row}: {kind}s", _score_histogram(run, stored, kind), _stats(stored.get("all_stats") or {}))
        for kind in ("grade", "score")
        for run in first
        if isinstance(stored := follow(run.report, curves.split, "scores", kind), Mapping)
    ]
    lacking = tuple(run.row for run in first if follow(run.report, curves.split, "scores") is None)
    if plots and lacking:
        plots[-1] = plots[-1]._replace(missing=lacking)
    return PlotGroup(curves.setting, tuple(plots), tuple(row for row in curves.styles if not curves.seeds(row)))


def _score_histogram(run: RunRecord, stored: Mapping[str, Any], kind: str) -> Markup:
    groups = []
    for key, name, colour in (("positive", "labelled", "positives"), ("negative", "others", "easy")):
        stats = stored.get(f"{key}_stats") or {}
        counts = np.array(stored[key], dtype=np.float64)
        groups.append(Histogram(name, counts, colour, _stats(stats), stats.get("median")))
    label = "grade, from 0 to 1" if kind == "grade" else "score, as the method ranks by it"
    title = f"{kind.capitalize()}s of {run.row}, {run.setting}"
    return histogram_plot(groups, edges=np.array(stored["edges"], dtype=np.float64), label=label, title=title)


def _stats(stats: Mapping[str, Any]) -> str:
    """Equal digits, zeros too; what would round to nothing is less than the last digit.

    >>> _stats({"mean": 0.03, "median": 0.0001, "std": 0.25})
    'mean 0.030 · median <0.001 · std 0.250'
    """
    known = {key: float(stats[key]) for key in ("mean", "median", "std") if stats.get(key) is not None}
    digits = 3 if max(map(abs, known.values()), default=0.0) < 10 else 2
    least, texts = 10.0**-digits, []
    for key, value in known.items():
        small = f"<{least:g}" if value > 0 else f">-{least:g}"
        texts.append(f"{key} {small if 0 < abs(value) < least / 2 else f'{value:z.{digits}f}'}")
    return " · ".join(texts)


def _logged(run: RunRecord, key: str, position: str) -> tuple[list[float], list[float]]:
    """Where and what was logged under a key."""
    rows = [row for row in run.history if isinstance(row.get(key), int | float) and row.get(position) is not None]
    return [float(row[position]) for row in rows], [float(row[key]) for row in rows]
