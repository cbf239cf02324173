"""Fit everything that a search needs to know to a split, and check it on another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vacsr.data import PairSet, PhotoSet
from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.uncertainty import Array
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibration import Calibration, DirectionCalibration
from vacsr.search.candidates import CANDIDATES, DEPTH, Candidates, labelled_candidates, random_galleries
from vacsr.search.certify import FEW
from vacsr.search.counted import RiskCheck, check_rule
from vacsr.search.grades import expected_calibration_error, fit_grades
from vacsr.search.hubs import hub_share
from vacsr.search.lcb import FirstRight, check_lcb, fit_lcb
from vacsr.search.missed import fit_missed
from vacsr.search.provenance import embedding_provenance, model_digest
from vacsr.search.risk import check_enough, fit_answer_rule

DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")
_SURE = (0.5, 0.9999)  # below a promise says nothing, above the approximation behind a count does not reach
_CHOOSE = 0.25  # share of the images that choose; the others certify, which needs more


@dataclass(frozen=True)
class CalibrateSettings:
    """What is promised, and for which searches."""

    risk: float = 0.1
    """The share of wrong first answers among those given, counted over as many images as certified it …"""
    confidence: float = 0.9
    """… stays below it with this probability."""
    gallery: int | None = None
    """Images in a gallery; None for all of the split in one."""
    candidates: int = CANDIDATES
    depth: int = DEPTH
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.risk < 1:
            raise UsageError(f"risk is {self.risk}, expected a share between 0 and 1 — e.g. --risk 0.1")
        if not _SURE[0] <= self.confidence <= _SURE[1]:
            message = f"confidence is {self.confidence}, expected {_SURE[0]} to {_SURE[1]}"
            raise UsageError(f"{message} — e.g. --confidence 0.9")
        if not 1 <= self.depth <= self.candidates or self.candidates < 2:
            message = f"{self.candidates} candidates with a depth of {self.depth}"
            raise UsageError(f"{message}: expected 1 ≤ depth ≤ candidates, and 2 candidates or more")


class DirectionCheck(NamedTuple):
    """A direction on pairs that nothing was fitted to."""

    gallery: int
    answers: RiskCheck
    absent: RiskCheck
    """The same queries with their own matches taken out of the lists: whatever is answered is wrong."""
    first: FirstRight
    ece_own: float
    ece: float


def calibrate(
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    settings: CalibrateSettings | None = None,
    *,
    spec: str = "",
    selected_on: str = "",
) -> Calibration:
    """Fit grades, λ and thresholds to labelled pairs, which the model must not have been trained on.

    ``selected_on``: the split of these data by which training chose the epoch, if there is one; it is only noted.
    """
    plan = settings or CalibrateSettings()
    embedding_provenance(scorer.model)  # refuses models that an index cannot hold
    lists = search_lists(scorer, pairs, plan)
    fitted = {direction: fit_direction(scorer, lists[direction], plan) for direction in DIRECTIONS}
    return Calibration(
        model=model_digest(scorer.model), data=labels_digest(pairs), pairs=spec, split=pairs.split, seed=plan.seed,
        selected_on=selected_on, **fitted,
    )  # fmt: skip


def check_calibration(
    scorer: PairScorer, pairs: PairSet | PhotoSet, calibration: Calibration
) -> dict[Direction, DirectionCheck]:
    """What the promises are worth on other pairs, in galleries of the size that was fitted at."""
    fitted = calibration.t2i
    check_size(pairs, fitted.gallery)
    plan = CalibrateSettings(
        gallery=fitted.gallery, candidates=fitted.candidates, depth=fitted.depth, seed=calibration.seed
    )
    lists = search_lists(scorer, pairs, plan)
    return {direction: check_direction(scorer, lists[direction], calibration.of(direction)) for direction in DIRECTIONS}


def check_size(pairs: LabelledPairs, gallery: int) -> None:
    """Refuse pairs with fewer images than a gallery of the fit has."""
    if len(pairs.image_ids) < gallery:
        message = f"split '{pairs.split}' has {len(pairs.image_ids):,} images, the fit is for galleries of"
        action = f"calibrate for what both splits have: --gallery {len(pairs.image_ids)}"
        raise DataError(f"{message} {gallery:,} — {action}")


def search_lists(
    scorer: PairScorer, pairs: PairSet | PhotoSet, settings: CalibrateSettings
) -> dict[Direction, Candidates]:
    """The candidates of every query of the pairs, in random galleries."""
    generator = torch.Generator().manual_seed(settings.seed)
    count = len(pairs.image_ids)
    galleries = random_galleries(count, size=settings.gallery or count, generator=generator)
    scores = scorer.score_set(pairs)
    return {
        direction: labelled_candidates(
            scores, pairs, galleries, direction=direction, limit=settings.candidates, depth=settings.depth
        )
        for direction in DIRECTIONS
    }


def labels_digest(pairs: LabelledPairs) -> str:
    """Of ids and labels."""
    data = hashlib.sha256()
    for names in (pairs.image_ids, pairs.caption_ids):
        data.update("\0".join(names).encode(errors="surrogatepass"))
    data.update(pairs.caption_image.cpu().contiguous().numpy().tobytes())
    return data.hexdigest()[:32]


def fit_direction(scorer: PairScorer, found: Candidates, plan: CalibrateSettings) -> DirectionCalibration:
    """All of one direction: a part of the images chooses, the others decide whether the choice is kept."""
    generator = np.random.default_rng(plan.seed)
    choose = choosing(found, generator)
    check_enough(found, choose, risk=plan.risk, confidence=plan.confidence)
    shown = _shown(found, plan.depth)
    seen = np.broadcast_to(choose[:, None], shown.match.shape)
    grades = fit_grades(shown.score.ravel(), shown.match.ravel(), grade=_own(scorer, shown.score), fit=seen.ravel())
    answer = fit_answer_rule(found, choose, risk=plan.risk, confidence=plan.confidence, generator=generator)
    return DirectionCalibration(
        gallery=found.gallery, candidates=plan.candidates, depth=plan.depth, queries=len(found.score),
        grades=grades.calibration, ece_own=grades.ece.own, ece_temperature=grades.ece.temperature,
        ece_isotonic=grades.ece.isotonic, lcb=fit_lcb(found, choose, depth=plan.depth), answer=answer,
        missed=fit_missed(found, choose, depth=plan.depth), hub_share=hub_share(answer, found),
    )  # fmt: skip


def choosing(found: Candidates, generator: np.random.Generator) -> NDArray[np.bool_]:
    """The queries of random images that choose; a larger share where images are few. -> [Q]"""
    images = len(np.unique(found.image))
    share = max(_CHOOSE, min(0.5, 1.5 * FEW / max(images, 1)))
    picked: NDArray[np.bool_] = generator.random(int(found.image.max(initial=0)) + 1) < share
    return picked[found.image]


def check_direction(scorer: PairScorer, found: Candidates, fitted: DirectionCalibration) -> DirectionCheck:
    """Count on lists that nothing was fitted to."""
    shown = _shown(found, fitted.depth)
    score, match = shown.score.ravel(), shown.match.ravel()
    return DirectionCheck(
        gallery=found.gallery,
        answers=check_rule(fitted.answer, found),
        absent=check_rule(fitted.answer, without_matches(found)),
        first=check_lcb(fitted.lcb, found),
        ece_own=expected_calibration_error(_own(scorer, shown.score), match),
        ece=expected_calibration_error(fitted.grades.apply(score), match),
    )


def without_matches(found: Candidates) -> Candidates:
    """The lists without their right candidates, all cut to the length of the shortest."""
    order = found.right.argsort(axis=1, kind="stable")  # wrong ones first, in the order that they had
    width = int((~found.right).sum(1).min())
    score, cosine = (np.take_along_axis(part, order, 1)[:, :width] for part in (found.score, found.cosine))
    sigma = None
    if found.sigma is not None:
        depth = found.sigma.shape[1]
        inside = found.right[:, :depth].argsort(axis=1, kind="stable")
        left = int((~found.right[:, :depth]).sum(1).min())
        sigma = np.take_along_axis(found.sigma, inside, 1)[:, :left]
    none_right = np.zeros_like(score, dtype=bool)
    return found._replace(score=score, cosine=cosine, sigma=sigma, right=none_right, first=None)


class _Shown(NamedTuple):
    """The pairs that a search shows."""

    score: Array  # [Q, depth]
    match: Array  # [Q, depth]


def _shown(found: Candidates, depth: int) -> _Shown:
    right: NDArray[np.bool_] = found.right[:, :depth]
    return _Shown(found.score[:, :depth], right.astype(np.float64))


def _own(scorer: PairScorer, score: Array) -> Array:
    """The method's own grades. [...] -> [N]"""
    with torch.inference_mode():
        grade = scorer.model.method.grade(torch.from_numpy(score.ravel().copy()).float().to(scorer.device))
    return np.asarray(grade.double().cpu().numpy(), dtype=np.float64)
