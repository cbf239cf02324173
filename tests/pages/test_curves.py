"""What a comparison's page draws from reports, against plain arithmetic, and what it does without data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.pages.curves import (
    SIGMA_PLOTS,
    Curves,
    PlotGroup,
    RunRecord,
    mean_curve,
    row_styles,
    score_plots,
    sigma_plots,
    training_plots,
)
from vacsr.pages.sweeps import SweepPoint, Sweeps, sweep_plots

STATS = {"mean": 0.25, "median": 0.125, "std": 0.0625}


def result(*, sigma: bool, shift: float = 0.0) -> dict[str, Any]:
    """A report of one split."""
    counts = {"edges": [0.0, 0.5, 1.0], "positive": [1, 3], "negative": [9, 1]}
    counts |= {f"{name}_stats": STATS for name in ("positive", "negative", "all")}  # type: ignore[misc]
    report: dict[str, Any] = {"split": "test", "rsum": 300.0 + shift, "uncertainty": None}
    report["scores"] = {kind: dict(counts) for kind in ("grade", "score")}
    if sigma:
        report["uncertainty"] = {"corr_r1_i2t": -0.5, "aurc_i2t": 12.0}
        for direction in ("i2t", "t2i"):
            report["uncertainty"] |= {
                f"bins_{direction}": {"sigma": [0.1, 0.2], "r1": [0.9, 0.1 + shift]},
                f"topk_{direction}": {"raw": [-0.31] * 10, "binned": [None] + [-0.83] * 9},
                f"risk_{direction}": {"coverage": [50.0, 100.0], "risk": [10.0, 20.0]},
            }
    return report


def runs() -> list[RunRecord]:
    history = [{"step": 0, "epoch": 0, "loss": 4.0}, {"step": 9, "epoch": 0, "loss": 2.0}]
    history += [{"step": 10 * epoch, "epoch": epoch, "dev_rsum": 100.0 * epoch} for epoch in (1, 2)]
    return [
        RunRecord(row, setting, seed, {"test": result(sigma=row == "vacsr", shift=seed / 10)}, history)
        for row in ("vacsr", "infonce")
        for setting in ("clean", "noisy")
        for seed in (0, 1)
    ]


def curves(found: Sequence[RunRecord], setting: str = "clean", split: str = "test") -> Curves:
    return Curves(found, setting, row_styles(list(dict.fromkeys(run.row for run in found))), split)


def spoken(group: PlotGroup) -> str:
    return " ".join(plot.picture for plot in group.plots)


def test_sigma_plots_are_means_over_seeds() -> None:
    group = sigma_plots(curves(runs()))
    assert len(group.plots) == 2 * len(SIGMA_PLOTS)
    accuracy, _, risk, _, ranks, _ = (plot.picture for plot in group.plots)
    assert "vacsr, r = -0.50: from 90.0 to 15.0." in accuracy  # 10% and 20%
    assert "vacsr, area 12.0: from 10.0 to 20.0." in risk
    assert "vacsr, binned: from -0.83 to -0.83; vacsr, raw: from -0.31 to -0.31." in ranks
    assert ("stroke-dasharray" in ranks, "stroke-dasharray" in accuracy) == (True, False)  # raw is dashed
    assert not any(plot.missing for plot in group.plots)  # infonce has no σ at all


def test_what_rounds_to_zero_has_no_minus() -> None:
    found = runs()
    for run in found:
        if run.row == "vacsr":
            run.report["test"]["uncertainty"] |= {"corr_r1_i2t": -0.004}
            run.report["test"]["uncertainty"]["topk_i2t"] |= {"raw": [-0.004] * 10}
    text = spoken(sigma_plots(curves(found)))
    assert "vacsr, r = 0.00" in text
    assert "vacsr, raw: from 0.00 to 0.00" in text


def test_training_plots_show_dev_rsum_and_the_relative_loss() -> None:
    dev, loss = training_plots(curves(runs())).plots
    assert "infonce: from 100.0 to 200.0" in dev.picture
    assert "infonce: from 100.0 to 50.0" in loss.picture


def test_long_losses_are_thinned_to_means() -> None:
    history = [{"step": step, "loss": 100.0 - step} for step in range(100)]
    (plot,) = training_plots(curves([RunRecord("a", "clean", 0, {}, history)])).plots
    assert "a: from 99.0 to 1.5." in plot.picture  # means over two or three steps


def test_score_plots_show_grades_then_scores_of_the_first_seed() -> None:
    group = score_plots(curves(runs()))
    assert [plot.title for plot in group.plots] == [
        "vacsr: grades", "infonce: grades", "vacsr: scores", "infonce: scores",
    ]  # fmt: skip
    assert all(plot.caption == "mean 0.250 · median 0.125 · std 0.062" for plot in group.plots)


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({"mean": -0.0, "median": 0.03, "std": 0.1}, "mean 0.000 · median 0.030 · std 0.100"),
        ({"mean": 2e-4, "median": -2e-4, "std": None}, "mean <0.001 · median >-0.001"),
        ({"mean": -12.3, "median": 4e-3, "std": 100.0}, "mean -12.30 · median <0.01 · std 100.00"),
        ({}, ""),
    ],
)
def test_statistics_keep_their_zeros(stats: dict[str, float | None], text: str) -> None:
    run = RunRecord("a", "clean", 0, {"test": result(sigma=False)})
    run.report["test"]["scores"]["score"]["all_stats"] = stats
    assert score_plots(curves([run])).plots[-1].caption == text


def test_rows_without_data_are_named() -> None:
    found = [run for run in runs() if (run.row, run.setting) != ("infonce", "noisy")]
    found += [run._replace(row="pcmepp") for run in runs() if run.row == "vacsr"]
    for run in found:
        if (run.row, run.setting) == ("pcmepp", "clean"):
            run.report["test"] = {key: value for key, value in run.report["test"].items() if key != "scores"}
            del run.report["test"]["uncertainty"]["risk_i2t"]
    clean, noisy = (sigma_plots(curves(found, setting)) for setting in ("clean", "noisy"))
    assert [plot.missing for plot in clean.plots] == [(), (), ("pcmepp",), (), (), ()]
    assert (clean.not_run, noisy.not_run) == ((), ())  # a row without σ is not missed
    assert training_plots(curves(found, "noisy")).not_run == ("infonce",)
    assert score_plots(curves(found)).plots[-1].missing == ("pcmepp",)


def test_without_data_there_is_no_plot() -> None:
    for report in ({}, {"test": {}}, {"test": {"rsum": 1.0, "uncertainty": None}}, {"dev": result(sigma=True)}):
        found = curves([RunRecord("a", "clean", 0, report)])
        for group in (sigma_plots(found), score_plots(found), training_plots(found)):
            assert group.plots == ()
    assert len(sigma_plots(found._replace(split="dev")).plots) == 6


VALUES = st.one_of(st.none(), st.floats(-100, 100))


@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=4))
def test_mean_and_deviation_point_by_point(seeds: list[list[float | None]]) -> None:
    curve = mean_curve(seeds)
    assert curve is not None
    assert curve.seeds == len(seeds)
    for position, values in enumerate(zip(*seeds, strict=True)):
        known = [value for value in values if value is not None]
        mean = np.mean(known) if known else np.nan
        assert curve.mean[position] == pytest.approx(mean, nan_ok=True)
        assert curve.std[position] == pytest.approx(np.std(known, ddof=1) if len(known) > 1 else 0.0)


def test_curves_of_another_length_are_left_out() -> None:
    curve = mean_curve([[1.0, 2.0], [5.0], None, [3.0, 4.0]])
    assert curve is not None
    assert (curve.mean.tolist(), curve.seeds) == ([2.0, 3.0], 2)
    assert mean_curve([None, []]) is None


def test_every_row_has_its_own_look() -> None:
    styles = row_styles([f"row-{number}" for number in range(16)] + ["vacsr", "infonce", "sigmoid"])
    assert len(set(styles.values())) == 19
    assert styles["vacsr"].colour == "vacsr"


def test_sweeps_are_sorted_marked_and_beside_the_papers() -> None:
    points = [
        SweepPoint("K", 4, False, 383.0, None, (31.0, None), 36.7),
        SweepPoint("alpha", 0.1, True, 1.0, None),
        SweepPoint("K", 2, True, 386.0, 1.0, (31.5, 0.2), 40.7),
    ]
    ours, alike, paper, alpha = sweep_plots(Sweeps(points, "RSUM", "mAP@R, EC", "mAP@R, both"))
    assert [plot.title for plot in (ours, alike, paper, alpha)] == ["K", "K, the paper's metric", "K, paper", "alpha"]
    assert "RSUM by K. RSUM: from 386.0 to 383.0." in ours.picture
    assert "ring: one seed" in ours.picture  # K=4
    assert ">default<" in ours.picture
    assert "mAP@R, both: from 31.5 to 31.0." in alike.picture
    assert "paper: mAP@R, EC: 40.7, 36.7." in paper.picture
    assert ">one seed<" in alpha.picture


def test_paper_points_alone_need_two() -> None:
    points = [
        SweepPoint("K", value, value == 2, 1.0, None, (1.0, None), 40.0 if value == 2 else None) for value in (1, 2)
    ]
    assert [plot.title for plot in sweep_plots(Sweeps(points, "RSUM", "mAP@R", "mAP@R"))] == ["K"]
    both = [point._replace(alike=None, paper=40.0) for point in points]
    assert [plot.title for plot in sweep_plots(Sweeps(both, "RSUM", "mAP@R", "mAP@R"))] == ["K", "K, paper"]
