"""The pages quote the stored measurements of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def stored(name: str) -> Any:
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


def last_digit(text: str) -> float:
    """Half of it, and a little."""
    return 0.501 * 10.0 ** -len(text.rstrip("%").partition(".")[2])


def shows(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value, abs=last_digit(text)), text


def test_inference_beside_pcmepp() -> None:
    rows = stored("image-step-vitb32.json")["inference"]["rows"]
    times = {row["method"]: row["ms"] for row in rows if row["step"] == "inference"}
    said = re.search(
        r"([\d.]+) ms with PCME\+\+'s head, ([\d.]+) with the cosine .*?and ([\d.]+) with .*?: ([\d.]+) times PCME",
        PAGE,
        re.S,
    )
    assert said is not None
    numbers = (times["pcmepp"], times["sigmoid"], times["vacsr"], times["vacsr"] / times["pcmepp"])
    for text, value in zip(said.groups(), numbers, strict=True):
        shows(text, value)


def test_what_is_said_of_the_efficiency_of_a_step() -> None:
    """By setting in the order of the page: eager, compiled, ViT-B/16."""
    text = (ROOT / "docs/results-efficiency.md").read_text(encoding="utf-8")
    cells = stored("efficiency/results.json")["cells"]
    values = {(cell["setting"], cell["row"]): cell["values"] for cell in cells}

    def more(key: str, than: str) -> list[float]:
        settings = ("vit-b32", "vit-b32-compiled", "vit-b16")
        return [100 * (values[s, "vacsr-paper"][f"step.{key}"] / values[s, than][f"step.{key}"] - 1) for s in settings]

    claims = {
        r"adds ([\d.]+)% of time to cosine scores \(compiled ([\d.]+)%, ViT-B/16 ([\d.]+)%\)": (
            "inference.ms",
            "sigmoid",
        ),
        r"stays ([\d.]+)% \*\*below\*\* PCME\+\+ \(([\d.]+)%, ([\d.]+)%\)": ("inference.ms", "pcmepp"),
        r"([\d.]+)% more than the sigmoid loss \(compiled ([\d.]+)%, ViT-B/16 ([\d.]+)%\)": ("training.ms", "sigmoid"),
        r"([\d.]+)% less than PCME\+\+ \(([\d.]+)%, ([\d.]+)%\)": ("training.ms", "pcmepp"),
        r"Memory \+([\d.]+)% over the sigmoid loss \(([\d.]+)%, ([\d.]+)%\)": ("training.peak_gib", "sigmoid"),
    }
    for said, (key, than) in claims.items():
        (found,) = re.findall(said, text)
        for shown, value in zip(found, more(key, than), strict=True):
            shows(shown, abs(value))
    eager, compiled, large = more("inference.peak_gib", "pcmepp")
    assert (round(eager), round(compiled), round(large)) == (17, 17, -1)
    assert 2 * values["vit-b32", "pcmepp"]["step.parameters"] == pytest.approx(327.07, abs=0.01)
    shows("3.9", -more("parameters", "pcmepp")[0])
