"""Some queries with their best answers. Which queries is decided by the world alone, before any score is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.data.scenes import EASY_BELOW
from vacsr.demo.findings import Direction, KnownWorld
from vacsr.evaluate.exact import Truth
from vacsr.scoring import PairScores

TRUE_OF = (1, 2, 3, 5, 8, 13)
"""The captions asked for: the first that is true of one image, the first true of two, and so on."""
IMAGES = 4
"""The first so many images are asked for their captions."""
ANSWERS = 5
Verdict = Literal["official", "unlabelled", "partly", "wrong"]


class Answer(NamedTuple):
    """One retrieved image or caption."""

    place: int
    """Row of the image, or column of the caption."""
    verdict: Verdict
    share: float
    """How much of the caption is true of the image, from 0 to 1."""
    grade: float
    """The method's own, from 0 to 1."""
    uncertainty: float | None


class Query(NamedTuple):
    """A caption or an image, and what each method answers."""

    direction: Direction
    place: int
    """Column of the caption, or row of the image."""
    true: int
    """How many right answers there are, labelled or not."""
    answers: dict[str, tuple[Answer, ...]]
    """By method, best first."""
    official: dict[str, int]
    """By method: the rank of the official match, of several the best."""


def choose_captions(truth: Truth, numbers: Sequence[int] = TRUE_OF) -> list[int]:
    """For each number the first caption, not taken yet, that is true of so many images, or of the nearest number.

    >>> grades = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    >>> choose_captions(Truth(grades, grades > 2), [1, 2, 5])
    [0, 1, 2]
    """
    counts = truth.relevant.sum(dim=0).tolist()
    chosen: list[int] = []
    for number in numbers:
        left = [column for column in range(len(counts)) if column not in chosen]
        if left:
            chosen.append(min(left, key=lambda column: (abs(counts[column] - number), column)))
    return chosen


def ask(scores: Mapping[str, PairScores], known: KnownWorld) -> list[Query]:
    """Put every chosen query to every method, by name: captions first, then images."""
    truth = known.truth
    images = range(min(IMAGES, len(truth.grades)))
    places: list[tuple[Direction, int]] = [("t2i", column) for column in choose_captions(truth)]
    places += [("i2t", row) for row in images]
    found = [Query(direction, place, _true(truth, direction, place), {}, {}) for direction, place in places]
    for name, every in scores.items():
        for query in found:
            rows, cols = _ranked(every.score.cpu(), query)
            query.official[name] = int(truth.labelled[rows, cols].int().argmax()) + 1
            rows, cols = rows[:ANSWERS], cols[:ANSWERS]
            said = every.scorer.score_at(every, rows=rows, cols=cols)
            sigmas = [None] * len(rows) if said.uncertainty is None else said.uncertainty.tolist()
            query.answers[name] = tuple(_answers(truth, query, rows, cols, said.grade.tolist(), sigmas))
    return found


def _true(truth: Truth, direction: Direction, place: int) -> int:
    relevant = truth.relevant[:, place] if direction == "t2i" else truth.relevant[place]
    return int(relevant.sum())


def _ranked(score: Tensor, query: Query) -> tuple[Tensor, Tensor]:
    """Rows and columns of all answers, best first, the earlier first among equals. [P], [P]"""
    line = score[:, query.place] if query.direction == "t2i" else score[query.place]
    order = line.argsort(descending=True, stable=True)
    same = torch.full_like(order, query.place)
    return (order, same) if query.direction == "t2i" else (same, order)


def _answers(
    truth: Truth, query: Query, rows: Tensor, cols: Tensor, grades: Sequence[float], sigmas: Sequence[float | None]
) -> Iterator[Answer]:
    places = zip(rows.tolist(), cols.tolist(), grades, sigmas, strict=True)
    for row, col, grade, sigma in places:
        share = float(truth.grades[row, col])
        place = row if query.direction == "t2i" else col
        yield Answer(place, judge(truth, row, col), share, grade, sigma)


def judge(truth: Truth, row: int, col: int) -> Verdict:
    """What a pair is in truth."""
    if truth.labelled[row, col]:
        return "official"
    if truth.relevant[row, col]:
        return "unlabelled"
    return "partly" if float(truth.grades[row, col]) >= EASY_BELOW else "wrong"
