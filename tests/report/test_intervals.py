"""Intervals of the grades that a model gives: none is lost, and one can read which is which."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vacsr.data import load_pairs
from vacsr.report.comparison import comparison_page
from vacsr.report.gallery import Gallery, Material
from vacsr.report.intervals import Interval, Words, edges_of, interval_of, pick_intervals
from vacsr.report.pictures import Pictures
from vacsr.report.tables import ComparisonTable
from vacsr.report.verdicts import JudgedVerdicts

GRADES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40)
PAIRS = load_pairs("synthetic:images=8,held_out=6", split="test")


class Scored:
    """A model that gives each pair the grade it is told to."""

    def __init__(self, every: torch.Tensor) -> None:
        self.every = every
        self.scorer = self

    def score_at(self, scores: Scored, *, rows: torch.Tensor, cols: torch.Tensor) -> Any:
        return SimpleNamespace(grade=scores.every[rows, cols], score=scores.every[rows, cols], uncertainty=None)


def material(every: torch.Tensor) -> Material:
    scores: Any = {"mine": Scored(every)}
    return Material(PAIRS, JudgedVerdicts(PAIRS, []), None, scores)


def picked(every: torch.Tensor) -> list[Interval]:
    return pick_intervals(material(every), "mine", generator=torch.Generator().manual_seed(0))


def a_set_of(grades: list[float]) -> torch.Tensor:
    """Every pair's grade, each of ``grades`` in turn."""
    images, captions = len(PAIRS.image_ids), len(PAIRS.caption_ids)
    return torch.tensor(grades).repeat(images * captions)[: images * captions].reshape(images, captions)


@settings(deadline=None, max_examples=200)
@given(GRADES)
@example([0.1])
@example([0.5, 0.5 + 2**-24])
@example([0.0, 1e-45])
@example([n / 8 for n in range(9)])
def test_intervals_hold_every_grade_in_ascending_order(grades: list[float]) -> None:
    found = torch.tensor(grades)
    edges = edges_of(found)
    ends = edges.tolist()
    assert (ends[0], ends[-1]) == (float(found.min()), float(found.max()))
    place = interval_of(found, edges).tolist()
    for grade, at in zip(found.tolist(), place, strict=True):
        assert ends[at] <= grade
        assert grade < ends[at + 1] or at == len(ends) - 2
    assert {0, len(ends) - 2} <= set(place)
    if ends[0] == ends[-1]:
        assert len(ends) == 2
        return
    assert len(ends) == 9
    assert ends == sorted(set(ends))
    words = Words.of([Interval(low, high, 1, None) for low, high in pairwise(ends)])
    shown = [words.grade(end) for end in ends]
    assert len(set(shown)) == 9
    assert [float(end) for end in shown] == sorted(map(float, shown))
    for grade, at in zip(found.tolist(), place, strict=True):
        assert float(shown[at]) <= float(words.grade(grade)) <= float(shown[at + 1])


@settings(deadline=None, max_examples=30)
@given(GRADES)
def test_what_is_drawn_lies_in_its_interval(grades: list[float]) -> None:
    every = a_set_of(grades)
    found = picked(every)
    assert found == picked(every)
    labelled = len(PAIRS.caption_ids)
    assert labelled <= sum(interval.pairs for interval in found) <= every.numel()
    assert found[0].chosen is not None
    assert found[-1].chosen is not None
    for interval in found:
        assert (interval.chosen is None) == (interval.pairs == 0)
        if interval.chosen is not None:
            assert interval.low <= interval.chosen.grade <= interval.high
            assert interval.chosen.grade == float(every[interval.chosen.row, interval.chosen.col])


def test_two_grades_fill_two_intervals_and_the_others_are_named() -> None:
    drawn = Pictures(material(a_set_of([0.02, 0.1]))).intervals(picked(a_set_of([0.02, 0.1])))
    assert drawn.count('<li class="card') == 2
    assert "<b>Grade 0.020 to 0.030</b>" in drawn
    assert "<b>Grade 0.090 to 0.100</b>" in drawn
    assert "No pair has a grade of 0.030 to 0.040, 0.040 to 0.050, " in drawn


def page(every: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> str:
    plan = Gallery("clean", ("mine",), captions=1, images=1)
    monkeypatch.setattr("vacsr.report.comparison.load_material", lambda *_: material(every))
    return comparison_page(ComparisonTable("t", (), ("mine",), ("clean",), ()), [], gallery=plan)


def test_the_page_says_which_range_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = page(a_set_of([0.02, 0.05, 0.1]), monkeypatch)
    assert "those that mine gives run from 0.020 to 0.100. This range is cut into eight equal parts" in shown
    assert "all labelled ones and up to 40,000 others of the test split, clean." in shown


def test_equal_grades_are_one_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = picked(a_set_of([0.25]))
    assert (only.low, only.high) == (0.25, 0.25)
    assert only.chosen is not None
    shown = page(a_set_of([0.25]), monkeypatch)
    assert "mine gives every pair the same grade, 0.250; one was drawn at random." in shown
    assert "<b>Grade 0.250</b>" in shown
    assert "No pair has" not in shown


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.0, 1.0, ["0.00", "0.12", "0.25", "0.38", "0.50", "0.62", "0.75", "0.88", "1.00"]),
        (1e-5, 0.17, ["0.000", "0.021", "0.043", "0.064", "0.085", "0.106", "0.128", "0.149", "0.170"]),
        (0.0, 8e-9, ["0", "1e-09", "2e-09", "3e-09", "4e-09", "5e-09", "6e-09", "7e-09", "8e-09"]),
    ],
)
def test_ends_have_the_digits_that_tell_them_apart(low: float, high: float, said: list[str]) -> None:
    ends = edges_of(torch.tensor([low, high], dtype=torch.float64)).tolist()
    words = Words.of([Interval(*both, 1, None) for both in pairwise(ends)])
    assert [words.grade(end) for end in ends] == said
