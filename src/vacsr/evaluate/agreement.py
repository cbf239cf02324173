"""How well scores agree with human judgments of some pairs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.pair_files import read_pair_table, stem_of
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.signals import pair_signals
from vacsr.evaluate.uncertainty import Array, Values, as_vector, auroc, check_length, pearson

Kind = Literal["expert", "crowd", "graded", "shares"]
"""``expert`` and ``crowd`` are of Flickr8k's form, which names a caption by image and index; the others are not."""
Split = Literal["judged-dev", "judged-test"]
JUDGED: Mapping[str, Split] = {"judgments": "judged-test", "judgments_dev": "judged-dev"}
"""The sections of a result, and the half of the judged images that each is about."""
MATCH: Mapping[Kind, float] = {"expert": 3.0, "crowd": 0.5, "graded": 3.0, "shares": 0.5}
"""Grades from which a judged pair is a match: of 1 to 4 or 0 to 5, or of the share of "yes"."""
_SHARES = ("yes_share", "share")


@dataclass(frozen=True, eq=False)
class Judgments:
    """N judged pairs. A grade is the mean of a pair's ratings, or the share of "yes"."""

    kind: Kind
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    """``image#index``, the index of the caption counted from 0; or another id; or the text where there is no id."""
    ratings: Array  # [N, R], NaN where a pair has fewer than R ratings
    same_image: NDArray[np.bool_]  # [N], True where the caption was written for this very image: a labelled pair
    captions: tuple[str, ...] | None = None  # the texts, where the file has them
    name: str = ""

    @property
    def variant(self) -> Literal["b", "c"]:
        """Of Kendall's τ: τ-b with shares, τ-c with grades."""
        return "b" if self.kind in ("crowd", "shares") else "c"

    @cached_property
    def grades(self) -> Array:
        """[N]"""
        return np.asarray(np.nanmean(self.ratings, axis=1))

    def __len__(self) -> int:
        return len(self.ratings)

    def subset(self, split: Split) -> Judgments:
        """The pairs whose image belongs to the split, in order."""
        return self.take([row for row, image in enumerate(self.image_ids) if judged_split(image) == split])

    def take(self, rows: Sequence[int]) -> Judgments:
        """The pairs at these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        image_ids, caption_ids = (tuple(ids[row] for row in rows) for ids in (self.image_ids, self.caption_ids))
        captions = None if self.captions is None else tuple(self.captions[row] for row in rows)
        ratings, same_image = self.ratings[index], self.same_image[index]
        return Judgments(self.kind, image_ids, caption_ids, ratings, same_image, captions, self.name)

    def within(self, pairs: LabelledPairs) -> tuple[Judgments, Tensor, Tensor]:
        """The judged pairs that ``pairs`` holds, and their rows and columns there. -> N', [N'], [N'] int64"""
        images = {name: row for row, name in enumerate(pairs.image_ids)}
        captions = {name: col for col, name in enumerate(pairs.caption_ids)}
        ids = enumerate(zip(self.image_ids, self.caption_ids, strict=True))
        known = self.take([row for row, (image, caption) in ids if image in images and caption in captions])
        rows = torch.tensor([images[name] for name in known.image_ids], dtype=torch.int64)
        cols = torch.tensor([captions[name] for name in known.caption_ids], dtype=torch.int64)
        return known, rows, cols


def judged_split(image_name: str) -> Split:
    """Tune on one half of the judged images, report the other: parity of the first byte of sha1(image name).

    >>> judged_split("a.jpg"), judged_split("b.jpg")
    ('judged-dev', 'judged-test')
    """
    even = hashlib.sha1(image_name.encode()).digest()[0] % 2 == 0
    return "judged-dev" if even else "judged-test"


def read_judgments(path: Path, *, name: str = "") -> Judgments:
    """Read a TSV or CSV file of human grades; its header says what it holds.

    Pairs: image, and one of caption_id, caption (the text), or caption_image with caption_index. Grades: grade, any
    number of columns rating_…, or share (yes_share). A pair may have several rows, each with further ratings. ``own``
    is 1 where a caption was written for the image.
    """
    table = read_pair_table(path)
    images, captions = table.need("image"), table.caption_ids()
    share = [column for column in _SHARES if column in table.columns][:1]
    columns = share or [column for column in table.columns if column == "grade" or column.startswith("rating_")]
    if not columns:
        raise DataError(f"{path} has no column grade, rating_1 … or share — rename the columns")
    ratings: dict[tuple[str, str], list[float]] = {}
    first: list[int] = []  # the row in which each pair is first
    for row, (pair, values) in enumerate(zip(zip(images, captions, strict=True), table.numbers(columns), strict=True)):
        if pair not in ratings:
            first.append(row)
        ratings.setdefault(pair, []).extend(values)
    width, owners, texts = max(map(len, ratings.values())), *map(table.columns.get, ("caption_image", "caption"))
    own = [word == "1" for word in table.columns["own"]] if "own" in table.columns else None
    if own is None:
        own = [False] * len(images) if owners is None else [x == y for x, y in zip(images, owners, strict=True)]
    kinds: tuple[Kind, Kind] = ("graded", "shares") if owners is None else ("expert", "crowd")
    return Judgments(
        kind=kinds[bool(share)],
        image_ids=tuple(images[row] for row in first),
        caption_ids=tuple(captions[row] for row in first),
        ratings=np.array([values + [math.nan] * (width - len(values)) for values in ratings.values()]),
        same_image=np.array([own[row] for row in first]),
        captions=None if texts is None else tuple(texts[row] for row in first),
        name=name or stem_of(path),
    )


def kendall_tau(x: Array, y: Array, *, variant: Literal["b", "c"] = "b") -> float:
    """Kendall's τ-b or τ-c (Stuart's) times 100; NaN if a side is constant or has fewer than two values. [N] each"""
    return 100 * float(scipy.stats.kendalltau(x, y, variant=variant).statistic) if len(x) > 1 else math.nan


class PublishedForm(NamedTuple):
    """Every rating a row of its own, own captions left out, as papers on captioning metrics have it."""

    score: Array
    rating: Array
    row: NDArray[np.int64]  # the pair that each rating is of


def published_form(score: Array, ratings: Array, *, own: NDArray[np.bool_]) -> PublishedForm:
    """[N], [N, R] with NaN for missing ratings, [N] -> one row per rating

    >>> published_form(np.array([0.9, 0.2]), np.array([[4.0, 3.0], [1.0, np.nan]]), own=np.array([False, False])).row
    array([0, 0, 1])
    """
    rows, raters = np.nonzero(~np.isnan(ratings) & ~own[:, None])
    return PublishedForm(score[rows], ratings[rows, raters], rows)


def grade_agreement(scores: Values, judgments: Judgments) -> dict[str, Any]:
    """How well the scores [N] order the judged pairs: rank correlations times 100, as in the evaluation JSON.

    τ is τ-c with experts and τ-b with the crowd. ``…_published`` is as published elsewhere: without same-image pairs,
    each expert rating a row of its own.
    """
    score, kind = as_vector("scores", scores), judgments.kind
    check_length(score, judgments.ratings)
    variant, published = judgments.variant, published_form(score, judgments.ratings, own=judgments.same_image)
    return {
        f"{kind}_tau_{variant}": kendall_tau(score, judgments.grades, variant=variant),
        f"{kind}_tau_{variant}_published": kendall_tau(published.score, published.rating, variant=variant),
        f"{kind}_spearman": 100 * pearson(scipy.stats.rankdata(score), scipy.stats.rankdata(judgments.grades)),
        f"{kind}_pairs": len(judgments),
    }


def false_negative_auroc(values: Values, judgments: Judgments) -> float:
    """How well values [N] tell false negatives, pairs across images that people find fitting, from other such pairs.

    Times 100; NaN without false negatives or without others.
    """
    across = ~judgments.same_image
    return 100.0 * auroc(as_vector("values", values)[across], judgments.grades[across] >= MATCH[judgments.kind])


def judged_result(
    scores: Scores, pairs: LabelledPairs, judgments: Sequence[Judgments], *, split: Split
) -> dict[str, Any]:
    """Agreement with experts and crowd over one half of the judged images, where both are in ``pairs``.

    Empty where there are none. ``auroc_false_negative`` is by signal, ``score`` among them.
    """
    result: dict[str, Any] = {}
    for judged in judgments:
        if judged.kind not in ("expert", "crowd"):
            continue
        part, rows, cols = judged.subset(split).within(pairs)
        if not len(part):
            continue
        result |= grade_agreement(scores.score_of(rows, cols), part)
        if part.kind == "expert":
            values = pair_signals(scores, rows, cols)
            result["auroc_false_negative"] = {name: false_negative_auroc(x, part) for name, x in values.items()}
    return result
