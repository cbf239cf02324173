"""Suspected wrong pairs and suspected missing matches of a data set, by a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data import PairSet, PhotoSet
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import AlignedScores, PairScorer, PairScores
from vacsr.search.suspects import caption_sums, find_neighbours, own_agreement, prototypes, suspicion, weights

TOP = 200
"""Of each kind, unless asked otherwise."""
USUAL = 0.25
"""Unless a least grade is given, a missing match is graded above this share of the labelled pairs: methods differ in
how high they grade, so no fixed grade means "yes" for all."""
_EACH = 5  # missing captions of one image at most: a busy image would fill the list


class Known(NamedTuple):
    """What the model says of one pair."""

    score: float
    grade: float
    uncertainty: float | None
    agreement: float
    """Cosine with the image and its other captions."""


class WrongPair(NamedTuple):
    """A labelled pair that the model doubts."""

    row: int
    """Of its image."""
    col: int
    """Of its caption."""
    suspicion: float
    known: Known
    better_row: int | None
    """The image that this caption fits best among the others; None where there is no other."""
    better_image: Known | None
    better_col: int | None
    """The caption without a label that fits this image best; None where there is none."""
    better_caption: Known | None


class MissingMatch(NamedTuple):
    """An unlabelled pair that the model takes for a match."""

    row: int
    col: int
    known: Known
    own_row: int
    """The image that this caption is labelled with."""
    own: Known
    """What the model says of that labelled pair."""


class AuditReport(NamedTuple):
    """Both lists, the most suspected first."""

    wrong: tuple[WrongPair, ...]
    missing: tuple[MissingMatch, ...]
    labelled: int
    """Pairs that were looked at."""
    min_grade: float
    """The least grade of a missing match."""
    usual_grade: float
    """What three of four labelled pairs reach, which is the least grade unless another was asked for."""


class Signals(NamedTuple):
    """Of every labelled pair [M], and of the candidates [N, k]."""

    own: Tensor
    suspicion: Tensor
    rival: Tensor
    rival_agreement: Tensor
    near: Tensor
    near_agreement: Tensor
    grade: Tensor


def audit(
    model: MatchingModel | PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    top: int = TOP,
    min_grade: float | None = None,
    device: str | torch.device = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Rank the labelled pairs by suspicion, and the unlabelled ones by agreement; ``top`` of each.

    All pairs are looked at by cosine, in blocks; the model scores those that are shown. Memory grows with the number
    of images and captions, not with that of their pairs. ``progress`` is told (images done, of).
    """
    if top < 1 or not 0 <= (min_grade or 0.0) <= 1:
        message = f"top={top}, min_grade={min_grade}: expected 1 or more, and 0 to 1"
        raise UsageError(f"{message} — try top=200, and leave min_grade out")
    scorer = model if isinstance(model, PairScorer) else PairScorer(model, device=device)
    scores = scorer.score_set(pairs)
    owner = pairs.caption_image.to(scorer.device)
    found = signals(scores, owner, progress=progress)
    usual = usual_grade(found.grade)
    least = usual if min_grade is None else min_grade
    return AuditReport(
        _wrong(scores, owner, found, top=top),
        _missing(scores, owner, found, top=top, min_grade=least),
        labelled=len(owner),
        min_grade=least,
        usual_grade=usual,
    )


def usual_grade(grade: Tensor) -> float:
    """What three of four labelled pairs reach. [M]

    >>> usual_grade(torch.tensor([0.4, 0.1, 0.3, 0.2]))
    0.20000000298023224
    """
    return float(grade.sort().values[int(USUAL * len(grade))])


@torch.inference_mode()
def signals(
    scores: PairScores, owner: Tensor, *, captions: int = _EACH, progress: Callable[[int, int], None] | None = None
) -> Signals:
    """What both lists are ranked by, of every pair that could be on them. ``owner`` [M]: each caption's image row."""
    v, t = scores.images.mean.float(), scores.texts.mean.float()
    grade = scores.grade(scores.score_of(owner, torch.arange(len(t), device=owner.device)))
    weight = weights(grade)
    sums = caption_sums(t, owner, weight, images=len(v))
    own = own_agreement(v, t, owner, weight=weight, sums=sums)
    near = find_neighbours(prototypes(v, sums), t, owner, captions=captions, progress=progress)
    return Signals(
        own, suspicion(own, near.image_agreement), near.image, near.image_agreement,
        near.caption, near.caption_agreement, grade,
    )  # fmt: skip


def _wrong(scores: PairScores, owner: Tensor, found: Signals, *, top: int) -> tuple[WrongPair, ...]:
    cols = found.suspicion.argsort(descending=True, stable=True)[:top]
    rows, rivals, near = owner[cols], found.rival[cols], found.near[owner[cols]]
    own = _known(scores, rows, cols, found.own[cols])
    images = _known(scores, rivals.clamp_min(0), cols, found.rival_agreement[cols])
    listed = []
    captions: list[Known | None] = [None] * len(cols)
    if near.shape[1]:
        agreement = found.near_agreement[rows, 0]
        known = _known(scores, rows, near[:, 0], agreement)
        captions = [one if ok else None for one, ok in zip(known, agreement.isfinite().tolist(), strict=True)]
    for n, (row, col) in enumerate(zip(rows.tolist(), cols.tolist(), strict=True)):
        elsewhere, better = int(rivals[n]) >= 0, captions[n]
        listed.append(
            WrongPair(
                row, col, float(found.suspicion[col]), own[n],
                int(rivals[n]) if elsewhere else None, images[n] if elsewhere else None,
                int(near[n, 0]) if better is not None else None, better,
            )
        )  # fmt: skip
    return tuple(listed)


def _missing(
    scores: PairScores, owner: Tensor, found: Signals, *, top: int, min_grade: float
) -> tuple[MissingMatch, ...]:
    """By falling agreement, those that the model grades high enough; more are graded until there are enough."""
    flat = found.near_agreement.flatten()
    order = flat.argsort(descending=True, stable=True)
    order = order[flat[order].isfinite()]
    each = max(1, found.near.shape[1])
    listed: list[MissingMatch] = []
    for some in torch.split(order, max(top, 1024)):
        rows, cols = some // each, found.near.flatten()[some]
        known = _known(scores, rows, cols, flat[some])
        home = _known(scores, owner[cols], cols, found.own[cols])
        every = zip(rows.tolist(), cols.tolist(), known, owner[cols].tolist(), home, strict=True)
        listed += [MissingMatch(*one) for one in every if one[2].grade >= min_grade]
        if len(listed) >= top:
            break
    return tuple(listed[:top])


def _known(scores: PairScores, rows: Tensor, cols: Tensor, agreement: Tensor) -> list[Known]:
    said: AlignedScores = scores.scorer.score_at(scores, rows=rows, cols=cols)
    sigma = [None] * len(rows) if said.uncertainty is None else said.uncertainty.tolist()
    return [
        Known(*one) for one in zip(said.score.tolist(), said.grade.tolist(), sigma, agreement.tolist(), strict=True)
    ]
