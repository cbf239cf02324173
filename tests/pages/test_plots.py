"""Plots: every number is drawn and spoken, hostile names stay text, and the same data give the same bytes."""

import re
from importlib.resources import files
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.pages.plots import WIDTH, Histogram, Line, histogram_plot, line_plot, palette, value_range

X = np.arange(1.0, 4.0)


def drawn(*lines: Line, **options: object) -> str:
    return line_plot(lines, **{"title": "t", "x_label": "x", "y_label": "y", **options})  # type: ignore[arg-type]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def label(svg: str) -> str:
    return ElementTree.fromstring(svg).attrib["aria-label"]


def dots(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r'<use href="#[^"]*" x="([\d.]+)" y="([\d.]+)"', svg)
    return [(float(x), float(y)) for x, y in found]


def test_lines_are_named_and_spoken() -> None:
    svg = drawn(Line("a", X, np.array([1.0, 2.0, 3.5])), Line("b", X, np.array([-0.004, np.nan, -1.0])), digits=2)
    assert label(svg) == "t. a: from 1.00 to 3.50; b: from 0.00 to -1.00."
    assert {"a", "b", "x", "y"} <= set(texts(svg))
    (sample, *_), (name,) = re.findall(r'd="M 4 ([\d.]+)', svg), re.findall(r'y="([\d.]+)">a</text>', svg)
    assert 0 < float(name) - float(sample) < 12, "in the legend the line runs through the middle of its name"


def test_points_are_where_their_numbers_say() -> None:
    svg = drawn(Line("a", X, np.array([0.0, 5.0, 10.0]), dots=True), ticks=[1, 2, 3], y_range=(0, 10), height=100)
    points = dots(svg)
    assert [x for x, _ in points] == pytest.approx([36, 183, WIDTH - 10])
    heights = [y for _, y in points]
    assert heights[0] - heights[1] == pytest.approx(50)
    assert heights[0] - heights[2] == pytest.approx(100)


def test_the_axis_includes_zero_unless_told_otherwise() -> None:
    line = Line("a", X, np.array([90.0, 91.0, 92.0]))
    assert "0" in texts(drawn(line))
    assert "0" not in texts(drawn(line, y_range=value_range([line])))


@pytest.mark.parametrize("values", [[], [np.nan] * 3, [1.0], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
def test_sparse_data_can_be_drawn(values: list[float]) -> None:
    y = np.array(values, dtype=np.float64)
    svg = drawn(Line("a", X[: len(y)], y))
    assert ("No data" in label(svg)) == bool(np.isnan(y).all())
    assert "nan" not in svg


def test_a_point_of_one_seed_is_a_ring_without_a_band() -> None:
    line = Line("a", X, X, dots=True, std=np.array([0.1, np.nan, 0.2]))
    svg = drawn(line)
    assert svg.count("fill: var(--sheet)") >= 1
    assert "fill: var(--sheet)" not in drawn(line._replace(std=np.array([0.1, 0.1, 0.2])))
    assert value_range([line], margin=0.0) == pytest.approx((0.9, 3.2))


def test_points_that_are_not_joined_have_no_line() -> None:
    line = Line("paper", X, np.array([1.0, np.nan, 3.0]), "published", joined=False)
    assert label(drawn(line)) == "t. paper: 1.0, 3.0."
    assert drawn(line).count("stroke: var(--published); stroke-width: 2.2") == 0
    assert (len(dots(drawn(line))), dots(drawn(line._replace(joined=True)))) == (3, [])  # two, and the legend
    assert drawn(line._replace(joined=True)).count("stroke: var(--published); stroke-width: 2.2") > 0


def test_value_range_spans_at_least_what_is_asked() -> None:
    low, high = value_range([Line("a", X, np.array([10.0, 10.5, 10.0]))], least=4.0)
    assert high - low == pytest.approx(4.0)
    assert (low + high) / 2 == pytest.approx(10.25)


HOSTILE = st.text(alphabet="<>&\"'$_\\^{}% aé%σ", min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=30)
@given(HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    svg = line_plot([Line(name, X, X)], title=name, x_label=name, y_label=name)
    assert texts(svg).count(name) == 3
    assert label(svg).startswith(name)


def test_a_plot_needs_nothing_from_outside_and_has_its_own_ids() -> None:
    line = Line("a", X, X, dots=True)
    one, other = drawn(line), drawn(line, title="other")
    assert not re.search(r"https?:|font-family|#[0-9a-f]{6}|<metadata|<style", one)
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert drawn(line) == one


def test_every_colour_has_a_light_and_a_dark_form() -> None:
    style = files("vacsr.pages").joinpath("style.css").read_text(encoding="utf-8")
    dark = style.split("prefers-color-scheme: dark")[1].split("}\n}")[0]
    names = set(palette())
    assert names == set(re.findall(r"--([a-z0-9-]+): #", dark))
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", style)) - {"hue"}
    assert used <= names
    lines = {name for name in names if name.startswith("hue-")} | {"vacsr", "infonce", "sigmoid", "published", "easy"}
    assert len({palette()[name] for name in lines}) == len(lines)


def histogram(counts: list[float], **fields: object) -> Histogram:
    return Histogram("kind", np.array(counts), "hard", **fields)  # type: ignore[arg-type]


def test_histograms_are_equally_high_and_mark_the_median() -> None:
    edges = np.array([0.0, 0.5, 1.0])
    groups = [histogram([1.0, 3.0], note="median 0.7", median=0.7), histogram([200.0, 100.0])]
    svg = histogram_plot(groups, edges=edges, label="grade", title="t")
    assert label(svg) == "t. kind: median 0.7."
    assert {"kind", "median 0.7", "grade"} <= set(texts(svg))
    outlines = [
        [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
        for path in re.findall(r'd="([^"]*)"[^>]*style="fill: none; stroke: var\(--hard\); stroke-width: 1.6', svg)
    ]
    assert [max(one) - min(one) for one in outlines] == pytest.approx([40, 40])
    median = re.search(r"M ([\d.]+) [\d.]+\s+L [\d.]+ [\d.]+\s*\"[^>]*stroke: var\(--hard\); stroke-width: 2.2", svg)
    assert median is not None
    assert float(median[1]) == pytest.approx(8 + 0.7 * (WIDTH - 16))


def test_an_empty_histogram_is_a_base_line() -> None:
    svg = histogram_plot([histogram([0.0, 0.0])], edges=np.array([0.0, 0.5, 1.0]), label="g", title="t")
    assert "nan" not in svg
    assert "fill-opacity" not in svg
