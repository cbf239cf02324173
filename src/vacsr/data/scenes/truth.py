"""The exact grade of every image–caption pair, and the kinds of pair that it tells apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.scenes.facts import Fact, Statement
from vacsr.data.scenes.objects import Scene
from vacsr.data.scenes.table import SceneTable
from vacsr.data.scenes.world import SceneWorld
from vacsr.errors import ShapeMismatch

HARD_FROM = 0.5
"""An unlabelled pair of at least this grade, but below 1, is a hard negative."""
EASY_BELOW = 0.25
"""A pair below this grade is an easy negative."""
_TRUE_FROM = 1 - 1e-6  # a grade this close to 1 is 1
_BLOCK = 1 << 24  # pairs whose facts are summed at a time


class PairKinds(NamedTuple):
    """Masks [N, M] bool; no pair is of two kinds. Pairs between easy and hard are of none."""

    positives: Tensor
    """Labelled: the caption was drawn from the image."""
    false_negatives: Tensor
    """Wholly true, but without a label."""
    hard: Tensor
    """Half true or more, but not wholly."""
    easy: Tensor
    """Hardly true."""


def pair_kinds(grades: Tensor, caption_image: Tensor) -> PairKinds:
    """Sort the pairs by their grades [N, M] and the image row of each caption [M].

    >>> kinds = pair_kinds(torch.tensor([[1.0, 1.0], [0.5, 1.0], [0.0, 0.3]]), torch.tensor([0, 1]))
    >>> kinds.false_negatives.nonzero().tolist(), kinds.hard.nonzero().tolist(), kinds.easy.nonzero().tolist()
    ([[0, 1]], [[1, 0]], [[2, 0]])
    """
    if grades.ndim != 2 or caption_image.shape != grades.shape[1:]:
        shapes = f"grades are {list(grades.shape)} and caption_image is {list(caption_image.shape)}"
        raise ShapeMismatch(f"{shapes}, expected [N, M] and [M] — give one image row per caption")
    positives = torch.arange(len(grades), device=grades.device)[:, None] == caption_image.to(grades.device)
    true = grades >= _TRUE_FROM
    return PairKinds(
        positives=positives,
        false_negatives=true & ~positives,
        hard=(grades >= HARD_FROM) & ~true & ~positives,
        easy=(grades < EASY_BELOW) & ~positives,
    )


def scene_grades(world: SceneWorld) -> Tensor:
    """The share of each caption's facts that hold in each image. [N, M] float32 in [0, 1]"""
    return share_true(world.scenes, world.statements)


def share_true(scenes: Sequence[Scene], statements: Sequence[Statement]) -> Tensor:
    """The share of a statement's facts that hold in a scene. [N, M] float32

    Each distinct fact is decided once for all scenes; a statement then sums its own facts' rows.
    """
    facts = {fact: row for row, fact in enumerate({fact: None for said in statements for fact in said.facts})}
    true = _decide(scenes, list(facts))
    lengths = torch.tensor([len(statement.facts) for statement in statements])
    grades = torch.empty(len(scenes), len(statements))
    step = max(1, _BLOCK // len(scenes))
    for start in range(0, len(statements), step):
        block = slice(start, start + step)
        held = torch.zeros(len(statements[block]), len(scenes), dtype=torch.uint8)
        for rows in _columns(statements[block], facts):
            held += true[rows]
        grades[:, block] = (held / lengths[block, None]).T
    return grades


def _decide(scenes: Sequence[Scene], facts: Sequence[Fact]) -> Tensor:
    """Which facts hold where, and one row more of which nothing holds. -> [F + 1, N] uint8"""
    table = SceneTable(scenes)
    true = torch.zeros(len(facts) + 1, len(scenes), dtype=torch.uint8)
    for row, fact in enumerate(facts):
        true[row] = torch.from_numpy(table.true(fact))
    return true


def _columns(statements: Sequence[Statement], facts: Mapping[Fact, int]) -> Tensor:
    """The row of every statement's first fact, second fact and so on; short ones go on with the row after the last."""
    most = max(len(statement.facts) for statement in statements)
    rows = [[facts[fact] for fact in said.facts] + [len(facts)] * (most - len(said.facts)) for said in statements]
    return torch.tensor(rows).T
