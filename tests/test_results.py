"""The figures in README and on the results page are those of the stored data."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

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
