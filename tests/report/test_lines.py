"""Line charts are checked by reading their SVG back: where lines lie, and what is said in words."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from vacsr.report.lines import Line, Marks, fitted, lines


def parsed(drawing: str) -> ET.Element:
    return ET.fromstring(drawing)


def points(path: ET.Element) -> np.ndarray:
    steps = path.attrib["d"].removeprefix("M").removesuffix("Z").split("L")
    return np.array([[float(part) for part in step.split()] for step in steps])


def test_lines_lie_where_their_numbers_are() -> None:
    x, y = np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 20.0, np.nan, 40.0])
    root = parsed(lines([Line("a", x, y, "vacsr", dots=True)], x_label="x", y_label="y", title="T"))
    (drawn,) = (points(path) for path in root.iter("path"))
    assert len(drawn) == 3  # NaN is left out
    assert len(list(root.iter("circle"))) == 3
    ratio = (drawn[0, 1] - drawn[2, 1]) / (drawn[0, 1] - drawn[1, 1])
    assert ratio == pytest.approx(3.0, abs=0.02)  # 40 − 10 over 20 − 10
    assert (drawn[1, 0] - drawn[0, 0]) * 3 == pytest.approx(drawn[2, 0] - drawn[0, 0], abs=0.2)
    assert root.attrib["aria-label"] == "T. a: from 10.0 to 40.0."


def test_the_y_axis_holds_zero_even_for_lines_of_zeros() -> None:
    for y in (np.array([90.0, 91.0]), np.zeros(2), np.array([-3.0, -2.0])):
        root = parsed(lines([Line("a", np.array([0.0, 1.0]), y, "vacsr")], x_label="x", y_label="y", title="T"))
        assert "0" in [element.text for element in root.iter("text") if element.attrib["text-anchor"] == "end"]


def test_fitted_ends_hold_lines_and_bands() -> None:
    low, high = fitted([Line("a", np.arange(2.0), np.array([10.0, 20.0]), "x", spread=np.array([1.0, 3.0]))])
    assert low < 9 < 23 < high
    assert (low, high) == (pytest.approx(9 - 0.08 * 14), pytest.approx(23 + 0.08 * 14))
    assert fitted([Line("a", np.arange(2.0), np.full(2, 5.0), "x")]) == (pytest.approx(4.6), pytest.approx(5.4))


def test_a_band_lies_around_its_line() -> None:
    y, spread = np.array([10.0, 30.0]), np.array([2.0, 5.0])
    drawn = [Line("a", np.arange(2.0), y, "vacsr", spread=spread)]
    band, line = (points(path) for path in parsed(lines(drawn, x_label="", y_label="", title="")).iter("path"))
    unit = (line[0, 1] - line[1, 1]) / 20  # of the picture, for 1 on the axis
    assert line[0, 1] - band[0, 1] == pytest.approx(2 * unit, abs=0.2)  # above
    assert band[3, 1] - line[0, 1] == pytest.approx(2 * unit, abs=0.2)  # and below
    assert line[1, 1] - band[1, 1] == pytest.approx(5 * unit, abs=0.2)


def test_a_band_is_open_where_the_spread_is_unknown() -> None:
    """Four points with a spread, a gap, one alone: a band, and an upright stroke."""
    spread = np.array([1.0, 1.0, np.nan, 2.0, np.nan])
    hollow = np.isnan(spread)
    drawn = [Line("a", np.arange(5.0), np.full(5, 10.0), "vacsr", dots=True, spread=spread, hollow=hollow)]
    root = parsed(lines(drawn, x_label="", y_label="", title=""))
    band, line = (points(path) for path in root.iter("path"))
    assert band[:, 0].tolist() == pytest.approx([*line[:2, 0], *line[1::-1, 0]])
    (stroke,) = (one for one in root.iter("line") if one.attrib["class"].startswith("whisker"))
    assert float(stroke.attrib["x1"]) == pytest.approx(line[3, 0], abs=0.1)
    height = float(stroke.attrib["y2"]) - float(stroke.attrib["y1"])
    assert height == pytest.approx(2 * (band[2, 1] - band[1, 1]), abs=0.3)
    rings = ["hollow" in circle.attrib["class"] for circle in root.iter("circle")]
    assert rings == hollow.tolist()


def test_points_that_are_not_joined_have_no_line() -> None:
    y = np.array([40.1, np.nan, 40.7])
    root = parsed(lines([Line("a", np.arange(3.0), y, "x", joined=False)], x_label="", y_label="", title="T"))
    assert list(root.iter("path")) == []
    assert len(list(root.iter("circle"))) == 3  # two points, and one beside the name
    assert root.attrib["aria-label"] == "T. a: 40.1, 40.7."


def test_an_axis_may_be_longer_than_its_line_needs() -> None:
    flat = Line("a", np.arange(2.0), np.array([10.0, 11.0]), "x")
    assert fitted([flat], least=5.0) == (pytest.approx(8.0), pytest.approx(13.0))
    assert fitted([flat], least=0.5) == fitted([flat])


def test_marks_have_names_and_one_is_chosen() -> None:
    marks = Marks([0.0, 1.0, 2.0], ["5e-05", "0.0005", "0.01"], chosen=1.0, chosen_name="default")
    drawn = [Line("a", np.arange(3.0), np.arange(3.0), "vacsr")]
    root = parsed(lines(drawn, x_label="α", y_label="", title="", marks=marks))
    said = [element.text for element in root.iter("text")]
    assert {"5e-05", "0.0005", "0.01", "default"} < set(said)
    (stroke,) = (element for element in root.iter("line") if element.attrib["class"] == "chosen")
    (line,) = (points(path) for path in root.iter("path"))
    assert float(stroke.attrib["x1"]) == pytest.approx(line[1, 0], abs=0.1)


def test_lines_without_figures_are_told_so() -> None:
    for drawn in ([], [Line("a", np.arange(2.0), np.full(2, np.nan), "x")], [Line("a", np.empty(0), np.empty(0), "x")]):
        assert "No figures" in parsed(lines(drawn, x_label="", y_label="", title="T")).attrib["aria-label"]


def test_a_single_point_is_a_dot() -> None:
    root = parsed(lines([Line("a", np.array([3.0]), np.array([1.0]), "x")], x_label="", y_label="", title=""))
    assert len(list(root.iter("circle"))) == 1


def test_names_are_escaped() -> None:
    root = parsed(lines([Line("<a> & b", np.arange(2.0), np.arange(2.0), "x")], x_label="<", y_label="&", title='"'))
    assert "<a> & b" in [element.text for element in root.iter("text")]
