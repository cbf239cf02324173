"""The figures of docs/results-audit.md are those of docs/results/audit.json, and its drawing is drawn from them."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = json.loads((ROOT / "docs/results/audit.json").read_text(encoding="utf-8"))
RECORDS = DATA["records"]
PAGE = (ROOT / "docs/results-audit.md").read_text(encoding="utf-8")
KEYS = {"precision at n": "precision_at_n", "AP": "ap", "AUROC": "auroc"}
SETTINGS = {
    "20% noise": "noise-20",
    "50% noise": "noise-50",
    "judged-test": "judged-test",
    "judged-test, trained with 20% noise": "judged-test-noise-20",
    "scenes": "scenes",
}
CURVES = {
    "recall at 20%": "noise-20",
    "recall at 50%": "noise-50",
    "recall, judged-test": "judged-test",
    "recall, scenes": "scenes",
}
LISTED = ("vacsr audit", "vacsr cosine", "infonce cosine", "infonce loss GMM")


def table(first: str) -> tuple[list[str], list[list[str]]]:
    """The table whose head begins with ``first``: head and rows as cells."""
    lines = PAGE.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    block = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        block.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return block[0], block[2:]


def found(setting: str, signal: str) -> list[dict[str, Any]]:
    records = [one for one in RECORDS if (one["setting"], one["signal"]) == (setting, signal)]
    assert records, (setting, signal)
    assert len({one["seed"] for one in records}) == len(records)
    return records


def check(shown: str, values: list[float]) -> None:
    mean, _, spread = shown.partition(" ± ")
    assert float(mean) == pytest.approx(statistics.fmean(values), abs=0.0501)
    if spread:
        assert float(spread) == pytest.approx(statistics.stdev(values), abs=0.00501)


@pytest.mark.parametrize(("head", "setting"), SETTINGS.items())
def test_the_tables(head: str, setting: str) -> None:
    names, rows = table(head)
    measured = {one["signal"] for one in RECORDS if one["setting"] == setting}
    if not setting.startswith("noise"):  # whose share of the rival image has a table of its own
        measured = {signal for signal in measured if "rival image" not in signal}
    assert {row[0] for row in rows} == measured
    for row in rows:
        records = found(setting, row[0])
        assert len(records) == 3 or "models" in names
        for name, shown in zip(names[1:], row[1:], strict=True):
            if name == "models":
                assert int(shown) == len(records)
            else:
                check(shown, [record[KEYS[name]] for record in records])


@pytest.mark.parametrize(("head", "setting"), CURVES.items())
def test_the_curves(head: str, setting: str) -> None:
    names, rows = table(head)
    assert set(LISTED) <= {row[0] for row in rows}
    assert any("laplace-coupled" in row[0] for row in rows)
    for row in rows:
        for recall, shown in zip(names[1:], row[1:], strict=True):
            check(shown, [one["precision_at_recall"][recall] for one in found(setting, row[0])])


def test_what_the_ideas_add_to_missing_matches() -> None:
    names, rows = table("AP")
    for row in rows:
        for setting, shown in zip(names[1:], row[1:], strict=True):
            if shown != "–":
                check(shown, [one["ap"] for one in found(setting, row[0])])
    for setting in names[1:]:
        for method in ("vacsr", "infonce"):
            cosine, plain, plus, minus = (
                mean_of(setting, f"{method} {signal}")
                for signal in ("cosine", "audit", "audit + rival image", "audit − rival image")
            )
            assert plain > cosine  # "with every model and in every setting"
            assert minus < plain
            assert abs(plus - plain) < 1.7


def mean_of(setting: str, signal: str, key: str = "ap") -> float:
    return statistics.fmean(one[key] for one in found(setting, signal))


@pytest.mark.parametrize(
    ("said", "setting", "ahead", "behind", "key"),
    [
        ("vacsr's by {} points of AP and", "judged-test-noise-20", "infonce audit", "vacsr audit", "ap"),
        ("of AP and {} of precision at n", "judged-test-noise-20", "infonce audit", "vacsr audit", "precision_at_n"),
        ("vacsr is ahead by {} points of AP:", "judged-test-noise-20", "vacsr cosine", "infonce cosine", "ap"),
        ("by {} points of AP on average", "scenes", "infonce audit", "vacsr audit", "ap"),
        ("by the cosine alone, by {}.", "scenes", "vacsr cosine", "infonce cosine", "ap"),
        ("InfoNCE differ by {}, and vacsr", "judged-test", "vacsr audit", "infonce audit", "ap"),
        ("{} of the loss GMM", "noise-20", "vacsr audit", "infonce loss GMM", "precision_at_n"),
        ("{} of InfoNCE's cosine", "noise-20", "vacsr audit", "infonce cosine", "precision_at_n"),
    ],
)
def test_what_the_page_says_of_differences(said: str, setting: str, ahead: str, behind: str, key: str) -> None:
    difference = mean_of(setting, ahead, key) - mean_of(setting, behind, key)
    assert said.format(f"{difference:.1f}") in " ".join(PAGE.split())


def test_infonce_is_ahead_in_each_world() -> None:
    for theirs, ours in zip(found("scenes", "infonce audit"), found("scenes", "vacsr audit"), strict=True):
        assert theirs["seed"] == ours["seed"]
        assert theirs["ap"] > ours["ap"]
        assert f"{ours['n']:,}" in PAGE


def test_the_bar_at_20_percent() -> None:
    """Ahead of every listed rival with every seed, as the page says."""
    signals = {one["signal"] for one in RECORDS if one["setting"] == "noise-20"} - {"vacsr audit"}
    for rival in signals:
        for ours, theirs in zip(found("noise-20", "vacsr audit"), found("noise-20", rival), strict=True):
            assert ours["seed"] == theirs["seed"]
            assert ours["precision_at_n"] > theirs["precision_at_n"], rival


def test_what_the_rival_image_adds() -> None:
    """The reason that the code gives for its share of the suspicion."""
    told = (ROOT / "src/vacsr/search/suspects.py").read_text(encoding="utf-8")
    both = zip(found("noise-20", "vacsr audit"), found("noise-20", "vacsr agreement"), strict=True)
    first, *others = [f"{ours['precision_at_n'] - plain['precision_at_n']:.2f}" for ours, plain in both]
    assert f"adds {first} points of precision at n; with seeds 1 and 2 it adds {' and '.join(others)}." in " ".join(
        told.split()
    )


def test_the_cost() -> None:
    """The page scales the walks that were timed to COCO's 113,287 images and 566,435 captions."""
    whole, part = DATA["walks"]
    coco = 113_287 * 566_435
    for walk in (whole, part):
        said = f"{walk['images']:,} images × {walk['captions']:,} captions"
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {said}"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        pairs = walk["images"] * walk["captions"]
        assert float(cells[1]) == pytest.approx(walk["cpu_seconds"], abs=0.0501)
        assert float(cells[2].removesuffix(" million")) == pytest.approx(pairs / walk["cpu_seconds"] / 1e6, abs=0.501)
        assert float(cells[3]) == pytest.approx(coco / pairs * walk["cpu_seconds"] / 60, abs=0.501)


def test_the_plot_is_drawn_from_the_data() -> None:
    spec = importlib.util.spec_from_file_location("_audit_figure", ROOT / "benchmarks/_audit_figure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    points = dict(module.curve(RECORDS, "noise-20", "vacsr audit"))
    start = statistics.fmean(one["precision_at_recall"]["50"] for one in found("noise-20", "vacsr audit"))
    assert points[50.0] == pytest.approx(start)
    assert "](results/audit.svg)" in PAGE
    stored = (ROOT / "docs/results/audit.svg").read_text(encoding="utf-8")
    for text in (module.draw(RECORDS), stored):
        titles = [title for title, _ in module.PANELS.values()]
        assert all(label.replace("'", "&#x27;") in text or label in text for label in (*titles, *module.SIGNALS))
