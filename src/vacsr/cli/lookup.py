"""Scores of single pairs by their names in a data set, for `vacsr score`; imports torch."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError
from vacsr.scoring import AlignedScores, PairScorer


def score_named(
    scorer: PairScorer, pairs: PairSet | PhotoSet, *, image: str, texts: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """(image, text, score, grade, uncertainty) of each text, given by caption id or by a caption's exact words.

    Words that several captions share mean the image's own caption, or else the first one, with a warning.
    """
    row = _index(image, pairs.image_ids, "image id")
    cols = [_caption_index(text, pairs, row=row) for text in texts]
    scorer.check_set(pairs)
    if isinstance(pairs, PhotoSet):
        scores = _score_row(scorer, pairs, row=row, cols=cols)
    else:
        scores = scorer.score_pairs(pairs.images[torch.tensor([row] * len(cols))], pairs.texts[torch.tensor(cols)])
    return _lines(image, texts, scores)


def _score_row(scorer: PairScorer, pairs: PhotoSet, *, row: int, cols: Sequence[int]) -> AlignedScores:
    """One photo, read like those of a whole set, with some of the set's captions. [len(cols)]"""
    single = replace(
        pairs.subset([row]),
        captions=tuple(pairs.captions[col] for col in cols),
        caption_ids=tuple(str(number) for number in range(len(cols))),  # one caption may be asked for twice
        caption_image=torch.zeros(len(cols), dtype=torch.int64),
    )
    return scorer.score_at(scorer.score_set(single), rows=single.caption_image, cols=torch.arange(len(cols)))


def score_photo(scorer: PairScorer, *, image: str, texts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """(image, text, score, grade, uncertainty) of a photo on disk with any words."""
    scores = scorer.score_all([image], list(texts))
    cols = torch.arange(len(texts))
    return _lines(image, texts, scorer.score_at(scores, rows=torch.zeros_like(cols), cols=cols))


def _lines(image: str, texts: Sequence[str], scores: AlignedScores) -> Iterator[tuple[str, ...]]:
    for n, text in enumerate(texts):
        sigma = "–" if scores.uncertainty is None else f"{float(scores.uncertainty[n]):.4f}"
        yield image, text, f"{float(scores.score[n]):.4f}", f"{float(scores.grade[n]):.4g}", sigma


def _caption_index(text: str, pairs: PairSet | PhotoSet, *, row: int) -> int:
    """The caption with these words or this id, one of the image in ``row`` if there is one."""
    equal = [column for column, words in enumerate(pairs.captions or ()) if words == text]
    if not equal:
        return _index(text, pairs.caption_ids, "caption id")
    of_image = [column for column in equal if int(pairs.caption_image[column]) == row]
    columns = of_image or equal
    if len(columns) > 1:
        owner = f"image {pairs.image_ids[row]!r}" if of_image else "other images"
        message = f"{len(columns)} captions of {owner} read {text!r}, using {pairs.caption_ids[columns[0]]!r}"
        warnings.warn(f"{message} — give a caption id to choose", stacklevel=2)
    return columns[0]


def _index(name: str, names: Sequence[str], what: str) -> int:
    try:
        return names.index(name)
    except ValueError as error:
        close = difflib.get_close_matches(name, names[:20000], n=1)
        hint = f" — did you mean '{close[0]}'?" if close else f" — the first is '{names[0]}'"
        raise DataError(f"no {what} '{name}' among {len(names)}{hint}") from error
