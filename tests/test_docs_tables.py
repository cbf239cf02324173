"""The tables of docs/ are filled from docs/results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script("tools/docs_tables.py")


def test_no_table_is_stale(tool: Any) -> None:
    stale = [
        f"{page}: {head}"
        for (page, head), cell in tool.tables().items()
        if tool.filled(text := (ROOT / "docs" / page).read_text(encoding="utf-8"), head, cell) != text
    ]
    assert stale == [], "run: python tools/docs_tables.py"


def test_a_wrong_number_is_replaced_and_nothing_else(tool: Any) -> None:
    head, cell = next((head, cell) for (_, head), cell in tool.tables().items() if head == "clean labels")
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    row = next(line for line in page.split(f"| {head} |", 1)[1].splitlines() if line.startswith("| infonce |"))
    rsum = row.split("|")[2].strip()
    assert tool.filled(page.replace(row, row.replace(rsum, "1.0")), head, cell) == page


def test_a_missing_table_is_named(tool: Any) -> None:
    with pytest.raises(SystemExit, match="clean"):
        tool.filled("no table", "clean", lambda cells, heading: None)


def test_stored_results_stay_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "docs/results").rglob("*") if path.is_file()]
    assert sum(sizes) <= 1_500_000
