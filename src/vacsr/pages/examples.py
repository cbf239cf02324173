"""Example queries with their answers, and pairs by interval of their grade, as plain data with pictures inside."""

import base64
import io
import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, features

Known = Literal["exact", "judged", "labels"]
"""What is known of pairs: the truth of each, what people judged of some, or labels alone."""
_QUALITY = 82  # of WebP: a tenth of PNG's size without a visible difference


class Picture(NamedTuple):
    image_id: str
    alt: str  # what it shows: its first caption, or its id
    uri: str = ""  # the photo as data; empty where there is none, and the text is shown instead


class Answer(NamedTuple):
    """A retrieved image or caption, or one pair."""

    picture: Picture | None  # None where a caption was retrieved
    text: str  # the caption
    kind: str  # a frame of style.css: official, unlabelled, partly, wrong or unknown
    badge: str  # what is known of the pair, in words
    grade: float | None  # the probability of a match; None for a method that only ranks
    uncertainty: float | None
    score: float = 0.0  # shown where there is no grade


class RowAnswers(NamedTuple):
    """The best answers of one row of the comparison, best first."""

    row: str
    rank: int  # of the labelled match; of several, the best
    answers: tuple[Answer, ...]


class Query(NamedTuple):
    """A caption or an image, and what each row answers."""

    query_id: str
    text: str  # the caption; empty for an image
    picture: Picture | None  # the image; None for a caption
    unlabelled: int  # known matches without a label
    rows: tuple[RowAnswers, ...]


class Interval(NamedTuple):
    """Grades from ``low`` up to ``high``; the last interval includes ``high``."""

    low: float
    high: float
    pairs: int  # pairs of the sample with a grade in it
    example: Answer | None  # None where there is no such pair


class Examples(NamedTuple):
    """All that a page shows of trained models. Queries are chosen by labels and judgments, never by scores."""

    setting: str
    split: str
    rows: tuple[str, ...]  # the first is also shown by intervals of its grade
    known: Known
    queries: tuple[Query, ...]
    intervals: tuple[Interval, ...]
    sample: int  # unlabelled pairs of which the intervals are drawn, at most

    def sigma_range(self, row: str) -> tuple[float, float]:
        """Lowest and highest σ among the answers of a row: rows measure σ in different ways."""
        answers = [answer for query in self.queries for one in query.rows if one.row == row for answer in one.answers]
        sigmas = [answer.uncertainty for answer in answers if answer.uncertainty is not None]
        return min(sigmas, default=0.0), max(sigmas, default=0.0)

    def grade_text(self, grade: float) -> str:
        """A grade with as many decimals as tell the ends of the intervals apart, and at least two."""
        width = (self.intervals[-1].high - self.intervals[0].low) / len(self.intervals)
        digits = max(2, 1 - math.floor(math.log10(width))) if width else 3
        rounded = round(grade, digits) + 0.0  # not -0.0
        return f"{rounded:.{digits}f}" if digits <= 6 else f"{rounded:.15g}"

    def interval_text(self, interval: Interval) -> str:
        """From where to where, or the only grade there is."""
        low, high = self.grade_text(interval.low), self.grade_text(interval.high)
        return low if interval.low == interval.high else f"{low} to {high}"


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """A picture [H, W, 3] as WebP where Pillow has it, else as PNG.

    >>> data_uri(np.zeros((4, 4, 3), dtype=np.uint8))[:11]
    'data:image/'
    """
    kind = "webp" if features.check("webp") else "png"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=_QUALITY, method=6, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def photo_uri(photo: Image.Image, *, side: int) -> str:
    """The whole photo, its longer side this long: small enough for a page, which shows it within a square."""
    size = [max(1, round(length * side / max(photo.size))) for length in photo.size]
    return data_uri(np.asarray(photo.convert("RGB").resize(size, Image.Resampling.LANCZOS)))
