"""Fit grades and the threshold of ``abstain`` to labelled pairs, and check them on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vacsr.config import Config
from vacsr.data import PairSet, PhotoSet
from vacsr.data.pairs import LabelledPairs
from vacsr.data.photos import content_fingerprint
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.uncertainty import Array
from vacsr.scoring import PairScorer, PairScores
from vacsr.scoring.topk import DIRECTIONS, Direction, stable_topk
from vacsr.search.certify import FEW, RiskCheck, check_threshold
from vacsr.search.index import embedding_provenance, model_digest
from vacsr.search.probabilities import (
    AnswerRule,
    Candidates,
    GradeCalibration,
    Mask,
    expected_calibration_error,
    fit_answer_rule,
    fit_grades,
)

CANDIDATES = 200
"""Nearest by cosine that the method scores again."""
DEPTH = 20
"""Best by score whose uncertainty is computed; beyond the first ranks its sign flips (the paper's appendix H)."""
SMALLER, LARGER = 0.2, 0.02
"""An index counts as of the size of the fit if it is smaller or larger by these shares: fewer items err less often."""
_DRAWS = 5  # of galleries smaller than the split
_CONFIDENCE = (0.5, 0.9999)  # below it says nothing, above the approximation behind a count does not reach
_CHOOSE = 0.25  # share of the images that choose; the others certify, which needs more


class DirectionCalibration(Config):
    """Of text → image (``t2i``) or image → text (``i2t``)."""

    gallery: int  # items that were searched
    candidates: int = Field(ge=2)  # nearest by cosine that the method scores
    depth: int = Field(ge=1)  # best by score whose σ is computed
    queries: int
    grades: GradeCalibration
    ece_own: float | None  # of the method's own grades; None where it has none
    ece_temperature: float
    ece_isotonic: float
    r1: float  # share of right first answers, on the part of the split that did not choose
    answer: AnswerRule
    also_floor: float  # the score of "probably also a match": half of the labelled matches reach it

    def same_size(self, size: int) -> bool:
        """Does the guarantee of ``answer`` hold for an index of this size?"""
        return (1 - SMALLER) * self.gallery <= size and self.covers(size)

    def covers(self, size: int) -> bool:
        """Is an index of this size no larger than the fit's? Among fewer items a grade is too low, if anything."""
        return size <= (1 + LARGER) * self.gallery


class Calibration(Config):
    """What is fitted, and to which data."""

    schema_version: int = 3
    model: str  # the model's digest
    data: str  # a digest of the ids and labels of the pairs
    pairs: str
    split: str
    selected_on: str = ""  # the split of these data by which training chose the epoch
    seed: int
    t2i: DirectionCalibration
    i2t: DirectionCalibration

    def of(self, direction: Direction) -> DirectionCalibration:
        return self.t2i if direction == "t2i" else self.i2t


@dataclass(frozen=True)
class CalibrateSettings:
    """Which risk is guaranteed, and for which searches."""

    risk: float = 0.1  # bound on the share of wrong answers, counted over as many images as certified it
    confidence: float = 0.9  # probability that the bound holds
    gallery: int | None = None  # images in a gallery; None for all of the split in one
    candidates: int = CANDIDATES
    depth: int = DEPTH
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.risk < 1 or not _CONFIDENCE[0] <= self.confidence <= _CONFIDENCE[1]:
            message = f"risk {self.risk}, confidence {self.confidence}: expected 0 to 1, and 0.5 to 0.9999"
            raise UsageError(f"{message} — e.g. --risk 0.1 --confidence 0.9")
        if not 1 <= self.depth <= self.candidates or self.candidates < 2:
            message = f"{self.candidates} candidates with a depth of {self.depth}"
            raise UsageError(f"{message} — give 2 candidates or more, and a depth of at most as many")


class DirectionCheck(NamedTuple):
    """A direction on pairs that nothing was fitted to."""

    gallery: int
    answers: RiskCheck
    absent: RiskCheck  # the same queries without their matches in the lists: whatever is answered is wrong
    r1: float
    ece_own: float | None
    ece: float


def calibrate(
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    settings: CalibrateSettings | None = None,
    *,
    spec: str = "",
    selected_on: str = "",
) -> Calibration:
    """Fit grades and thresholds to labelled pairs, which the model must not have been trained on.

    ``selected_on``: the split of these data by which training chose the epoch, if any; it is only noted.
    """
    settings = settings or CalibrateSettings()
    embedding_provenance(scorer.model)  # refuses models that an index cannot hold
    lists = search_lists(scorer, pairs, settings)
    fitted = {direction: fit_direction(scorer, lists[direction], settings) for direction in DIRECTIONS}
    data = content_fingerprint(*pairs.image_ids, *pairs.caption_ids, pairs.caption_image.cpu().numpy().tobytes())
    return Calibration(
        model=model_digest(scorer.model), data=data, pairs=spec, split=pairs.split, seed=settings.seed,
        selected_on=selected_on, **fitted,
    )  # fmt: skip


def check_calibration(
    scorer: PairScorer, pairs: PairSet | PhotoSet, calibration: Calibration
) -> dict[Direction, DirectionCheck]:
    """What the guarantees are worth on other pairs, in galleries of the size that was fitted at."""
    fitted = calibration.t2i
    settings = CalibrateSettings(
        gallery=fitted.gallery, candidates=fitted.candidates, depth=fitted.depth, seed=calibration.seed
    )
    lists = search_lists(scorer, pairs, settings)
    return {direction: check_direction(scorer, lists[direction], calibration.of(direction)) for direction in DIRECTIONS}


def fit_direction(scorer: PairScorer, candidates: Candidates, settings: CalibrateSettings) -> DirectionCalibration:
    """One direction: a part of the images chooses, the others decide whether the choice stands."""
    generator = np.random.default_rng(settings.seed)
    choose = choosing(candidates, generator)
    answer = fit_answer_rule(
        candidates, choose, risk=settings.risk, confidence=settings.confidence, generator=generator
    )
    score, right = candidates.score[:, : settings.depth], candidates.right[:, : settings.depth]
    grades, errors = fit_grades(
        score.ravel(), right.ravel().astype(np.float64), grade=_own_grades(scorer, score),
        fit=np.broadcast_to(choose[:, None], right.shape).ravel(),
    )  # fmt: skip
    return DirectionCalibration(
        gallery=candidates.gallery, candidates=settings.candidates, depth=settings.depth, queries=len(candidates.score),
        grades=grades, **errors, r1=float(candidates.right[~choose, 0].mean()), answer=answer,
        also_floor=float(np.median(score[right] if right.any() else score)),
    )  # fmt: skip


def choosing(candidates: Candidates, generator: np.random.Generator) -> Mask:
    """The queries of random images that choose; a larger share where images are few. -> [Q]"""
    images = len(np.unique(candidates.image))
    share = max(_CHOOSE, min(0.5, 1.5 * FEW / max(images, 1)))
    picked: Mask = generator.random(int(candidates.image.max(initial=0)) + 1) < share
    return picked[candidates.image]


def check_direction(scorer: PairScorer, candidates: Candidates, fitted: DirectionCalibration) -> DirectionCheck:
    rule, score, right = fitted.answer, candidates.score[:, : fitted.depth], candidates.right[:, : fitted.depth]
    labels, own = right.ravel().astype(np.float64), _own_grades(scorer, score)
    return DirectionCheck(
        gallery=candidates.gallery,
        answers=check_threshold(rule.outcomes(candidates), rule.threshold),
        absent=check_threshold(rule.outcomes(without_matches(candidates)), rule.threshold),
        r1=float(candidates.right[:, 0].mean()),
        ece_own=None if own is None else expected_calibration_error(own, labels),
        ece=expected_calibration_error(fitted.grades.apply(score.ravel()), labels),
    )


def without_matches(candidates: Candidates) -> Candidates:
    """The lists without their right candidates, all cut to the length of the shortest."""

    def wrong_ones(values: Array) -> Array:
        wrong = ~candidates.right[:, : values.shape[1]]
        order = (~wrong).argsort(axis=1, kind="stable")
        return np.take_along_axis(values, order, 1)[:, : int(wrong.sum(1).min())]

    score, sigma = wrong_ones(candidates.score), candidates.sigma
    return candidates._replace(
        score=score, cosine=wrong_ones(candidates.cosine), sigma=None if sigma is None else wrong_ones(sigma),
        right=np.zeros_like(score, dtype=bool),
    )  # fmt: skip


def _own_grades(scorer: PairScorer, score: Array) -> Array | None:
    """The method's own grades, if it has any. [...] -> [N]"""
    with torch.inference_mode():
        grade = scorer.model.method.grade(torch.from_numpy(score.ravel().copy()).float().to(scorer.device))
    return None if grade is None else np.asarray(grade.double().cpu().numpy(), dtype=np.float64)


def search_lists(
    scorer: PairScorer, pairs: PairSet | PhotoSet, settings: CalibrateSettings
) -> dict[Direction, Candidates]:
    """The candidates of every query of the pairs, in random galleries."""
    generator, count = torch.Generator().manual_seed(settings.seed), len(pairs.image_ids)
    galleries = random_galleries(count, size=settings.gallery or count, generator=generator)
    scores, limits = scorer.score_set(pairs), {"limit": settings.candidates, "depth": settings.depth}
    return {one: labelled_candidates(scores, pairs, galleries, direction=one, **limits) for one in DIRECTIONS}


def random_galleries(images: int, *, size: int, generator: torch.Generator) -> list[Tensor]:
    """Images in galleries of one size; those left over are in none of a draw. -> rows [size] each

    Everything is drawn several times, since a query's neighbours are a matter of luck. Galleries of one draw share no
    image.
    """
    if not 2 <= size <= images:
        message = f"cannot make a gallery of {size:,} images from {images:,}"
        raise DataError(f"{message} — give more pairs, or a smaller gallery: --gallery {images}")
    draws = [torch.randperm(images, generator=generator) for _ in range(_DRAWS if size < images else 1)]
    return [rows for order in draws for rows in order[: images - images % size].view(-1, size)]


def labelled_candidates(
    scores: PairScores,
    pairs: LabelledPairs,
    galleries: Sequence[Tensor],
    *,
    direction: Direction,
    limit: int = CANDIDATES,
    depth: int = DEPTH,
) -> Candidates:
    """Search each gallery with its own images or captions, as :class:`vacsr.search.Searcher` does."""
    owner = pairs.caption_image.cpu()
    parts = [_gallery(owner, rows, direction) for rows in galleries]
    width = min([limit, *(len(items) for _, items in parts)])
    asked, held = (scores.images, scores.texts) if direction == "i2t" else (scores.texts, scores.images)
    item, score, cosine, sigma = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for queries, items in parts:
        near = stable_topk((asked.mean[queries] @ held.mean[items].T).cpu(), width)
        ranked = rescore(scores, queries, items[near.index], direction=direction, candidates=width, depth=depth)
        item.append(items[near.index].gather(1, ranked.order))
        score.append(ranked.score)
        cosine.append(near.score.gather(1, ranked.order))
        sigma += [] if ranked.sigma is None else [ranked.sigma]
    query, answers = torch.cat([queries for queries, _ in parts]), torch.cat(item)
    image = query if direction == "i2t" else owner[query]
    right = (owner[answers] if direction == "i2t" else answers) == image[:, None]
    return Candidates(
        score=torch.cat(score).double().numpy(), cosine=torch.cat(cosine).double().numpy(),
        sigma=torch.cat(sigma).double().numpy() if sigma else None, right=right.numpy(), image=image.numpy(),
        query=query.numpy(), gallery=round(sum(len(items) for _, items in parts) / len(parts)),
    )  # fmt: skip


def _gallery(owner: Tensor, rows: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """Queries and items of one gallery; an image without captions is an item, and no query. [T], [n]"""
    captions = torch.isin(owner, rows).nonzero().flatten()
    if direction == "t2i":
        return captions, rows
    return rows[torch.isin(rows, owner[captions])], captions


class Rescored(NamedTuple):
    """Q queries with w items each, best score first."""

    order: Tensor  # [Q, w] positions in the order that was given
    score: Tensor  # [Q, w]
    sigma: Tensor | None  # [Q, depth]
    disagreement: Tensor | None  # [Q, depth], of members


def rescore(
    scores: PairScores, queries: Tensor, items: Tensor, *, direction: Direction, candidates: int, depth: int
) -> Rescored:
    """Order items by (−score, given order): the first ``candidates`` of each query, then any others. [Q], [Q, w]

    All pairs are scored in one pass. The uncertainties are of the first ``depth``.
    """

    def pairs_of(some: Tensor) -> tuple[Tensor, Tensor]:
        """Image rows and caption columns of all pairs. [Q, m] -> [Q·m], [Q·m]"""
        repeated, flat = queries.repeat_interleave(some.shape[1]), some.flatten()
        return (repeated, flat) if direction == "i2t" else (flat, repeated)

    score = scores.score_of(*pairs_of(items)).cpu().view(items.shape)
    parts = [part.argsort(dim=1, descending=True, stable=True) for part in torch.split(score, candidates, dim=1)]
    order = torch.cat([part + number * candidates for number, part in enumerate(parts)], dim=1)
    top = items.gather(1, order[:, :depth])
    unsure = (scores.uncertainty(*pairs_of(top)), scores.disagreement(*pairs_of(top)))
    sigma, disagreement = (None if one is None else one.cpu().view(top.shape) for one in unsure)
    return Rescored(order, score.gather(1, order), sigma, disagreement)
