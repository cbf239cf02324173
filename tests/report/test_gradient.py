"""The drawn gradients against their closed forms, and the drawing against the gradients."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from vacsr.report.diagram import model_diagram
from vacsr.report.gradient import gradient_figure, largest_plain_gradient, loss_gradient


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_gradients_have_their_closed_forms(label: float) -> None:
    straight, plain, logistic = (loss_gradient(label, kind=kind) for kind in ("ste", "plain", "bce"))
    p = straight.score
    assert p[0] < 0.001 < 0.999 < p[-1]
    np.testing.assert_allclose(straight.gradient, p - label, atol=1e-12)
    np.testing.assert_allclose(plain.gradient, (p - label) * p * (1 - p), atol=1e-12)
    np.testing.assert_allclose(logistic.gradient, straight.gradient, atol=1e-12)


def test_the_plain_gradient_never_exceeds_four_27ths() -> None:
    assert largest_plain_gradient() == pytest.approx(4 / 27, abs=1e-4)  # at p = 1/3


@pytest.mark.parametrize("label", [0, 1])
def test_both_are_drawn(label: int) -> None:
    root = ET.fromstring(gradient_figure(label))
    assert len([path for path in root.iter("path") if path.attrib["class"].startswith("line")]) == 2
    ends = "from -1.00 to 0.00" if label else "from 0.00 to 1.00"
    assert f"straight-through (as trained): {ends}" in root.attrib["aria-label"]


def test_words_of_the_diagram_lie_within_its_boxes() -> None:
    root = ET.fromstring(model_diagram())
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    boxes = [[float(box.attrib[key]) for key in ("x", "y", "width", "height")] for box in root.iter("rect")]
    assert len(boxes) == 13
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)
    for number, (x, y, w, h) in enumerate(boxes):
        for other in boxes[number + 1 :]:
            apart = x + w < other[0] or other[0] + other[2] < x or y + h < other[1] or other[1] + other[3] < y
            assert apart, (x, y, other)
    for said in root.iter("text"):
        if "boxed" in said.attrib["class"]:
            at = float(said.attrib["x"]), float(said.attrib["y"])
            inside = [b for b in boxes if b[0] < at[0] < b[0] + b[2] and b[1] < at[1] < b[1] + b[3]]
            assert len(inside) == 1, said.text
            assert 6.6 * len(said.text or "") < inside[0][2] + 8, said.text  # a wide font's mean letter
