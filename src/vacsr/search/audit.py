"""Suspected wrong pairs and suspected missing matches of a data set, by a trained model.

Pairs are ranked by how well a caption agrees with an image *and the image's other captions*. An image's prototype is
its own vector plus those of its captions, each weighted by how probably its label is right, so that wrong ones pull
little: first by the model's grade (:func:`weights`), then by the probability that follows (:mod:`.wrong_share`).
A wrong caption disagrees with the prototype of the rest; an unlabelled caption that agrees with it is likely a match
that nobody labelled. docs/measurements.md compares it with other signals; the model's uncertainty was not among the
good ones.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn import functional

from vacsr.data import PairSet, PhotoSet
from vacsr.errors import UsageError
from vacsr.evaluate.report import data_frame
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores
from vacsr.scoring.topk import stable_topk
from vacsr.search.wrong_share import WrongCount, WrongShare

TOP = 200  # of each kind, by default
RIVAL_WEIGHT, COSINE_WEIGHT = 10.0, 2.0
"""Times the share of wrong labels: weights in the suspicion of the best other image's agreement (1 at most), and of the
cosine with the image alone. With few wrong labels an odd caption rarely fits elsewhere; with many, the other captions
say less. Chosen on seed 0: Flickr8k with InfoNCE and three epochs, and people's grades of COCO."""
DUPLICATE = 0.99  # cosine of two image vectors from which the photos count as near-duplicates
_EACH = 5  # missing captions of one image at most: a busy image would fill the list
_ELEMENTS = 1 << 25  # cosines in memory at a time: 128 MB, whatever the size of the data set

Progress = Callable[[int, int], None]  # called with (images done, of)


class Known(NamedTuple):
    """The model's view of one pair."""

    score: float
    grade: float | None  # None where the method only ranks
    uncertainty: float | None
    agreement: float  # cosine with the image and its other captions

    @property
    def level(self) -> float:
        """The grade, or the score of a method that only ranks."""
        return self.score if self.grade is None else self.grade


class WrongPair(NamedTuple):
    """A labelled pair that the model doubts."""

    row: int  # of its image
    col: int  # of its caption
    suspicion: float
    known: Known
    better_row: int | None  # the image that this caption fits best among the others; None if there is no other
    better_image: Known | None
    better_col: int | None  # the caption without a label that fits this image best; None if there is none
    better_caption: Known | None


class MissingMatch(NamedTuple):
    """An unlabelled pair that the model takes for a match."""

    row: int
    col: int
    known: Known
    own_row: int  # the image that this caption is labelled with
    own: Known  # the model's view of that labelled pair


class Duplicate(NamedTuple):
    """Two photos that are nearly the same to the model."""

    row: int
    other_row: int
    cosine: float


class AuditRows(NamedTuple):
    """Every labelled pair, in the order of the captions. [M] each, on the CPU"""

    image: Tensor  # row
    score: Tensor  # the grade, or the score of a method that only ranks
    suspicion: Tensor
    wrong_probability: Tensor  # rises with the suspicion; NaN with one image only
    is_wrong: Tensor  # the most suspected, as many as are estimated to be wrong
    better_row: Tensor  # the image that the caption fits best among the others, −1 if there is none
    better_col: Tensor  # the caption without a label that fits the image best, −1 if there is none


class AuditReport(NamedTuple):
    """All lists, the most suspected first, and every labelled pair."""

    wrong: tuple[WrongPair, ...]
    missing: tuple[MissingMatch, ...]
    labelled: int  # pairs that were checked
    min_grade: float | None  # the least grade of a missing match; None where the method only ranks
    usual_grade: float | None  # what three of four labelled pairs reach, which is the default least grade
    rows: AuditRows
    duplicates: tuple[Duplicate, ...]
    wrong_count: WrongCount | None  # of the labelled pairs; None with one image only

    def __repr__(self) -> str:
        lists = (
            f"{len(self.wrong):,} wrong and {len(self.missing):,} missing suspects, {len(self.duplicates):,} duplicates"
        )
        return f"AuditReport({lists}, {self.labelled:,} labelled pairs, wrong: {self.wrong_count or 'unknown'})"

    def to_frame(self, kind: Literal["wrong", "missing", "rows", "duplicates"] = "wrong") -> Any:
        """One row per suspect, the most suspected first, or per caption for "rows"; needs pandas."""
        if kind == "rows":
            columns = {name: part.tolist() for name, part in self.rows._asdict().items()}
            return data_frame(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return data_frame(_plain(suspect) for suspect in getattr(self, kind))

    def to_dict(self) -> dict[str, Any]:
        """Without ``rows``, of which there is one per caption."""
        return {name: _plain(value) for name, value in self._asdict().items() if name != "rows"}


def _plain(value: Any) -> Any:
    """Named tuples as dictionaries, other tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


class Neighbours(NamedTuple):
    """Of each caption its best other image, of each image its best captions without a label; by agreement."""

    image: Tensor  # [M] row of the best image that is not the caption's own; −1 with one image only
    image_agreement: Tensor  # [M], −inf if there is none
    caption: Tensor  # [N, k] rows of captions, best first
    caption_agreement: Tensor  # [N, k], −inf if there are fewer


class Signals(NamedTuple):
    """What both lists are ranked by: of every labelled pair [M], and of what could fit better."""

    own: Tensor
    suspicion: Tensor
    level: Tensor  # grade, or score of a method that only ranks
    near: Neighbours
    wrong: WrongShare | None  # what is known of all labels; None with one image only


def audit(
    model: MatchingModel | PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    top: int = TOP,
    min_grade: float | None = None,
    device: str | torch.device = "auto",
    progress: Progress | None = None,
) -> AuditReport:
    """Rank the labelled pairs by suspicion, and the unlabelled ones by agreement; ``top`` of each.

    ``min_grade`` of a missing match is by default what three of four labelled pairs reach: models differ in how high
    they grade, so no fixed grade means "yes" for all. Where a method only ranks, the same holds for its score. All
    pairs are compared by cosine, in blocks; the model scores those that are listed. Memory grows with the number of
    images and captions, not with that of their pairs.
    """
    if top < 1 or not 0 <= (min_grade or 0.0) <= 1:
        message = f"top={top}, min_grade={min_grade}: expected 1 or more, and 0 to 1"
        raise UsageError(f"{message} — try top=200, and leave min_grade out")
    scorer = model if isinstance(model, PairScorer) else PairScorer(model, device=device)
    graded = scorer.model.method.grade(torch.zeros(1, device=scorer.device)) is not None
    if min_grade and not graded:
        message = f"min_grade={min_grade}: this model has a cosine and no grade"
        raise UsageError(f"{message} — leave min_grade out")
    scores, owner = scorer.score_set(pairs), pairs.caption_image.to(scorer.device)
    every = signals(scores, owner, progress=progress)
    usual = float(every.level.sort().values[len(owner) // 4])
    least = usual if min_grade is None else min_grade if graded else float("-inf")
    missing = _find_missing(scores, owner, every, top=top, least=least)
    count = None if every.wrong is None else every.wrong.estimate(owner, images=len(pairs.image_ids))
    return AuditReport(
        _find_wrong(scores, owner, every, top=top), missing, len(owner),
        min_grade=least if graded else None, usual_grade=usual if graded else None,
        rows=_every_row(every, owner, count), duplicates=find_duplicates(scores.images.mean.float(), top=top),
        wrong_count=count,
    )  # fmt: skip


@torch.inference_mode()
def signals(scores: PairScores, owner: Tensor, *, captions: int = _EACH, progress: Progress | None = None) -> Signals:
    """Of every pair that could be listed. ``owner`` [M]: each caption's image row."""
    v, t = scores.images.mean.float(), scores.texts.mean.float()
    score = scores.score_of(owner, torch.arange(len(t), device=owner.device))
    grade = scores.grade(score)
    weight, level = weights(score, grade), score if grade is None else grade
    _, own, wrong = _agreements(v, t, owner, weight)
    if wrong is not None:
        weight = 1.0 - wrong.probability().to(weight)
    prototype, own, wrong = _agreements(v, t, owner, weight)
    near = find_neighbours(prototype, t, owner, captions=captions, progress=progress)
    cosine, share = (v[owner] * t).sum(dim=1), 0.0 if wrong is None else wrong.share
    return Signals(own, suspicion(own, near.image_agreement, cosine, share=share), level, near, wrong)


def _agreements(v: Tensor, t: Tensor, owner: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, WrongShare | None]:
    """Prototypes [N, d], agreements of labelled pairs [M], and what these say beside those of unrelated pairs."""
    sums = caption_sums(t, owner, weight, images=len(v))
    own = own_agreement(v, t, owner, weight=weight, sums=sums)
    other = torch.randperm(len(t), generator=torch.Generator().manual_seed(0)).to(owner.device)
    apart = owner[other] != owner
    if not apart.any():
        return prototypes(v, sums), own, None
    unrelated = own_agreement(v, t, owner, weight=weight, sums=sums, against=other)[apart]
    return prototypes(v, sums), own, WrongShare.fit(own, unrelated)


def _every_row(every: Signals, owner: Tensor, count: WrongCount | None) -> AuditRows:
    suspicion, number = every.suspicion.cpu(), 0 if count is None else count.value
    chance, wrong = torch.full_like(suspicion, torch.nan), torch.zeros(len(suspicion), dtype=torch.bool)
    wrong[suspicion.argsort(descending=True, stable=True)[:number]] = True
    if every.wrong is not None:  # smoothed along the suspicion, so that it rises with it; the sum stays
        order = suspicion.argsort(stable=True)
        chance[order] = torch.from_numpy(isotonic_regression(every.wrong.probability()[order].numpy()).x).float()
    better = torch.where(every.near.caption_agreement[:, 0].isfinite(), every.near.caption[:, 0], -1)[owner]
    columns = (owner, every.level, every.suspicion, chance, wrong, every.near.image, better)
    return AuditRows(*(column.cpu() for column in columns))


@torch.inference_mode()
def find_duplicates(images: Tensor, *, top: int, limit: float = DUPLICATE) -> tuple[Duplicate, ...]:
    """Pairs of unit vectors whose cosine reaches ``limit``, the nearest first, ``top`` at most. [N, d]"""
    step, found = max(1, _ELEMENTS // len(images)), images.new_zeros(0, 3, dtype=torch.float64)
    for start in range(0, len(images), step):
        block = (images[start : start + step] @ images[start:].T).triu(diagonal=1)
        row, other = (block >= limit).nonzero().unbind(1)
        pairs = torch.stack((row + start, other + start, block[row, other]), dim=1)
        found = torch.cat((found, pairs))
        found = found[found[:, 2].argsort(descending=True, stable=True)[:top]]
    return tuple(Duplicate(int(row), int(other), min(cosine, 1.0)) for row, other, cosine in found.tolist())


def _find_wrong(scores: PairScores, owner: Tensor, every: Signals, *, top: int) -> tuple[WrongPair, ...]:
    cols = every.suspicion.argsort(descending=True, stable=True)[:top]
    rows, rivals = owner[cols], every.near.image[cols]
    captions, agreement = every.near.caption[rows, 0], every.near.caption_agreement[rows, 0]
    own = _known(scores, rows, cols, every.own[cols])
    images = _known(scores, rivals.clamp_min(0), cols, every.near.image_agreement[cols])
    others = _known(scores, rows, captions, agreement)
    wrong = []
    for n, (row, col, rival) in enumerate(zip(rows.tolist(), cols.tolist(), rivals.tolist(), strict=True)):
        image = (rival, images[n]) if rival >= 0 else (None, None)
        caption = (int(captions[n]), others[n]) if agreement[n].isfinite() else (None, None)
        wrong.append(WrongPair(row, col, float(every.suspicion[col]), own[n], *image, *caption))
    return tuple(wrong)


def _find_missing(
    scores: PairScores, owner: Tensor, every: Signals, *, top: int, least: float
) -> tuple[MissingMatch, ...]:
    """By falling agreement, those that the model grades high enough; more are graded until there are enough."""
    agreement, each = every.near.caption_agreement.flatten(), every.near.caption.shape[1]
    order = agreement.argsort(descending=True, stable=True)
    order = order[agreement[order].isfinite()]
    missing: list[MissingMatch] = []
    for some in torch.split(order, max(top, 1024)):
        rows, cols = some // each, every.near.caption.flatten()[some]
        known = _known(scores, rows, cols, agreement[some])
        own = _known(scores, owner[cols], cols, every.own[cols])
        columns = zip(rows.tolist(), cols.tolist(), known, owner[cols].tolist(), own, strict=True)
        missing += [MissingMatch(*one) for one in columns if one[2].level >= least]
        if len(missing) >= top:
            break
    return tuple(missing[:top])


def _known(scores: PairScores, rows: Tensor, cols: Tensor, agreement: Tensor) -> list[Known]:
    aligned = scores.at(rows, cols)
    sigma = [None] * len(rows) if aligned.uncertainty is None else aligned.uncertainty.tolist()
    grade = [None] * len(rows) if aligned.grade is None else aligned.grade.tolist()
    columns = (aligned.score.tolist(), grade, sigma, agreement.tolist())
    return [Known(*one) for one in zip(*columns, strict=True)]


def weights(score: Tensor, grade: Tensor | None) -> Tensor:
    """Grades as shares of the median grade, 1 at most: methods differ in how high they grade a match. [M] -> [M]

    Without grades the scores are cosines, and (1 + cos)/2 takes their part.

    >>> weights(torch.zeros(3), torch.tensor([0.01, 0.1, 0.2]))
    tensor([0.1000, 1.0000, 1.0000])
    """
    grade = 0.5 * (1.0 + score) if grade is None else grade
    return (grade / grade.median().clamp_min(1e-12)).clamp(max=1.0)


def caption_sums(texts: Tensor, owner: Tensor, weight: Tensor, *, images: int) -> Tensor:
    """Σ over an image's captions of weight · vector. [M, d], [M], [M] -> [N, d]"""
    return texts.new_zeros(images, texts.shape[1]).index_add_(0, owner, weight.unsqueeze(1) * texts)


def prototypes(images: Tensor, sums: Tensor) -> Tensor:
    """Unit vectors of image plus captions. [N, d], [N, d] -> [N, d]"""
    return functional.normalize(images + sums, dim=1)


def own_agreement(
    images: Tensor, texts: Tensor, owner: Tensor, *, weight: Tensor, sums: Tensor, against: Tensor | None = None
) -> Tensor:
    """Cosine of each caption with its image's prototype *without this caption*. -> [M]

    An image's only caption is compared with the image alone. ``against`` [M]: compare these captions instead.
    """
    parts = []
    for rows in torch.split(torch.arange(len(texts), device=texts.device), max(1, _ELEMENTS // texts.shape[1])):
        t, image = texts[rows], owner[rows]
        rest = prototypes(images[image], sums[image] - weight[rows].unsqueeze(1) * t)
        parts.append((rest * (t if against is None else texts[against[rows]])).sum(dim=1))
    return torch.cat(parts)


def suspicion(own: Tensor, rival: Tensor, cosine: Tensor, *, share: float) -> Tensor:
    """Of a labelled pair: how much better the caption would fit elsewhere. Larger is worse. [M], [M], [M] -> [M]

    ``own``: agreement with its image and siblings; ``rival``: with the best other image; ``cosine``: with its image;
    ``share``: of labels that are wrong.

    >>> image = torch.tensor([0.6, 0.0])
    >>> suspicion(torch.tensor([0.8, 0.1]), torch.tensor([0.4, float("-inf")]), image, share=0.25)
    tensor([-0.7000, -0.1000])
    """
    elsewhere = min(1.0, RIVAL_WEIGHT * share) * torch.where(rival.isfinite(), rival, 0.0)
    return elsewhere - own - COSINE_WEIGHT * share * cosine


def find_neighbours(
    prototype: Tensor,
    texts: Tensor,
    owner: Tensor,
    *,
    captions: int,
    progress: Progress | None = None,
    elements: int = _ELEMENTS,
) -> Neighbours:
    """One walk over all pairs in blocks of images; labelled pairs are left out. [N, d], [M, d], [M]

    Keeps the best image of each caption and ``captions`` captions of each image. Equal ones go by row.
    """
    best = torch.full((len(texts),), float("-inf"), device=texts.device)
    at = torch.full((len(texts),), -1, dtype=torch.int64, device=texts.device)
    by_image = owner.argsort(stable=True)
    first = torch.searchsorted(owner[by_image], torch.arange(len(prototype) + 1, device=owner.device))
    step, tops = max(1, elements // len(texts)), []
    for start in range(0, len(prototype), step):
        block = prototype[start : start + step] @ texts.T
        labelled = by_image[int(first[start]) : int(first[start + len(block)])]
        block[owner[labelled] - start, labelled] = float("-inf")
        top, row = block.max(dim=0)
        better = top > best
        best, at = torch.where(better, top, best), torch.where(better, row + start, at)
        tops.append(stable_topk(block, captions))
        if progress is not None:
            progress(start + len(block), len(prototype))
    return Neighbours(at, best, torch.cat([top.index for top in tops]), torch.cat([top.score for top in tops]))
