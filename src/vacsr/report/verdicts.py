"""What is known of a pair: its label, the exact truth of a generated world, or what people said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.data.scenes import EASY_BELOW
from vacsr.evaluate.exact import Truth
from vacsr.evaluate.judgments import Judgments

MATCH = {"expert": 3.0, "crowd": 0.5}
"""Grades from which a judged pair is a match: of 1 to 4 by experts, of the share of "yes" by the crowd."""
_PARTLY = {"expert": 2.0, "crowd": 0.25}


class Verdict(NamedTuple):
    """What a frame and its badge say of a pair."""

    kind: str
    """A frame of page.css: official, unlabelled, partly, wrong or unknown."""
    words: str

    @property
    def right(self) -> bool:
        """Labelled, or known to match without a label."""
        return self.kind in ("official", "unlabelled")


class Meaning(NamedTuple):
    """A line of the legend."""

    kind: str
    badge: str
    said: str


class Verdicts(Protocol):
    """Judges pairs, and knows the matches that carry no label."""

    meanings: tuple[Meaning, ...]
    """What each kind of frame means."""

    def of(self, row: int, col: int) -> Verdict:
        """What is known of image ``row`` and caption ``col``."""

    def unlabelled(self) -> Tensor:
        """Known matches without a label, by image and caption. [P, 2] int64"""


_JUDGED = (
    Meaning("unlabelled", "judged a match", "no label, but experts give it 3 of 4 or more, or half of a crowd say yes"),
    Meaning("partly", "judged partly", "2 of 4 or more, or a quarter say yes"),
    Meaning("wrong", "judged wrong", "less than that"),
)


class ExactVerdicts:
    """Every pair of a generated world has a known grade."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.meanings: tuple[Meaning, ...] = (
            Meaning("official", "official match", "the labelled pair"),
            Meaning("unlabelled", "true, unlabelled", "wholly true, a false negative"),
            Meaning("partly", "partly true", f"{EASY_BELOW:.0%} of the caption or more is true"),
            Meaning("wrong", "wrong", f"less than {EASY_BELOW:.0%} is true"),
        )

    def of(self, row: int, col: int) -> Verdict:
        """By label and share that is true."""
        share = float(self.truth.grades[row, col])
        if self.truth.labelled[row, col]:
            return Verdict("official", "official match")
        if self.truth.relevant[row, col]:
            return Verdict("unlabelled", "true, unlabelled")
        return Verdict("partly" if share >= EASY_BELOW else "wrong", f"{share:.0%} true")

    def unlabelled(self) -> Tensor:
        """False negatives of the labels."""
        return self.truth.false_negative.nonzero()


class JudgedVerdicts:
    """Some pairs were judged by people; of most pairs only the label is known."""

    def __init__(self, pairs: LabelledPairs, judgments: Sequence[Judgments]) -> None:
        self.pairs = pairs
        images = {name: row for row, name in enumerate(pairs.image_ids)}
        captions = {name: col for col, name in enumerate(pairs.caption_ids)}
        self._said: dict[tuple[int, int], Verdict] = {}
        for judged in sorted(judgments, key=lambda found: found.kind):  # experts come last, and so are heard
            for image, caption, grade in zip(judged.image_ids, judged.caption_ids, judged.grades, strict=True):
                if image in images and caption in captions:
                    self._said[images[image], captions[caption]] = _said(judged.kind, float(grade))
        self.meanings: tuple[Meaning, ...] = (
            Meaning("official", "official match", "the labelled pair"),
            *(_JUDGED if self._said else ()),
            Meaning("unknown", "no label", "and nobody has judged it"),
        )

    def of(self, row: int, col: int) -> Verdict:
        """By label first, then by what people said."""
        if int(self.pairs.caption_image[col]) == row:
            return Verdict("official", "official match")
        return self._said.get((row, col), Verdict("unknown", "no label"))

    def unlabelled(self) -> Tensor:
        """Pairs across images that people call a match."""
        found = [place for place in self._said if self.of(*place).kind == "unlabelled"]
        return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def _said(kind: str, grade: float) -> Verdict:
    words = f"experts: {grade:.1f} of 4" if kind == "expert" else f"{grade:.0%} say yes"
    if grade >= MATCH[kind]:
        return Verdict("unlabelled", words)
    return Verdict("partly" if grade >= _PARTLY[kind] else "wrong", words)
