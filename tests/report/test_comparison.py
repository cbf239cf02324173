"""The page of a comparison: what it shows, what it leaves out, and that it stands alone."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vacsr.report.comparison import comparison_page, write_comparison
from vacsr.report.curves import all_pairs
from vacsr.report.gallery import Gallery
from vacsr.report.records import RunRecord, SweepPoint
from vacsr.report.sections import Look, row_styles
from vacsr.report.sweeps import Sweeps, sweep_figures, sweeps_of
from vacsr.report.tables import CellValues, Column, ComparisonTable, Published, Sweep

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "flickr8k-features-reports.json"
VOID = ("meta", "img", "link")


class Page(HTMLParser):
    """Collects tags; refuses what is not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def sections(self) -> list[str | None]:
        return [attributes.get("id") for tag, attributes in self.tags if tag == "section"]


def result(*, sigma: bool, shift: float = 0.0) -> dict[str, Any]:
    found: dict[str, Any] = {"split": "test", "protocol": "flickr", "rsum": 300.0 + shift, "uncertainty": None}
    counted = {"edges": [0.0, 0.5, 1.0], "positive": [1, 3], "negative": [9, 1]}
    stats = {"mean": 0.25, "median": 0.125, "std": 0.0625}
    found["scores"] = {kind: counted | {f"{name}_stats": stats for name in ("positive", "negative", "all")}
                       for kind in ("grade", "score")}  # fmt: skip
    if sigma:
        found["uncertainty"] = uncertainty = {"corr_r1_i2t": -0.5, "aurc_i2t": 12.0}
        for direction in ("i2t", "t2i"):
            uncertainty |= {
                f"bins_{direction}": {"sigma": [0.1, 0.2], "r1": [0.9, 0.1 + shift]},
                f"topk_{direction}": {"raw": [-0.31] * 10, "binned": [None] + [-0.83] * 9},
                f"risk_{direction}": {"coverage": [50.0, 100.0], "risk": [10.0, 20.0]},
            }  # type: ignore[operator]
    return found


def runs() -> list[RunRecord]:
    history = [{"step": 0, "epoch": 0, "loss": 4.0}, {"step": 9, "epoch": 0, "loss": 2.0}]
    history += [{"step": 10 * epoch, "epoch": epoch, "dev_rsum": 100.0 * epoch} for epoch in (1, 2)]
    return [
        RunRecord(row, setting, seed, {"test": result(sigma=row == "vacsr", shift=seed / 10)}, history)
        for row in ("vacsr", "infonce")
        for setting in ("clean", "noisy")
        for seed in (0, 1)
    ]


def table_of(found: list[RunRecord], **fields: Any) -> ComparisonTable:
    values = tuple(CellValues(run.row, run.setting, run.seed, dict(run.report)) for run in found)
    columns = (Column(key="test.rsum", name="RSUM"), Column(key="paper", name="mAP@R (paper)", published=True))
    rows = tuple(dict.fromkeys(run.row for run in found))
    settings = tuple(dict.fromkeys(run.setting for run in found))
    return ComparisonTable("A <title> & more", columns, rows, settings, values, **fields)


def test_every_part_that_has_data_is_there() -> None:
    whole = comparison_page(table_of(runs()), runs())
    page = Page(whole)
    assert page.sections() == ["tables", "sigma", "scores", "training", "model"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in page.sections()]
    assert "A &lt;title&gt; &amp; more" in whole
    assert "2 rows × 2 settings × 2 seeds: 8 runs" in whole
    assert '300.1</strong><span class="rest"> ± 0.1</span>' in whole  # of 300.0 and 300.1, rounded
    for said in ("vacsr, r = -0.50", "vacsr, area 12.0", "vacsr, binned", "vacsr, raw", "-0.83", "-0.31"):
        assert said in whole, said
    assert "mean 0.250 · median 0.125 · std 0.062" in whole
    assert "All pairs: mean 0.250 · median 0.125 · std 0.062." in whole
    assert whole.count("vacsr: grades") == 2  # once a setting
    assert "from 100.0 to 200.0" in whole  # dev RSUM
    assert "from 100.0 to 50.0" in whole  # loss, percent of its first value


def test_the_page_stands_alone_and_can_be_read_by_all(tmp_path: Path) -> None:
    write_comparison(table_of(runs()), runs(), tmp_path / "page.html")
    whole = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\((?!#)", whole)
    page = Page(whole)
    assert "script" not in {tag for tag, _ in page.tags}
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_what_rounds_to_zero_has_no_minus() -> None:
    found = runs()
    for run in found:
        sigma = run.report["test"]["uncertainty"]
        if sigma is not None:
            sigma |= {"corr_r1_i2t": -0.004}
            sigma["topk_i2t"]["raw"] = sigma["topk_t2i"]["raw"] = [-0.004] * 10
    whole = comparison_page(table_of(found), found)
    for said in ("vacsr, r = 0.00", "vacsr, raw</th><td>0.00</td>", "vacsr, raw: from 0.00 to 0.00"):
        assert said in whole, said
    assert "-0.00" not in whole


def test_what_is_missing_is_left_out() -> None:
    bare = [RunRecord("infonce", "clean", 0, {"test": {"rsum": 1.0, "uncertainty": None}})]
    page = Page(comparison_page(table_of(bare), bare, gallery=Gallery("clean", ("infonce",))))
    assert page.sections() == ["tables", "model"]
    assert Page(comparison_page(table_of(bare), [])).sections() == ["tables", "model"]
    other_split = [run._replace(report={"dev": run.report["test"]}, history=()) for run in runs()]
    assert Page(comparison_page(table_of(other_split), other_split)).sections() == ["tables", "model"]
    asked = comparison_page(table_of(other_split), other_split, split="dev")
    assert Page(asked).sections() == ["tables", "sigma", "scores", "model"]


def without(found: list[RunRecord], row: str, setting: str, *, part: str) -> list[RunRecord]:
    """The same runs, one row of one setting without a part of its report."""
    return [
        run._replace(report={"test": {key: value for key, value in run.report["test"].items() if key != part}})
        if (run.row, run.setting) == (row, setting)
        else run
        for run in found
    ]


def test_rows_that_a_figure_leaves_out_are_named() -> None:
    whole = comparison_page(table_of(runs()), runs())
    assert not re.search(r"for want of|Not run|Not shown, as", whole)  # infonce has no σ: said once, above the figures
    lacking = without(runs(), "infonce", "noisy", part="scores")
    page = comparison_page(table_of(lacking), lacking)
    assert page.count("Not drawn, for want of stored scores: infonce.") == 1
    assert page.count("for want of") == 1
    lacking = without(runs(), "vacsr", "clean", part="scores")
    gone = [run for run in lacking if (run.row, run.setting) != ("vacsr", "noisy")]
    page = comparison_page(table_of(gone), gone)
    assert page.count("Not drawn, for want of stored scores: vacsr.") == 1
    # σ: nothing is drawn of noisy, but said; scores; training: one note for both figures
    assert page.count("Not run in noisy: vacsr.") == 3
    clean, noisy = page.split('id="scores"')[1].split("</section>")[0].split(">noisy<")
    assert "Not drawn, for want of stored scores: vacsr.</p>" in clean
    assert "Not run in noisy: vacsr.</p>" in noisy


def test_a_figure_that_lacks_more_than_its_neighbours_says_so_itself() -> None:
    found = runs() + [run._replace(row="pcmepp") for run in runs() if run.row == "vacsr"]
    for run in found:
        if (run.row, run.setting) == ("pcmepp", "clean"):
            del run.report["test"]["uncertainty"]["risk_i2t"], run.report["test"]["uncertainty"]["risk_t2i"]
    page = comparison_page(table_of(found), found)
    captions = re.findall(r"<figcaption>([^<]*)</figcaption>", page)
    named = [caption for caption in captions if "Not drawn, for want of stored risks: pcmepp." in caption]
    assert len(named) == page.count("for want of") == 2  # one a direction, of clean alone
    assert all(caption.startswith("On the right all queries are answered") for caption in named)


def test_a_figure_that_no_row_has_is_named_below_the_others() -> None:
    found = [run._replace(history=[row for row in run.history if "dev_rsum" in row]) for run in runs()]
    page = comparison_page(table_of(found), found)
    assert page.count("No figure “Loss”, for want of stored losses.") == 2  # once a setting
    assert "Loss</h3>" not in page
    bare = [run._replace(history=()) for run in runs()]
    page = comparison_page(table_of(bare), bare, drawn=["vacsr", "pcme"])
    assert "as no run has stored what it is drawn from: “How training went”." in page
    assert "Not run, and so in no figure: pcme." in page


def test_rows_without_grades_are_not_said_to_lack_scores() -> None:
    found = runs()
    for run in found:
        if run.row == "infonce":
            run.report["test"]["scores"]["grade"] = None
    page = comparison_page(table_of(found), found)
    assert page.count("Without grades: infonce.") == 2
    assert "for want of" not in page


def test_a_gallery_comes_from_run_folders(feature_runs: list[RunRecord]) -> None:
    plan = Gallery("clean", ("vacsr", "infonce"), captions=2, images=1)
    whole = comparison_page(table_of(feature_runs), feature_runs, gallery=plan)
    page = Page(whole)
    assert {"answers", "intervals"} < set(page.sections())
    assert "Queries and the best answers of vacsr and infonce" in whole
    assert whole.count('<article class="query') == 3
    assert whole.count("official match at rank") == 6
    assert "The pairs: all labelled ones and up to 40,000 others" in whole
    assert "dots compare answers of one method only" in whole


def test_stored_reports_of_real_runs_are_drawn() -> None:
    found = []
    for cell in json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]:
        report = {part["split"]: part for part in cell["results"]}
        rsums = enumerate(cell["dev_rsum_by_epoch"], start=1)
        history = [{"epoch": epoch, "dev_rsum": value} for epoch, value in rsums]
        found.append(RunRecord(cell["row"], cell["setting"], cell["seed"], report, history))
    whole = comparison_page(table_of(found), found)
    assert Page(whole).sections() == ["tables", "sigma", "training", "model"]
    seeds = [
        run.report["test"]["uncertainty"]["corr_r1_i2t"]
        for run in found
        if (run.row, run.setting) == ("vacsr-default", "clean")
    ]
    assert f"vacsr-default, r = {sum(seeds) / len(seeds):.2f}" in whole


def test_sweeps_are_sorted_marked_and_beside_the_papers() -> None:
    points = [SweepPoint("K", 4, False, 383.0, None, (31.0, None), 36.7),
              SweepPoint("K", 2, True, 386.0, 1.0, (31.5, 0.2), 40.7),
              SweepPoint("alpha", 0.1, True, 1.0, None)]  # fmt: skip
    swept = Sweeps(points, "RSUM", "mAP@R, EC", "mAP@R, both")
    first, second = sweep_figures(swept)
    assert (first.name, second.name, second.alike, second.paper) == ("K", "alpha", None, None)
    assert "RSUM by K. RSUM: from 386.0 to 383.0." in first.ours
    assert first.ours.count("hollow") == 1  # K=4 has one seed
    assert "ring: one seed" in first.ours
    assert ">one seed<" in second.ours
    assert first.alike is not None
    assert "mAP@R, both by K. mAP@R, both: from 31.5 to 31.0." in first.alike
    assert first.paper is not None
    assert "paper: mAP@R, EC by K. paper: mAP@R, EC: 40.7, 36.7." in first.paper
    assert "<path" not in first.paper  # nobody knows what lies between
    assert ">default<" in first.ours
    heights = [_unit(figure, low, high) for figure, low, high in ((first.alike, 31.0, 31.5), (first.paper, 36.7, 40.7))]
    assert heights[0] == pytest.approx(heights[1], rel=0.02)  # equal changes look equal
    whole = comparison_page(table_of(runs()), runs(), swept=[swept])
    assert "sweeps" in Page(whole).sections()
    assert "paper: paper:" not in whole


def _unit(figure: str, low: float, high: float) -> float:
    """How far apart the two points of a figure are, for a difference of 1."""
    at = [float(y) for y in re.findall(r'<circle class="[^"]*" cx="[\d.]+" cy="([\d.]+)"', figure)][-2:]
    return abs(at[0] - at[1]) / (high - low)


def test_sweeps_come_from_the_table_itself() -> None:
    found = [RunRecord(row, "clean", seed, {"test": {"rsum": value + seed}})
             for row, value in (("K=1", 300.0), ("paper", 310.0), ("K=3", 305.0)) for seed in (0, 1)]  # fmt: skip
    sweeps = tuple((row, Sweep(name="K", value=value, default=row == "paper"))
                   for row, value in (("K=1", 1), ("paper", 2), ("K=3", 3)))  # fmt: skip
    published = tuple(Published(name="VACSR", values={"paper": value}, source="s", beside=row)
                      for row, value in (("K=1", 39.6), ("paper", 40.7)))  # fmt: skip
    table = table_of(found, sweeps=sweeps, published=published)
    (swept,) = sweeps_of(table)
    assert (swept.figure, swept.paper_figure) == ("RSUM", "mAP@R (paper)")
    assert swept.points[0] == ("K", 1.0, False, 300.5, pytest.approx(0.7071, abs=1e-3), None, 39.6)
    assert [point.paper for point in swept.points] == [39.6, 40.7, None]
    assert [point.default for point in swept.points] == [False, True, False]
    assert sweeps_of(table_of(found)) == []


def test_sweeps_by_the_papers_measure_are_of_our_own_data() -> None:
    """Both directions averaged; a printed range stands at its middle; one seed has no deviation."""
    figures = {("K=1", 0): (20.0, 30.0), ("K=1", 1): (22.0, 34.0), ("paper", 0): (24.0, 36.0)}
    found = [RunRecord(row, "clean", seed, {"test": {"i2t": {"map_at_r": i2t}, "t2i": {"map_at_r": t2i}}})
             for (row, seed), (i2t, t2i) in figures.items()]  # fmt: skip
    key = "test/eccv.mean.map_at_r"
    columns = (
        Column(key="test.i2t.map_at_r", name="mAP@R i2t"),
        Column(key=key, name="paper: mAP@R, EC", published=True),
    )
    sweeps = tuple((row, Sweep(name="K", value=at, default=at == 2)) for row, at in (("K=1", 1), ("paper", 2)))
    published = (
        Published(name="V", values={key: 40.2}, upper={key: 40.3}, source="s", beside="K=1"),
        Published(name="V", values={key: 40.7}, source="s", beside="paper"),
    )
    table = replace(table_of(found, sweeps=sweeps, published=published), columns=columns)
    (swept,) = sweeps_of(table)
    assert (swept.paper_figure, swept.alike_figure) == ("mAP@R, EC", "mAP@R, mean of both directions")
    first, second = swept.points
    assert first.alike == (pytest.approx(26.5), pytest.approx(statistics.stdev([25.0, 28.0])))
    assert (first.paper, second.paper, second.std, second.alike) == (pytest.approx(40.25), 40.7, None, (30.0, None))


def test_the_lead_counts_what_was_run() -> None:
    whole = runs()
    assert "2 rows × 2 settings × 2 seeds: 8 runs under one protocol." in comparison_page(table_of(whole), [])
    fewer = comparison_page(table_of(whole[:-1]), [])
    assert "7 runs under one protocol: 2 rows, 2 settings, 1 to 2 seeds each." in fewer
    gap = comparison_page(table_of(whole[:-2]), [])
    assert "6 runs under one protocol: 2 rows, 2 settings, 2 seeds each; not every row in every setting." in gap


def test_a_page_without_answers_says_why(feature_runs: list[RunRecord]) -> None:
    table = table_of(feature_runs)
    gone = [run._replace(folder=None) for run in feature_runs]
    plan = Gallery("clean", ("vacsr",), captions=1, images=1)
    assert "names no rows for them, under page.gallery" in comparison_page(table, gone)
    assert "they need the trained models and the photos" in comparison_page(table, gone, gallery=plan)
    assert "are not shown" not in comparison_page(table, feature_runs, gallery=plan)


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"mean": 0.0, "median": 0.03, "std": 0.1}, "mean 0.000 · median 0.030 · std 0.100"),
        ({"mean": -0.0, "median": 0.03, "std": 0.1}, "mean 0.000 · median 0.030 · std 0.100"),
        ({"mean": 2e-4, "median": -2e-4, "std": None}, "mean <0.001 · median >-0.001"),
        ({"mean": -12.3, "median": 4e-3, "std": 100.0}, "mean -12.30 · median <0.01 · std 100.00"),
        ({}, ""),
    ],
)
def test_statistics_keep_their_zeros(stats: dict[str, float | None], said: str) -> None:
    run = RunRecord("a", "clean", 0, {"test": {"scores": {"score": {"all_stats": stats}}}})
    assert all_pairs(run, "test", "score") == (f"All pairs: {said}." if said else "")


def test_figures_show_some_rows_and_say_how_many_are_left_out() -> None:
    found = [RunRecord(f"row-{number}", "clean", 0, {"test": result(sigma=True)}) for number in range(12)]
    table = table_of(found)
    look = Look.of(table, found, drawn=(), split="test")
    assert (len(look.styles), look.left_out) == (8, 4)
    assert "4 more are in the tables" in comparison_page(table, found)
    chosen = Look.of(table, found, drawn=["row-11", "row-2", "absent"], split="test")
    assert list(chosen.styles) == ["row-11", "row-2"]


def test_every_row_has_a_look_of_its_own() -> None:
    styles = row_styles([f"row-{number}" for number in range(16)] + ["vacsr", "infonce", "sigmoid"])
    assert len(set(styles.values())) == 19
    assert styles["vacsr"] == "vacsr"
