"""The page of performance quotes what is stored: steps of training and inference, dense and in tiles."""

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


def table(head: str) -> list[dict[str, str]]:
    """The lines of the table that begins so, by their heads."""
    lines = PAGE[PAGE.index(f"| {head} |") :].split("\n\n", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


def last_digit(text: str) -> float:
    """Half of it, and a little."""
    return 0.501 * 10.0 ** -len(text.rstrip("%").partition(".")[2])


def shows(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value, abs=last_digit(text)), text


def test_what_the_adapter_adds_to_a_training_step() -> None:
    rows = stored("image-step-vitb32.json")["training"]["rows"]
    training = [row for row in rows if row["step"] == "training"]
    (products,) = [row for row in rows if row["step"] == "products"]
    lines = table("training step")
    assert [row["tile"] for row in training] == [0, 0, "auto"]
    assert len(lines) == len(training)
    for line, row in zip(lines, training, strict=True):
        shows(line["ms"], row["ms"])
        shows(line["peak GiB"], row["peak_gib"])
        if row["method"] != "sigmoid":
            added = row["ms"] - training[0]["ms"]
            shows(line["added ms"], added)
            shows(line["× the adapter's products"], added / products["ms"])
            shows(line["added memory"], 100 * (row["peak_gib"] / training[0]["peak_gib"] - 1))
    said = re.search(r"Its (\d+) GFLOP of products would take ([\d.]+) ms .* \((\d+) TFLOP/s\)", PAGE)
    assert said is not None
    for text, key in zip(said.groups(), ("gflop", "ms", "tflops"), strict=True):
        shows(text, products[key])


def test_inference_beside_pcmepp() -> None:
    rows = stored("image-step-vitb32.json")["inference"]["rows"]
    found = {row["method"]: row["ms"] for row in rows if row["step"] == "inference"}
    said = re.search(
        r"([\d.]+) ms with PCME\+\+'s head, ([\d.]+) with the cosine .*?and ([\d.]+) with .*?: ([\d.]+) times PCME",
        PAGE,
        re.S,
    )
    assert said is not None
    figures = (found["pcmepp"], found["sigmoid"], found["vacsr"], found["vacsr"] / found["pcmepp"])
    for text, value in zip(said.groups(), figures, strict=True):
        shows(text, value)


def test_the_loss_in_tiles() -> None:
    runs = stored("tiled-training.json")["runs"]
    for line in table("loss | B"):
        way = ("graph" if line["replayed as"] == "graph" else "eager") + (", fused" if "fused" in line["loss"] else "")
        rows, kind = runs[way]["rows"], "dense, fused" if "fused" in line["loss"] else "dense"
        batch = int(number(line["B"]))
        (row,) = [row for row in rows if (row["loss"], row["batch"]) == (line["loss"], batch)]
        (dense,) = [row for row in rows if (row["loss"], row["batch"]) == (kind, 1024)]
        shows(line["ms"], row["ms"])
        shows(line["× its products"], row["ratio"])
        shows(line["peak GiB"], row["peak_gib"])
        shows(line["by the pair"], row["ms"] / dense["ms"] * (1024 / batch) ** 2)
        share = dense["peak_gib"] / row["peak_gib"]
        shows(line["of dense at 1,024"].removeprefix("1/"), share)
    assert runs["graph, fused"]["graph"]
    assert not runs["eager, fused"]["graph"]


def test_the_front_page() -> None:
    """README quotes the same runs."""
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(r"the adapter adds (\d+)% of time \(([\d.]+) times its products\) and ([\d.]+)% of memory", front)
    assert said is not None
    rows = stored("image-step-vitb32.json")["training"]["rows"]
    plain, whole = rows[1], rows[-1]
    (products,) = [row for row in rows if row["step"] == "products"]
    shows(said[1], 100 * (whole["ms"] / plain["ms"] - 1))
    shows(said[2], (whole["ms"] - plain["ms"]) / products["ms"])
    apart = {
        cell["row"]: cell["values"]
        for cell in stored("efficiency/results.json")["cells"]
        if "compiled" in cell["setting"]
    }
    peaks = [apart[row]["step.training.peak_gib"] for row in ("vacsr-default", "sigmoid")]
    shows(said[3], 100 * (peaks[0] / peaks[1] - 1))


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
