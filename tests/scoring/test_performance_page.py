"""The page quotes what is stored."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
STORED = json.loads((ROOT / "docs/results/scoring.json").read_text(encoding="utf-8"))


def test_scoring_on_a_gpu() -> None:
    section = PAGE.split("## Scoring all pairs on a GPU", 1)[1].split("\n## ", 1)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    shown = {(cells[2], cells[3]): cells[4:] for cells in lines if len(cells) == 7}
    for row in STORED["rows"]:
        cells = shown.pop((row["dtype"], f"{row['seconds']:.3f}"))
        slow = row["x_fp32"] < 10
        assert cells[0] == f"{row['x_ceiling']:.2f}"
        assert cells[1] == f"{row['x_fp32']:.{1 if slow else 0}f}×".replace("1.0×", "1×")
        assert slow or cells[2] == f"{row['x_tf32']:.1f}×"
    assert {key[0] for key in shown} <= {"dtype", "---"}
    for name in ("fp16", "bf16", "fp8"):
        figures = STORED["rankings"][f"{name} against fp32"]
        (cells,) = [cells for cells in lines if cells[0] == f"kernel, {name}" and len(cells) == 4]
        assert abs(float(cells[1].rstrip("%")) / 100 - figures["overlap"]) < (6e-5 if name == "fp16" else 6e-4)
        assert abs(float(cells[2]) - figures["tau"]) < 6e-4
        assert abs(float(cells[3].rstrip("%")) / 100 - figures["rms_over_std"]) < 6e-4
