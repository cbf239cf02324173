"""The figures in README and on the results page are those of the stored data."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr.report.tables import look_up

ROOT = Path(__file__).resolve().parents[1]
CELLS = json.loads((ROOT / "docs/results/flickr8k-features.json").read_text(encoding="utf-8"))["cells"]
PAGE = (ROOT / "docs/results-flickr8k-features.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
KEYS = {
    "RSUM": "test.rsum",
    "τ-c experts": "test.judgments.expert_tau_c",
    "τ-b crowd": "test.judgments.crowd_tau_b",
    "FN AUROC of σ": "test.uncertainty.auroc_false_negative",
    "of score": "test.judgments.auroc_false_negative_score",
}
ABLATIONS = {
    "paper": "vacsr-paper",
    "+ cosine residual": "paper-with-residual",
    "no KL": "paper-no-kl",
    "no sigmoid in L_σ": "paper-no-sigmoid",
    "no L_σ (β=0)": "paper-no-sigma-loss",
    "K=1 (no GMM)": "paper-no-gmm",
    "no STE": "paper-no-ste",
    "recon averaged over B²": "paper-mean-reduction",
    "literal max": "paper-literal-max",
}


def values(setting: str, row: str, key: str, seeds: range) -> list[float]:
    found = [c["values"][key] for c in CELLS if (c["setting"], c["row"]) == (setting, row) and c["seed"] in seeds]
    assert len(found) == len(seeds)
    return found


def table(text: str, first_head: str) -> tuple[list[str], list[list[str]]]:
    """The table whose head begins with ``first_head``: head and rows as cells."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first_head} |"))
    block = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        block.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return block[0], block[2:]


def check(shown: str, found: list[float]) -> None:
    mean, _, spread = shown.partition(" ± ")
    assert float(mean) == pytest.approx(statistics.fmean(found), abs=0.0501)
    if spread:
        assert float(spread) == pytest.approx(statistics.stdev(found), abs=0.0501)


@pytest.mark.parametrize(("head", "setting"), [("clean", "clean"), ("50% caption noise", "noise-50")])
def test_the_main_rows(head: str, setting: str) -> None:
    names, rows = table(PAGE, head)
    assert [row[0] for row in rows] == ["infonce", "sigmoid", "vacsr-paper", "vacsr-default"]
    checked = 0
    for row in rows:
        for name, shown in zip(names, row, strict=True):
            if name in KEYS and shown != "–":
                check(shown, values(setting, row[0], KEYS[name], range(5)))
                checked += 1
    assert checked >= 16


def test_the_ablations() -> None:
    _, rows = table(PAGE, "change")
    assert [row[0] for row in rows] == list(ABLATIONS)
    for label, *shown in rows:
        keys = ["test.rsum", "test.judgments.expert_tau_c", "test.uncertainty.auroc_false_negative"]
        places = [(setting, key) for setting in ("clean", "noise-50") for key in keys]
        for text, (setting, key) in zip(shown, places, strict=True):
            check(text, values(setting, ABLATIONS[label], key, range(3)))


def test_the_readme() -> None:
    lines = [line for line in README.splitlines() if re.match(r"\| (infonce|sigmoid|vacsr, preset)", line)]
    assert len(lines) == 4
    keys = ["test.rsum", "test.judgments.expert_tau_c", "test.judgments.crowd_tau_b"]
    for line, row in zip(lines, ["infonce", "sigmoid", "vacsr-paper", "vacsr-default"], strict=True):
        cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        for shown, key in zip(cells[1:4], keys, strict=True):
            check(shown, values("clean", row, key, range(5)))
        check(cells[5], values("noise-50", row, "test.rsum", range(5)))
        check(cells[6], values("noise-50", row, "test.judgments.expert_tau_c", range(5)))


TRAINED = json.loads((ROOT / "docs/results/flickr8k/results.json").read_text(encoding="utf-8"))["cells"]
TRAINED_PAGE = (ROOT / "docs/results-flickr8k.md").read_text(encoding="utf-8")
TRAINED_KEYS = {
    "i2t R@1/5/10": ("test.i2t.r1", "test.i2t.r5", "test.i2t.r10"),
    "t2i R@1/5/10": ("test.t2i.r1", "test.t2i.r5", "test.t2i.r10"),
    "RSUM": ("test.rsum",),
    "mAP@R i2t / t2i": ("test.i2t.map_at_r", "test.t2i.map_at_r"),
    "τ-c experts": ("test.judgments.expert_tau_c",),
    "τ-b crowd": ("test.judgments.crowd_tau_b",),
    "σ–R@1 i2t / t2i": ("test.uncertainty.corr_r1_i2t", "test.uncertainty.corr_r1_t2i"),
    "AURC i2t / t2i": ("test.uncertainty.aurc_i2t", "test.uncertainty.aurc_t2i"),
    "FN AUROC of σ": ("test.uncertainty.auroc_false_negative",),
    "of score": ("test.judgments.auroc_false_negative_score",),
    "RSUM dev": ("dev.rsum",),
}


def trained_reports(setting: str, row: str) -> list[dict[str, Any]]:
    """The stored reports of a row's seeds, by split."""
    runs = json.loads((ROOT / "docs/results/flickr8k-reports.json").read_text(encoding="utf-8"))["runs"]
    found = [run["report"] for name, run in runs.items() if name.startswith(f"{setting}/{row}/seed-")]
    results = [report["results"] if isinstance(report, dict) else report for report in found]  # stored in both forms
    return [{result["split"]: result for result in one} for one in results]


@pytest.mark.parametrize(
    ("head", "setting"),
    [("clean", "clean"), ("20% caption noise", "noise-20"), ("50% caption noise", "noise-50")],
)
def test_trained_towers(head: str, setting: str) -> None:
    names, shown = table(TRAINED_PAGE, head)
    assert [row[0] for row in shown] == list(dict.fromkeys(c["row"] for c in TRAINED if c["setting"] == setting))
    assert len(shown) >= 4
    for row in shown:
        cells = [c["values"] for c in TRAINED if (c["setting"], c["row"]) == (setting, row[0])]
        reports = trained_reports(setting, row[0])
        assert int(row[1]) == len(cells) == len(reports) > 0
        for cell, report in zip(cells, reports, strict=True):
            assert all(value is None or look_up(report, key) == value for key, value in cell.items())
        for name, text in zip(names[2:], row[2:], strict=True):
            for part, key in zip(text.split(" / "), TRAINED_KEYS[name], strict=text != "–"):
                found = [look_up(report, key) for report in reports]
                if text != "–":
                    check_number(part, [value for value in found if value is not None])
                else:
                    assert found == [None] * len(reports)


def test_the_readme_on_trained_towers() -> None:
    said = re.search(
        r"RSUM ([\d.]+ ± [\d.]+) and τ-c ([\d.]+ ± [\d.]+) \(3\s+seeds\), "
        r"InfoNCE ([\d.]+ ± [\d.]+) and ([\d.]+ ± [\d.]+);\s+"
        r"with a\s+fifth of\s+the\s+captions\s+wrong ([\d.]+) against ([\d.]+),\s+"
        r"with\s+half ([\d.]+) against ([\d.]+)",
        README,
    )
    assert said is not None
    places = [
        *(("clean", row, key) for row in ("vacsr-default", "infonce") for key in ("rsum", "judgments.expert_tau_c")),
        *((noise, row, "rsum") for noise in ("noise-20", "noise-50") for row in ("vacsr-default", "infonce")),
    ]
    for text, (setting, row, key) in zip(said.groups(), places, strict=True):
        cells = [c["values"] for c in TRAINED if (c["setting"], c["row"]) == (setting, row)]
        check_number(text, [cell[f"test.{key}"] for cell in cells])


def check_number(shown: str, found: list[float]) -> None:
    mean, _, spread = shown.replace("−.", "-0.").partition(" ± ")
    close = 0.00501 if "." in mean and len(mean.split(".")[1]) == 2 else 0.0501
    assert float(mean) == pytest.approx(statistics.fmean(found), abs=close)
    if spread:
        assert float(spread) == pytest.approx(statistics.stdev(found), abs=0.0501)


def test_the_image_steps() -> None:
    """The tables of steps are those of the stored benchmark runs."""
    runs = json.loads((ROOT / "docs/results/image-step.json").read_text(encoding="utf-8"))["runs"]
    found = {(r["step"], r["method"], r["mode"]): r["ms"] for r in runs["dino"]["rows"]}
    _, rows = table(TRAINED_PAGE, "ms a step")
    labels = {"towers alone, forward and backward": ("towers", "–"), "infonce, the whole step": ("training", "infonce")}
    for label, *shown in rows:
        step, method = labels.get(label, ("training", "vacsr"))
        for mode, text in zip(("eager", "graph", "compiled"), shown, strict=True):
            assert float(text) == pytest.approx(found[step, method, mode], abs=0.0501)
    now = {r["method"] if r["step"] == "training" else r["step"]: r["ms"] for r in runs["dino-now"]["rows"]}
    said = re.search(
        r"towers alone ([\d.]+) ms, the whole sigmoid step ([\d.]+), the\s+whole vacsr step ([\d.]+) ms", TRAINED_PAGE
    )
    assert said is not None
    for text, name in zip(said.groups(), ("towers", "sigmoid", "vacsr"), strict=True):
        assert float(text) == pytest.approx(now[name], abs=0.0501)
    _, rows = table(TRAINED_PAGE, "configuration")
    for label, *shown in rows:
        run = runs["b32-fp32" if "B/32" in label else "b16-fp32"]["rows"]
        method = "vacsr" if "vacsr" in label else "sigmoid"
        for place, step in ((0, "training"), (3, "inference")):
            (row,) = [r for r in run if r["step"] == step and r["method"] == method]
            figures = (row["ms"], 128e3 / row["ms"], row["peak_gib"])
            for text, value, close in zip(shown[place : place + 3], figures, (0.0501, 0.501, 0.00501), strict=True):
                assert float(text.replace(",", "")) == pytest.approx(value, abs=close)


METHODS_KEYS = {
    "RSUM": ("test.rsum",),
    "mAP@R i2t / t2i": ("test.i2t.map_at_r", "test.t2i.map_at_r"),
    "τ-c experts": ("test.judgments.expert_tau_c",),
    "τ-b crowd": ("test.judgments.crowd_tau_b",),
    "σ–R@1 i2t / t2i": ("test.uncertainty.corr_r1_i2t", "test.uncertainty.corr_r1_t2i"),
    "AURC i2t / t2i": ("test.uncertainty.aurc_i2t", "test.uncertainty.aurc_t2i"),
    "FN AUROC of σ": ("test.uncertainty.auroc_false_negative",),
    "of score": ("test.judgments.auroc_false_negative_score",),
}
SCENES_KEYS = {
    "exact mAP@R": ("test.exact.map_at_r",),
    "exact τ-b": ("test.exact.tau_b",),
    "RSUM": ("test.rsum",),
    "FN AUROC of σ": ("test.exact.auroc_false_negative",),
    "of score": ("test.exact.auroc_false_negative_score",),
    "σ–R@1 i2t / t2i": ("test.uncertainty.corr_r1_i2t", "test.uncertainty.corr_r1_t2i"),
}


@pytest.mark.parametrize(
    ("page", "folder", "head", "setting"),
    [
        ("results-methods.md", "noise", "clean", "clean"),
        ("results-methods.md", "noise", "20% caption noise", "noise-20"),
        ("results-methods.md", "noise", "50% caption noise", "noise-50"),
        ("results-scenes.md", "scenes", "4,000 scenes, 20 epochs", "4000-scenes-20-epochs"),
        ("results-scenes.md", "scenes", "1,000 scenes, 20 epochs", "1000-scenes-20-epochs"),
    ],
)
def test_pages_of_comparisons(page: str, folder: str, head: str, setting: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    stored = json.loads((ROOT / "docs/results" / folder / "results.json").read_text(encoding="utf-8"))
    keys = METHODS_KEYS if folder == "noise" else SCENES_KEYS
    names, rows = table(text, head)
    assert [row[0] for row in rows] == stored["rows"]
    for row in rows:
        cells = [c["values"] for c in stored["cells"] if (c["setting"], c["row"]) == (setting, row[0])]
        assert len(cells) == 3
        for name, shown in zip(names[1:], row[1:], strict=True):
            parts = shown.replace("**", "").split(" / ")
            for part, key in zip(parts, keys[name], strict=shown != "–"):
                if shown != "–":
                    check_number(part, [cell[key] for cell in cells])
                else:
                    assert all(cell[key] is None for cell in cells)


METHODS_PAGE = (ROOT / "docs/results-methods.md").read_text(encoding="utf-8")
RSUM, I2T, T2I, TAU = "test.rsum", "test.i2t.map_at_r", "test.t2i.map_at_r", "test.judgments.expert_tau_c"


def stored_values(folder: str, setting: str, row: str, key: str) -> list[float]:
    cells = json.loads((ROOT / "docs/results" / folder / "results.json").read_text(encoding="utf-8"))["cells"]
    found = [c["values"][key] for c in cells if (c["setting"], c["row"]) == (setting, row)]
    assert found
    return found


def test_the_parts_of_the_default() -> None:
    _, rows = table(METHODS_PAGE, "parts")
    assert [row[0] for row in rows] == ["vacsr-default", "default-no-correction", "default-no-cosine-loss"]
    places = [(setting, key) for setting in ("clean", "noise-50") for key in (RSUM, I2T, TAU)]
    for row, *shown in rows:
        for text, (setting, key) in zip(shown, places, strict=True):
            check_number(text.removesuffix("†"), stored_values("ablation", setting, row, key))


def test_the_points_of_the_sweeps_that_the_paper_tells_of() -> None:
    _, rows = table(METHODS_PAGE, "point")
    names = {"γ": "gamma", "β": "beta", "α": "alpha"}
    for point, _, here, _ in rows:
        said = re.match(r"([\d.]+)‡? / ([\d.]+)‡?, RSUM ([\d.]+)$", here)
        assert said is not None
        row = names.get(point[0], point[0]) + point[1:]
        for text, key in zip(said.groups(), (I2T, T2I, RSUM), strict=True):
            found = stored_values("sensitivity", "clean", row, key)
            check_number(text, found)
            assert len(found) == 3
    assert len(rows) == 7


@pytest.mark.parametrize(
    ("section", "folders", "elsewhere"),
    [
        ("Where the paper's order holds, and where not", ["noise"], set()),
        ("Ablations", ["ablation"], set()),
        ("Sweeps", ["sensitivity"], set()),
    ],
)
def test_every_rsum_in_the_text_is_stored_or_published(section: str, folders: list[str], elsewhere: set[str]) -> None:
    text = METHODS_PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    known = set(elsewhere)
    for folder in folders:
        stored = json.loads((ROOT / "docs/results" / folder / "results.json").read_text(encoding="utf-8"))
        means = [row for rows in stored["summaries"].values() for row in rows.values()]
        known |= {f"{row[key]['mean']:.1f}" for row in means for key in (RSUM, "dev.rsum")}
    groups = yaml.safe_load((ROOT / "tables/parts/published.yaml").read_text(encoding="utf-8"))
    for name in ("coco-b32", "coco-b32-noise"):
        known |= {f"{entry['values'][-1]:.1f}" for entry in groups[name]["entries"]}
    said = re.findall(r"(?<![\d.])\d{3}\.\d(?!\d)", text)
    assert [figure for figure in said if figure not in known] == []
    assert said


def test_every_rsum_of_the_order_on_towers_is_stored_or_published() -> None:
    text = TRAINED_PAGE.partition("\n## Where the paper's order holds, and where not\n")[2].partition("\n## ")[0]
    rows = {(c["setting"], c["row"]) for c in TRAINED}
    known = {f"{statistics.fmean(stored_values('flickr8k', setting, row, RSUM)):.1f}" for setting, row in rows}
    groups = yaml.safe_load((ROOT / "tables/parts/published.yaml").read_text(encoding="utf-8"))
    for name in ("coco-b32", "coco-b32-noise"):
        known |= {f"{entry['values'][-1]:.1f}" for entry in groups[name]["entries"]}
    said = re.findall(r"(?<![\d.])\d{3}\.\d(?!\d)", text)
    assert [figure for figure in said if figure not in known] == []
    assert len(said) > 20


def clean_tests(row: str) -> list[dict[str, Any]]:
    """Reports of a row's clean test split."""
    runs = json.loads((ROOT / "docs/results/noise/records.json").read_text(encoding="utf-8"))
    found = [run["report"]["test"] for run in runs if (run["row"], run["setting"]) == (row, "clean")]
    assert len(found) == 3
    return found


def test_sigma_of_the_first_answers() -> None:
    head, rows = table(METHODS_PAGE, "first K answers")
    assert head[1:] == [str(k) for k in range(1, 11)]
    for label, *shown in rows:
        way, row = label.split(", ")
        if row != "published":
            kept = [report["uncertainty"][f"topk_{way}"]["binned"] for report in clean_tests(row)]
            for text, values in zip(shown, zip(*kept, strict=True), strict=True):
                check_number(text, list(values))
    assert [label for label, *_ in rows[::3]] == ["i2t, published", "t2i, published"]


def test_the_level_of_scores() -> None:
    _, rows = table(METHODS_PAGE, "scores of all test pairs")
    for label, *shown in (row for row in rows if not row[0].startswith("published")):
        kept = [report["scores"]["score"]["all_stats"] for report in clean_tests(label.split(", ")[0])]
        for text, key in zip(shown, ("mean", "median", "std"), strict=True):
            mean = statistics.fmean(one[key] for one in kept)
            assert text.replace("−", "-") == f"{mean:.{len(text.split('.')[1])}f}"
    assert len(rows) == 7


def test_two_networks_for_everyone() -> None:
    """All are of the benchmark; NCR's and BiCro's own two are the runs of the table above."""
    runs = json.loads((ROOT / "docs/results/averaged-runs.json").read_text(encoding="utf-8"))["runs"]
    folders = {"clean": "clean", "20% noise": "noise-20", "50% noise": "noise-50"}
    kinds, rows = table(METHODS_PAGE, "labels")
    assert kinds[2:] == ["one network", "its own two", "two trained apart"]
    for labels, method, *figures in rows:
        if method in ("ncr", "bicro"):
            check_number(figures[1], stored_values("noise", folders[labels], method, RSUM))
        found = runs[f"{folders[labels]}/{method}"]
        for shown, kind in zip(figures, kinds[2:], strict=True):
            assert (shown == "–") == (not found[kind])
            if shown != "–":
                check_number(shown, [run["rsum"] for run in found[kind]])
    assert {f"{folders[labels]}/{method}" for labels, method, *_ in rows} == runs.keys()
    number = r"([\d.]+)"
    clean = re.search(rf"ahead on clean labels \({number}, NCR {number}, BiCro {number}\)", README)
    noisy = re.search(rf"with half the captions wrong \({number}, NCR {number}, BiCro {number};", README)
    for setting, said in (("clean", clean), ("noise-50", noisy)):
        assert said is not None
        for shown, method in zip(said.groups(), ("vacsr-default", "ncr", "bicro"), strict=True):
            check_number(shown, [run["rsum"] for run in runs[f"{setting}/{method}"]["two trained apart"]])


def test_the_rivals_presets() -> None:
    """Means, deviations and marks; and where the published settings are clearly ahead, as the page says."""
    tested = json.loads((ROOT / "docs/results/presets/results.json").read_text(encoding="utf-8"))["comparisons"]
    marks = {
        (c["setting"], c["row"]): "" if c["low"] <= 0 <= c["high"] else "†" if c["low"] > 0 else "‡"
        for c in tested
        if c["key"] == RSUM
    }
    _, rows = table(METHODS_PAGE, "method")
    assert [row[0] for row in rows] == ["infonce", "vse", "pcme", "pcmepp", "daa", "ncr", "bicro", "npc"]
    for method, *figures in rows:
        other = "pcme-own" if method == "pcme" else f"{method}-paper"
        for place, setting in enumerate(("clean", "noise-20", "noise-50")):
            published, default = figures[2 * place : 2 * place + 2]
            own = stored_values("presets", setting, other, RSUM)
            assert len(own) == (1 if method == "pcme" else 3)
            check_number(published.rstrip("†‡"), own)
            check_number(default, stored_values("presets", setting, method, RSUM))
            check_number(default, stored_values("noise", setting, method, RSUM))
            assert published[len(published.rstrip("†‡")) :] == marks[setting, other]
    ahead = {(setting, row) for (setting, row), mark in marks.items() if mark == "†"}
    assert ahead == {("clean", "daa-paper"), ("noise-20", "vse-paper"), ("noise-50", "vse-paper")}


def test_the_how_to_on_label_noise() -> None:
    _, rows = table((ROOT / "docs/how-to/label-noise.md").read_text(encoding="utf-8"), "method")
    for row, networks, *shown in rows:
        assert int(networks) == (2 if row in ("ncr", "bicro") else 1)
        for text, setting in zip(shown, ("noise-20", "noise-50"), strict=True):
            check_number(text, stored_values("noise", setting, row, RSUM))
    assert len(rows) == 7


def fewshot_rows(setting: str) -> dict[str, dict[str, str]]:
    """The stored table of a setting by method and column."""
    text = (ROOT / "docs/results/scenes-fewshot/table.md").read_text(encoding="utf-8")
    part = text.split(f"## {setting}\n")[1].split("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"
    ]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_few_shot_page_quotes_the_stored_table() -> None:
    text = (ROOT / "docs/results-fewshot.md").read_text(encoding="utf-8")
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    plain, outline, domain = (fewshot_rows(name) for name in ("base-to-novel", "outline", "domain"))
    expected = [
        [
            name,
            *(plain[name][column] for column in ("base", "new", "HM")),
            *(outline[name][column] for column in ("base", "new", "HM")),
            *(domain[name][column] for column in ("source", "average")),
        ]
        for name in plain
    ]
    assert shown[2:] == expected
    assert len(expected) == 10
