"""The figures of docs/results-abstain.md are those of docs/results/abstain.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = json.loads((ROOT / "docs/results/abstain.json").read_text(encoding="utf-8"))["records"]
PAGE = (ROOT / "docs/results-abstain.md").read_text(encoding="utf-8")
CHECKS = {(one["name"], one["gallery"], one["direction"]): one for one in RECORDS if one["kind"] == "check"}
FRESH = [one for one in CHECKS.values() if one["name"].startswith("resplit") and not one["name"].endswith("last")]
LAST = [one for one in CHECKS.values() if one["name"].endswith("last")]
OFFICIAL = [one for one in CHECKS.values() if one["name"].startswith("official")]


def table(first: str) -> list[list[str]]:
    """The rows, as cells, of the table whose head begins with ``first``."""
    lines = PAGE.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    block = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        block.append([cell.strip() for cell in line.strip("|").split("|")])
    return block


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def shown(one: dict[str, Any]) -> list[str]:
    """Share answered and share wrong with its interval."""
    if not one["answered"]:
        return ["0.0%", "–"]
    interval = f"({100 * one['low']:.1f}–{100 * one['high']:.1f})"
    return [percent(one["answered"] / one["queries"]), f"{percent(one['wrong'] / one['answered'])} {interval}"]


@pytest.mark.parametrize(
    ("head", "prefix", "records"),
    [
        ("fresh split", "resplit-", FRESH),
        ("last epoch", "resplit-", LAST),
        ("official split", "official/", OFFICIAL),
    ],
)
def test_every_cell_is_shown(head: str, prefix: str, records: list[dict[str, Any]]) -> None:
    rows = table(head)
    for name, gallery, *cells in rows:
        both = (CHECKS[prefix + name, int(gallery), direction] for direction in ("i2t", "t2i"))
        assert cells == [cell for one in both for cell in shown(one)]
    assert 2 * len(rows) == sum(one["gallery"] < 500 for one in records)
    assert not any(one["answered"] for one in records if one["gallery"] == 500)  # as the page says


def test_the_counts_in_the_text() -> None:
    answering = [one for one in FRESH if one["answered"]]
    above = [one for one in answering if one["wrong"] > 0.1 * one["answered"]]
    assert (
        f"on fresh splits {len(answering) - len(above)} of {len(answering)} cells that answer keep the promise" in PAGE
    )
    assert not any(one["low"] > 0.1 for one in answering)  # none significantly
    assert len(answering) - len(above) >= 0.9 * len(answering)  # what is promised
    told = [one for one in OFFICIAL if one["answered"]]
    over = sum(one["wrong"] > 0.1 * one["answered"] for one in told)
    assert f"{over} of {len(told)} cells that answer are above 10%; at 500" in PAGE


def test_the_halves() -> None:
    for gallery, direction, way, answered, wrong, holds, silent in table("halves"):
        key = (int(gallery), direction, way)
        found = [
            one for one in RECORDS
            if one["kind"] == "halves" and (one["gallery"], one["direction"], one["way"]) == key
        ]  # fmt: skip
        given = sum(one["answered"] for one in found)
        assert answered == percent(sum(one["answered"] / one["queries"] for one in found) / len(found))
        assert wrong == (percent(sum(one["wrong"] for one in found) / given) if given else "–")
        assert holds == f"{sum(one['wrong'] <= 0.1 * one['answered'] for one in found)}/{len(found)}"
        assert int(silent) == sum(not one["answered"] for one in found)


def test_ways_to_certify_in_simulated_worlds() -> None:
    found = {(one["alike"], one["risk"]): one for one in RECORDS if one["kind"] == "simulate"}
    rows = table("alike")
    for alike, risk, *cells in rows:
        one = found.pop((float(alike), round(float(risk.rstrip("%")) / 100, 3)))
        assert cells == [percent(one[way]) for way in ("betting", "normal", "hoeffding_bentkus")]
        assert one["risk"] < 0.1 or one["betting"] <= one["level"]  # no more errors than are allowed
        settings = [one[key] for key in ("images", "choosing", "captions", "coverage", "level", "rounds")]
        assert settings == [600, 200, 5, 0.5, 0.1, 2000]  # as the page says
    assert not found


def test_counts_in_galleries_of_other_sizes() -> None:
    found = [one for one in RECORDS if one["kind"] == "sizes"]
    by_size = {(one["name"], one["direction"], one["gallery"]): one["wrong"] / one["answered"] for one in found}
    for name, direction, *cells in table("fitted at 100"):
        shares = [by_size.pop((f"resplit-{name}", direction, size)) for size in (80, 90, 100, 102, 110, 120)]
        assert cells == [percent(share) for share in shares]
        assert shares[5] > shares[2]  # why a larger index has no promise
    assert not by_size


def test_what_else_was_measured_on_the_official_split() -> None:
    for model, direction, absent, own, calibrated in table("model at 100"):
        one = CHECKS[f"official/{model}", 100, direction]
        assert [absent, own, calibrated] == [percent(one[key]) for key in ("absent", "ece_own", "ece")]
    for name, gallery, *cells in table("λ"):
        full = f"resplit-{name}" if "/" in name else f"official/{name}"
        for direction, part in (("i2t", cells[:4]), ("t2i", cells[4:])):
            one = CHECKS[full, int(gallery), direction]
            assert part == [
                f"{one['lambda']:.3g}",
                percent(one["r1"]),
                percent(one["r1_lambda"]),
                f"{one['sigma_weight']:g}",
            ]
