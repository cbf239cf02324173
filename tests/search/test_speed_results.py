"""The figures of search and service in docs are those of the stored data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def stored(name: str) -> Any:
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_a_million_vectors() -> None:
    text, data = page("performance.md"), stored("index.json")
    assert (data["settings"]["vectors"], data["settings"]["dim"], data["settings"]["candidates"]) == (10**6, 512, 200)
    for row in data["rows"]:
        filled = ("–" if row[key] is None else f"{row[key]:,.0f}" for key in ("fill_rate", "disk_mb"))
        cells = [row["way"], f"{row['p50_ms']:,.1f}", f"{row['p95_ms']:,.1f}", *filled]
        assert "| " + " | ".join(cells) + " |" in text
    half = next(row for row in data["rows"] if row["way"] == "exact float16: search")
    assert f"1 million vectors in {half['p50_ms']:.0f} ms of two cores: {1000 / half['p50_ms']:.0f} million" in page(
        "scale.md"
    )


def test_sixty_four_clients() -> None:
    text, data = page("how-to/serve.md"), stored("service-load.json")
    assert (data["clients"], data["seconds"], data["faults"]) == (64, 60, {})
    assert data["statuses"] == {"200": data["answers"]}
    assert f"{data['answers']:,} requests, {data['per_second']:.0f} a second, all answered with 200" in text
    for path, name in (("/search", "`/search`, text or image"), ("/score", "`/score`"), ("/photo/", "`/photo/ID`")):
        assert f"| {name} | " + " | ".join(f"{data['ms'][path][part]:.0f}" for part in ("p50", "p95", "p99")) in text
    held = data["mib"]
    low, high = min(held["load"]), max(held["load"])
    assert f"held {held['warm']:.0f} MiB after a warm-up, {low:.0f} to {high:.0f} MiB during the load" in text
    assert f"and {held['rested']:.0f} MiB five seconds after it" in text
