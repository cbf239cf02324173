"""The page quotes what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
STORED = json.loads((ROOT / "docs/results/scoring.json").read_text(encoding="utf-8"))
SECTION = PAGE.split("## Scoring all pairs on a GPU", 1)[1].split("\n## ", 1)[0]
ROWS = {
    "seconds": "seconds", "rounds": "rounds", "TFLOP/s": "tflops", "× the bf16 ceiling's rate": "x_ceiling",
    "× the trunk's products": "x_ceiling", "× the best sustained": "x_sustained",
    "faster than paper-style fp32": "x_fp32", "TF32": "x_tf32",
}  # fmt: skip
RANKED = {
    "top-10 kept": "overlap", "texts of an image kept": "overlap", "images of a text kept": "overlap_images",
    "Kendall's τ": "tau", "error / spread": "rms_over_std",
}  # fmt: skip


def tables() -> list[list[dict[str, str]]]:
    """Each table of the section, its lines by the heads of the columns."""
    found: list[list[list[str]]] = [[]]
    for line in SECTION.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[dict(zip(table[0], cells, strict=True)) for cells in table[2:]] for table in found if table]


def table_with(head: str) -> list[dict[str, str]]:
    return next(table for table in tables() if head in table[0])


def agrees(shown: str, value: float) -> bool:
    """Within half of the last digit shown; a percent is a share.

    >>> agrees("1.5×", 1.46), agrees("1.5×", 1.44), agrees("99.9%", 0.9988), agrees("1,089", 1089.2)
    (True, False, True, True)
    """
    digits = shown.rstrip("×%").replace(",", "")
    scaled = 100 * value if shown.endswith("%") else value
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - scaled) <= 0.5 * 10.0**-decimals + 1e-9


def check(line: dict[str, str], row: dict[str, Any], keys: dict[str, str]) -> None:
    """Every figure of a line that is shown is the row's."""
    for head, shown in line.items():
        if head in keys and shown != "–":
            assert agrees(shown, row[keys[head]]), (line, head, row[keys[head]])


def test_scoring_on_a_gpu() -> None:
    shown = table_with("seconds")
    for row in STORED["rows"]:
        wanted = row["dtype"], f"{row['seconds']:.3f}"
        line = shown.pop([(line["dtype"], line["seconds"]) for line in shown].index(wanted))
        check(line, row, ROWS)
        assert "–" not in (line["seconds"], line["faster than paper-style fp32"]) or row["x_fp32"] < 1
    assert not shown


@pytest.mark.skipif(STORED["schema"] < 2, reason="the stored run has one ceiling and no rounds")
def test_ceilings_and_rounds_on_a_gpu() -> None:
    assert {"rounds", "× the trunk's products", "× the best sustained"} <= set(table_with("seconds")[0])
    shown = {(line["product"], line["dtype"]): line["TFLOP/s"] for line in table_with("product")}
    for ceiling in (ceiling for ceiling in STORED["ceilings"] if ceiling.get("sustained", True)):
        assert agrees(shown[ceiling["name"], ceiling["dtype"]], ceiling["tflops"])
    best = max(row["tflops"] for row in STORED["ceilings"] if row["dtype"] == "bf16" and row.get("sustained", True))
    for row in STORED["rows"]:
        assert row["x_sustained"] == pytest.approx(row["tflops"] / best)


def test_rankings_on_a_gpu() -> None:
    lines = {line["scores"]: line for line in table_with("scores")}
    for name in ("fp16", "bf16", "fp8"):
        check(lines[f"kernel, {name}"], STORED["rankings"][f"{name} against fp32"], RANKED)
    if STORED["schema"] >= 2:
        rescored = next(line for name, line in lines.items() if name.startswith("kernel, fp8, 30 candidates"))
        check(rescored, STORED["rankings"]["fp8 rescored against fp32"], RANKED)
        default = next(line for name, line in lines.items() if name.startswith("default topk"))
        check(default, STORED["rankings"]["default topk against fp32"], RANKED)
