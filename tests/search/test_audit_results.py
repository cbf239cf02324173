"""The figures of docs/results-audit.md are those of docs/results/audit.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = json.loads((ROOT / "docs/results/audit.json").read_text(encoding="utf-8"))["records"]
PAGE = (ROOT / "docs/results-audit.md").read_text(encoding="utf-8")
SEEDS = {"noise-20": 3, "noise-50": 3}
KEYS = {"precision at n": "precision_at_n", "AP": "ap", "AUROC": "auroc"}


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


def found(setting: str, signal: str) -> list[dict[str, float]]:
    records = [one for one in RECORDS if (one["setting"], one["signal"]) == (setting, signal)]
    assert len(records) == SEEDS.get(setting, len(records)) > 0
    return records


def check(shown: str, values: list[float]) -> None:
    mean, _, spread = shown.partition(" ± ")
    assert float(mean) == pytest.approx(statistics.fmean(values), abs=0.0501)
    if spread:
        assert float(spread) == pytest.approx(statistics.stdev(values), abs=0.00501)


@pytest.mark.parametrize(
    ("head", "setting"),
    [("20% noise", "noise-20"), ("50% noise", "noise-50"), ("judged-test", "judged-test"), ("scenes", "scenes")],
)
def test_the_tables(head: str, setting: str) -> None:
    names, rows = table(head)
    assert {row[0] for row in rows} == {one["signal"] for one in RECORDS if one["setting"] == setting}
    for row in rows:
        records = found(setting, row[0])
        for name, shown in zip(names[1:], row[1:], strict=True):
            if name == "models":
                assert int(shown) == len(records)
            else:
                check(shown, [record[KEYS[name]] for record in records])


@pytest.mark.parametrize(("head", "setting"), [("recall at 20%", "noise-20"), ("recall at 50%", "noise-50")])
def test_the_curves(head: str, setting: str) -> None:
    names, rows = table(head)
    assert len(rows) >= 4
    for row in rows:
        for recall, shown in zip(names[1:], row[1:], strict=True):
            values = [one["precision_at_recall"][recall] for one in found(setting, row[0])]
            check(shown, values)


def test_the_bar_at_20_percent() -> None:
    """Ahead of every listed rival with every seed, as the page says."""
    signals = {one["signal"] for one in RECORDS if one["setting"] == "noise-20"} - {"vacsr audit"}
    for rival in signals:
        for ours, theirs in zip(found("noise-20", "vacsr audit"), found("noise-20", rival), strict=True):
            assert ours["seed"] == theirs["seed"]
            assert ours["precision_at_n"] > theirs["precision_at_n"], rival
