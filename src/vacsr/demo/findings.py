"""What the trained models are worth: every figure of every method on the test split, against labels and truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.config import Recipe
from vacsr.data.scenes import PairKinds, SceneWorld, load_scenes, pair_kinds, scene_grades
from vacsr.data.spec import parse_spec
from vacsr.evaluate.exact import (
    KindValues,
    Truth,
    TruthFacts,
    exact_metrics,
    exact_truth,
    false_negatives_above,
    truth_facts,
    values_by_kind,
)
from vacsr.evaluate.retrieval import both_ranks, retrieval_result, uncertainty_result
from vacsr.scoring import PairScores

Direction = Literal["i2t", "t2i"]
DIRECTIONS: dict[Direction, str] = {"t2i": "text to image", "i2t": "image to text"}
"""As a person would say it."""
SPLIT = "test"
_DRAWN = 1 << 17  # pairs of a kind that its distribution is drawn from


class KnownWorld(NamedTuple):
    """The test split, and the truth of its every pair."""

    world: SceneWorld
    truth: Truth
    kinds: PairKinds
    facts: TruthFacts


class TopAnswers(NamedTuple):
    """The best answer to each of Q queries; on the CPU."""

    score: Tensor
    """[Q]"""
    uncertainty: Tensor | None
    """[Q], None where the method has none."""
    labelled: Tensor
    """[Q] float, 1 where it is the official match."""
    true: Tensor
    """[Q] float, 1 where it is wholly true, labelled or not."""


class Findings(NamedTuple):
    """One method's."""

    figures: dict[str, float | None]
    """By the keys of the table's columns; None where the method has no uncertainty."""
    kinds: dict[str, KindValues]
    """By the names of :class:`vacsr.data.scenes.PairKinds`."""
    top: dict[Direction, TopAnswers]

    @property
    def sigma_above(self) -> dict[str, float] | None:
        """How often σ is higher on a false negative than on a pair of each other kind, percent; None without σ."""
        sigma = {name: found.uncertainty for name, found in self.kinds.items() if found.uncertainty is not None}
        return false_negatives_above(sigma) if sigma else None

    @property
    def score_above(self) -> dict[str, float]:
        """The same of the score."""
        return false_negatives_above({name: found.score for name, found in self.kinds.items()})


def known_world(recipe: Recipe) -> KnownWorld:
    """Generate the test split and decide the truth of its every pair."""
    world = load_scenes(parse_spec(recipe.data.pairs).with_options({"split": SPLIT}))
    grades, caption_image = scene_grades(world), world.pairs.caption_image
    truth = exact_truth(grades, caption_image)
    return KnownWorld(world, truth, pair_kinds(grades, caption_image), truth_facts(truth))


def measure(scores: PairScores, known: KnownWorld) -> Findings:
    """Retrieval by the official labels, by the truth, and what the uncertainty is worth."""
    ranks = both_ranks(scores, known.world.pairs)
    sigma: Mapping[str, float] = uncertainty_result(scores, ranks) or {}
    figures = {
        "rsum": retrieval_result(ranks)["rsum"],
        **exact_metrics(scores, known.truth)._asdict(),
        **{f"corr_r1_{direction}": sigma.get(f"corr_r1_{direction}") for direction in DIRECTIONS},
    }
    top = {direction: top_answers(scores, known.truth, direction=direction) for direction in DIRECTIONS}
    return Findings(figures, values_by_kind(scores, known.kinds, pairs=_DRAWN), top)


def top_answers(scores: PairScores, truth: Truth, *, direction: Direction) -> TopAnswers:
    """Is the best answer right, by the labels and by the truth, and how sure is the method?"""
    best = scores.topk(1, direction=direction)
    found, query = best.index[:, 0].cpu(), torch.arange(len(best.index))
    rows, cols = (query, found) if direction == "i2t" else (found, query)
    sigma = scores.uncertainty(rows, cols)
    return TopAnswers(
        score=best.score[:, 0].cpu(),
        uncertainty=None if sigma is None else sigma.cpu(),
        labelled=truth.labelled[rows, cols].double(),
        true=truth.relevant[rows, cols].double(),
    )
