"""Human grades of image–text pairs, and how well scores agree with them."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.uncertainty import Array, Values, as_vector, auroc, average_ranks, check_length, pearson

Kind = Literal["expert", "crowd"]
Split = Literal["judged-dev", "judged-test"]
_PAIR = ("image", "caption_image", "caption_index")
_GRADES: dict[Kind, tuple[str, ...]] = {"expert": ("rating_1", "rating_2", "rating_3"), "crowd": ("yes_share",)}


@dataclass(frozen=True, eq=False)
class Judgments:
    """N judged pairs. An expert grade is the mean of three ratings, a crowd grade the share of "yes"."""

    kind: Kind
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    """``image#index``, the index of the caption counted from 0."""
    grades: Array
    """[N]"""
    ratings: Array | None
    """[N, 3], experts only."""
    same_image: NDArray[np.bool_]
    """[N], True where the caption was written for this very image: a labelled pair."""

    def __post_init__(self) -> None:
        lengths = {len(self.image_ids), len(self.caption_ids), len(self.grades), len(self.same_image)}
        if self.ratings is not None:
            lengths.add(len(self.ratings))
        if len(lengths) != 1:
            raise ShapeMismatch(f"the columns have {sorted(lengths)} rows, expected one length — pass aligned columns")
        if self.kind == "expert" and self.ratings is None:
            raise DataError("expert judgments came without ratings, expected [N, 3] — pass ratings=")

    def __len__(self) -> int:
        return len(self.grades)

    def subset(self, split: Split | Literal["all"]) -> Judgments:
        """The pairs whose image belongs to the split, in order."""
        if split == "all":
            return self
        if split not in get_args(Split):
            raise UsageError(f"split={split!r}, expected one of {', '.join(get_args(Split))}, all")
        return self.take([row for row, image in enumerate(self.image_ids) if judged_split(image) == split])

    def take(self, rows: Sequence[int]) -> Judgments:
        """The pairs at these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        return Judgments(
            kind=self.kind,
            image_ids=tuple(self.image_ids[row] for row in rows),
            caption_ids=tuple(self.caption_ids[row] for row in rows),
            grades=self.grades[index],
            ratings=None if self.ratings is None else self.ratings[index],
            same_image=self.same_image[index],
        )


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
    if not path.is_file():
        raise DataError(f"no such file: {path} — give the path of a judgments TSV file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            kind = _kind_of(reader.fieldnames or (), path)
            rows = [_read_row(row, kind, place=f"{path}, line {reader.line_num}") for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not tab-separated UTF-8 text ({error}) — write or copy it again") from error
    if not rows:
        raise DataError(f"{path} has a header and no judgments, expected one pair per line — write or copy it again")
    given = np.array([row.grades for row in rows], dtype=np.float64)
    return Judgments(
        kind=kind,
        image_ids=tuple(row.image for row in rows),
        caption_ids=tuple(f"{row.caption_image}#{row.caption_index}" for row in rows),
        grades=given.mean(1),
        ratings=given if kind == "expert" else None,
        same_image=np.array([row.image == row.caption_image for row in rows]),
    )


class _Row(NamedTuple):
    image: str
    caption_image: str
    caption_index: int
    grades: list[float]


def _kind_of(columns: Sequence[str], path: Path) -> Kind:
    if not columns:
        raise DataError(f"{path} is empty, expected a header and one judged pair per line — write or copy it again")
    kind: Kind = "crowd" if "yes_share" in columns else "expert"
    missing = [name for name in _PAIR + _GRADES[kind] if name not in columns]
    if missing:
        expected = " or ".join(f"{', '.join(grades)} ({name})" for name, grades in _GRADES.items())
        raise DataError(
            f"{path} has the columns {', '.join(columns)}; {', '.join(missing)} missing, expected {', '.join(_PAIR)} "
            f"and {expected}, separated by tabs — rename the columns"
        )
    return kind


def _read_row(row: Mapping[str, str | None], kind: Kind, *, place: str) -> _Row:
    image, caption_image, index = (row[name] or "" for name in _PAIR)
    if not image or not caption_image:
        raise DataError(f"{place}: no image name, expected image and caption_image — fill in or drop the line")
    if not (index.isascii() and index.isdigit()):
        raise DataError(f"{place}: caption_index is {index!r}, expected a whole number from 0 — mend or drop the line")
    return _Row(image, caption_image, int(index), [_number(row, name, place=place) for name in _GRADES[kind]])


def _number(row: Mapping[str, str | None], name: str, *, place: str) -> float:
    try:
        value = float(row[name] or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{place}: {name} is {row[name]!r}, expected a number — mend or drop the line")
    return value


def kendall_tau(x: Values, y: Values, *, variant: Literal["b", "c"] = "b") -> float:
    """Kendall's τ-b or τ-c (Stuart's), in [-1, 1]; NaN if a side is constant. x [N], y [N]

    τ-c divides by m = min(distinct x, distinct y). Takes O(N log N) per binary digit of the number of distinct y.

    >>> round(kendall_tau([1, 2, 3], [1, 3, 2]), 6)
    0.333333
    """
    if variant not in get_args(Literal["b", "c"]):
        raise UsageError(f"variant={variant!r}, expected b or c")
    a, b = as_vector("x", x), as_vector("y", y)
    check_length(a, b)
    values_a, dense_a, count_a = np.unique(a, return_inverse=True, return_counts=True)
    values_b, dense_b, count_b = np.unique(b, return_inverse=True, return_counts=True)
    classes = min(len(values_a), len(values_b))
    if classes < 2:
        return math.nan
    joint = np.unique(dense_a * len(values_b) + dense_b, return_counts=True)[1]
    pairs, tied_a, tied_b = _pairs(np.array([len(a)])), _pairs(count_a), _pairs(count_b)
    discordant = _inversions(dense_b[np.lexsort((dense_b, dense_a))])
    surplus = pairs - tied_a - tied_b + _pairs(joint) - 2 * discordant  # concordant less discordant
    if variant == "b":
        tau = surplus / math.sqrt(pairs - tied_a) / math.sqrt(pairs - tied_b)
    else:
        tau = 2 * surplus / (len(a) ** 2 * (classes - 1) / classes)
    return min(1.0, max(-1.0, tau))


def spearman(x: Values, y: Values) -> float:
    """Spearman's ρ: Pearson correlation of the average ranks; NaN if a side is constant. x [N], y [N]

    >>> round(spearman([1, 2, 3], [10, 20, 25]), 6)
    1.0
    """
    return pearson(average_ranks(x), average_ranks(y))


def _pairs(count: NDArray[np.int64]) -> int:
    """Number of pairs within groups of these sizes."""
    return int((count * (count - 1) // 2).sum())


def _inversions(values: NDArray[np.int64]) -> int:
    """Pairs i < j with values[i] > values[j]; values are small and not negative. [N]

    Two such values agree down to one binary digit, where the earlier has 1 and the later 0: count digit by digit.
    """
    total = 0
    for digit in range(int(values.max()).bit_length()):
        higher = values >> (digit + 1)
        order = higher.argsort(kind="stable")
        group, one = higher[order], (values[order] >> digit) & 1
        ones_before = one.cumsum() - one
        in_group = ones_before - ones_before[np.searchsorted(group, group)]
        total += int(in_group[one == 0].sum())
    return total


class GradeAgreement(NamedTuple):
    """Rank correlation with human grades, times 100: τ-c with experts, τ-b with the crowd."""

    tau: float
    """Over all judged pairs, the grade of a pair being the mean."""
    published: float
    """As published elsewhere: without same-image pairs, each expert rating a row of its own."""
    spearman: float
    """Spearman's ρ over all judged pairs, mean grade."""


def grade_agreement(scores: Values, judgments: Judgments) -> GradeAgreement:
    """How well the scores order the judged pairs. scores [N], one per judged pair

    >>> pairs = Judgments("crowd", ("a", "a"), ("a#0", "b#0"), np.array([1.0, 0.0]), None, np.array([True, False]))
    >>> grade_agreement([0.9, 0.2], pairs).tau
    100.0
    """
    score = as_vector("scores", scores)
    check_length(score, judgments.grades)
    variant: Literal["b", "c"] = "c" if judgments.kind == "expert" else "b"
    across = ~judgments.same_image
    single = judgments.grades[:, None] if judgments.ratings is None else judgments.ratings
    repeated = np.repeat(score[across], single.shape[1])
    return GradeAgreement(
        tau=100 * kendall_tau(score, judgments.grades, variant=variant),
        published=100 * kendall_tau(repeated, single[across].ravel(), variant=variant),
        spearman=100 * spearman(score, judgments.grades),
    )


def false_negative_auroc(values: Values, judgments: Judgments, *, threshold: float = 3.0) -> float:
    """How well values find the false negatives: unlabelled pairs that experts grade at least ``threshold``. values [N]

    Unlabelled pairs are those across images. A share in [0, 1]; NaN without false negatives or without true ones.
    """
    if judgments.kind != "expert":
        raise DataError(f"{judgments.kind} judgments given, expected expert grades — read the file of the experts")
    value = as_vector("values", values)
    check_length(value, judgments.grades)
    across = ~judgments.same_image
    return auroc(value[across], judgments.grades[across] >= threshold)
