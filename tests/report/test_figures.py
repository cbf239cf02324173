"""Drawings are checked by reading their SVG back: where lines and curves lie, and what is said in words."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vacsr.report.figures import Counts, Group, density, distributions, histograms
from vacsr.report.svg import WIDTH, Scale, number, ticks


def parsed(drawing: str) -> ET.Element:
    return ET.fromstring(drawing)


def points(path: ET.Element) -> np.ndarray:
    steps = path.attrib["d"].removeprefix("M").removesuffix("Z").split("L")
    return np.array([[float(part) for part in step.split()] for step in steps])


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4))
def test_ticks_are_even_few_and_inside(low: float, size: float) -> None:
    found = ticks(low, low + size)
    assert 2 <= len(found) <= 9
    step = np.diff(found)
    assert np.allclose(step, step[0], rtol=1e-6)
    assert low - 1e-6 * size <= found[0]
    assert found[-1] <= low + size + 1e-6 * size


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.30000000000000004, 100.0, -0.5, 0.0)] == ["0.3", "100", "-0.5", "0"]


def test_a_scale_maps_its_ends_and_keeps_within() -> None:
    scale = Scale(2.0, 4.0, 100.0, 0.0)
    assert [scale(value) for value in (2.0, 3.0, 4.0, 9.0, -1.0)] == [100.0, 50.0, 0.0, 0.0, 100.0]


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-3, 3)))
def test_a_density_peaks_at_one_and_is_never_negative(values: np.ndarray) -> None:
    at, height = density(values, low=-3.1, high=3.1)
    assert height.max() == pytest.approx(1.0)
    assert height.min() >= 0
    assert (np.diff(at) > 0).all()


def test_a_density_has_its_mass_where_the_values_are() -> None:
    values = np.random.default_rng(0).normal(1.0, 0.2, 5000)
    at, height = density(values, low=-3.0, high=3.0)
    assert (at * height).sum() / height.sum() == pytest.approx(values.mean(), abs=0.02)
    assert at[height.argmax()] == pytest.approx(1.0, abs=0.15)


def test_distributions_share_one_axis_and_mark_their_medians() -> None:
    low, high = np.linspace(0, 1, 101), np.linspace(2, 3, 101)
    root = parsed(distributions([Group("low", low, "easy"), Group("high", high, "hard", 5000)], label="σ", title="T"))
    marks = [line for line in root.iter("line") if "median" in line.attrib["class"]]
    first, second = (float(mark.attrib["x1"]) for mark in marks)
    assert 0 < first < WIDTH / 2 < second < WIDTH
    assert WIDTH / 2 - first == pytest.approx(second - WIDTH / 2, abs=0.2)
    said = [element.text for element in root.iter("text")]
    assert "median 0.500 · 101 pairs" in said
    assert "median 2.500 · 5,000 pairs" in said
    assert root.attrib["aria-label"] == "T. Medians: low 0.500, high 2.500."
    for area in root.iter("path"):
        assert points(area)[:, 0].min() >= 0
        assert points(area)[:, 0].max() <= WIDTH


def test_a_median_that_rounds_to_zero_has_no_minus() -> None:
    drawn = distributions([Group("a", np.array([-1.0, -1e-4, 1.0]), "easy")], label="score", title="T")
    assert "Medians: a 0.000." in drawn
    assert "median 0.000 · 3 pairs" in drawn


def test_a_group_of_nothing_and_a_group_of_one_value_are_drawn() -> None:
    root = parsed(
        distributions([Group("none", np.empty(0), "easy"), Group("one", np.ones(4), "hard")], label="σ", title="T")
    )
    assert "0 pairs" in [element.text for element in root.iter("text")]
    assert len(list(root.iter("path"))) == 1
    parsed(distributions([Group("none", np.empty(0), "easy")], label="σ", title="T"))


def test_histograms_are_as_high_as_each_other_and_say_what_they_are() -> None:
    edges = np.linspace(0, 1, 5)
    few, many = np.array([0.0, 1.0, 2.0, 0.0]), np.array([4000.0, 1000.0, 0.0, 0.0])
    groups = [Counts("few", few, "positives", "mean 0.5", 0.5), Counts("many", many, "easy", median=0.1)]
    root = parsed(histograms(groups, edges=edges, label="grade", title="T"))
    assert root.attrib["aria-label"] == "T. few: mean 0.5."
    first, second = (points(path) for path in root.iter("path"))
    assert np.ptp(first[:, 1]) == pytest.approx(np.ptp(second[:, 1]), abs=0.1)
    heights = first[:, 1].max() - first[:, 1]
    assert heights[1:-1].tolist() == pytest.approx(np.repeat(few / 2, 2) * np.ptp(first[:, 1]), abs=0.1)
    marks = [float(line.attrib["x1"]) for line in root.iter("line") if "median" in line.attrib["class"]]
    assert marks[0] == pytest.approx(WIDTH / 2)
    assert marks[1] < marks[0]


def test_a_histogram_of_nothing_is_drawn() -> None:
    root = parsed(histograms([Counts("none", np.zeros(4), "easy")], edges=np.linspace(0, 1, 5), label="", title="T"))
    assert not list(root.iter("path"))
