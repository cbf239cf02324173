"""How well scores agree with human judgments of some pairs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau, rankdata
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.uncertainty import Array, Values, as_vector, auroc, check_length, pearson
from vacsr.files import read_lines

Kind = Literal["expert", "crowd"]
Split = Literal["judged-dev", "judged-test"]
JUDGED: Mapping[str, Split] = {"judgments": "judged-test", "judgments_dev": "judged-dev"}
"""The sections of a result, and the half of the judged images that each is about."""
MATCH: Mapping[Kind, float] = {"expert": 3.0, "crowd": 0.5}
"""Grades from which a judged pair is a match: of 1 to 4 by experts, of the share of "yes" by the crowd."""
_PAIR = ("image", "caption_image", "caption_index")
_GRADES: dict[Kind, tuple[str, ...]] = {"expert": ("rating_1", "rating_2", "rating_3"), "crowd": ("yes_share",)}


@dataclass(frozen=True, eq=False)
class Judgments:
    """N judged pairs. An expert grade is the mean of three ratings, a crowd grade the share of "yes"."""

    kind: Kind
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    """``image#index``, the index of the caption counted from 0."""
    ratings: Array
    """[N, 3] by experts, [N, 1] by the crowd."""
    same_image: NDArray[np.bool_]
    """[N], True where the caption was written for this very image: a labelled pair."""

    @cached_property
    def grades(self) -> Array:
        """[N]"""
        return np.asarray(self.ratings.mean(1))

    def __len__(self) -> int:
        return len(self.ratings)

    def subset(self, split: Split) -> Judgments:
        """The pairs whose image belongs to the split, in order."""
        return self.take([row for row, image in enumerate(self.image_ids) if judged_split(image) == split])

    def take(self, rows: Sequence[int]) -> Judgments:
        """The pairs at these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        image_ids, caption_ids = (tuple(ids[row] for row in rows) for ids in (self.image_ids, self.caption_ids))
        return Judgments(self.kind, image_ids, caption_ids, self.ratings[index], self.same_image[index])

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


def read_judgments(path: Path) -> Judgments:
    """Read a TSV file of expert or crowd judgments; the header tells which.

    Both have image, caption_image and caption_index; experts add rating_1 to rating_3, the crowd yes_share.
    """
    header, *lines = read_lines(path) or [""]
    columns = header.split("\t")
    kind: Kind = "crowd" if "yes_share" in columns else "expert"
    missing = [name for name in _PAIR + _GRADES[kind] if name not in columns]
    if missing:
        grades = " or ".join(", ".join(names) for names in _GRADES.values())
        message = f"{path} has no column {', '.join(missing)}, expected {', '.join(_PAIR)} and {grades}"
        raise DataError(f"{message}, separated by tabs — rename the columns")
    rows = [
        _read_row(dict(zip(columns, line.split("\t"), strict=False)), kind, where=f"{path}, line {number}")
        for number, line in enumerate(lines, start=2)
    ]
    if not rows:
        raise DataError(f"{path} holds no judgments, expected one pair per line — write or copy it again")
    images, caption_images, indices, ratings = zip(*rows, strict=True)
    return Judgments(
        kind=kind,
        image_ids=images,
        caption_ids=tuple(f"{name}#{index}" for name, index in zip(caption_images, indices, strict=True)),
        ratings=np.array(ratings, dtype=np.float64),
        same_image=np.array([image == other for image, other in zip(images, caption_images, strict=True)]),
    )


def _read_row(row: Mapping[str, str], kind: Kind, *, where: str) -> tuple[str, str, int, list[float]]:
    """Image, image of the caption, index of the caption, ratings."""
    try:
        image, caption_image, index = (row[name] for name in _PAIR)
        ratings = [float(row[name]) for name in _GRADES[kind]]
        if image and caption_image and int(index) >= 0 and all(map(math.isfinite, ratings)):
            return image, caption_image, int(index), ratings
    except (KeyError, ValueError):
        pass
    expected = f"two image names, a caption index from 0, and numbers in {', '.join(_GRADES[kind])}"
    raise DataError(f"{where}: expected {expected} — correct or drop the line")


def kendall_tau(x: Array, y: Array, *, variant: Literal["b", "c"] = "b") -> float:
    """Kendall's τ-b or τ-c (Stuart's) times 100; NaN if a side is constant or has fewer than two values. [N] each"""
    return 100 * float(kendalltau(x, y, variant=variant).statistic) if len(x) > 1 else math.nan


def grade_agreement(scores: Values, judgments: Judgments) -> dict[str, Any]:
    """How well the scores [N] order the judged pairs: rank correlations times 100, as in the evaluation JSON.

    τ is τ-c with experts and τ-b with the crowd. ``…_published`` is as published elsewhere: without same-image pairs,
    each expert rating a row of its own.

    >>> pairs = Judgments("crowd", ("a", "a"), ("a#0", "b#0"), np.array([[1.0], [0.0]]), np.array([True, False]))
    >>> grade_agreement([0.9, 0.2], pairs)["crowd_tau_b"]
    100.0
    """
    score, kind = as_vector("scores", scores), judgments.kind
    check_length(score, judgments.ratings)
    variant: Literal["b", "c"] = "c" if kind == "expert" else "b"
    across = ~judgments.same_image
    repeated = np.repeat(score[across], judgments.ratings.shape[1])
    return {
        f"{kind}_tau_{variant}": kendall_tau(score, judgments.grades, variant=variant),
        f"{kind}_tau_{variant}_published": kendall_tau(repeated, judgments.ratings[across].ravel(), variant=variant),
        f"{kind}_spearman": 100 * pearson(rankdata(score), rankdata(judgments.grades)),
        f"{kind}_pairs": len(judgments),
    }


def false_negative_auroc(values: Values, judgments: Judgments) -> float:
    """How well values [N] tell false negatives, pairs across images that experts find fitting, from other such pairs.

    Times 100; NaN without false negatives or without others.
    """
    across = ~judgments.same_image
    return 100.0 * auroc(as_vector("values", values)[across], judgments.grades[across] >= MATCH["expert"])


def judged_result(
    scores: Scores, pairs: LabelledPairs, judgments: Sequence[Judgments], *, split: Split
) -> dict[str, Any]:
    """Agreement with human grades over the judged pairs that are in ``pairs``; empty where there are none."""
    result: dict[str, Any] = {}
    for judged in judgments:
        part, rows, cols = judged.subset(split).within(pairs)
        if not len(part):
            continue
        score, sigma = scores.score_of(rows, cols), scores.uncertainty(rows, cols)
        result |= grade_agreement(score, part)
        if part.kind == "expert":
            result["auroc_false_negative_score"] = false_negative_auroc(score, part)
            if sigma is not None:
                result["auroc_false_negative"] = false_negative_auroc(sigma, part)
    return result
