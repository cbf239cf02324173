"""Scores of single pairs by their names in a data set."""

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
    """(image, text, score, grade, uncertainty) of each text, by caption id or by a caption's exact words.

    Words that several captions share mean the image's own caption, or else the first one, with a warning.
    """
    row = _find(image, pairs.image_ids, "image id")
    cols = [_find_text(text, pairs, row=row) for text in texts]
    scorer.check_set(pairs)
    if isinstance(pairs, PhotoSet):
        found = _score_row(scorer, pairs, row=row, cols=cols)
    else:
        found = scorer.score_pairs(pairs.images[torch.tensor([row] * len(cols))], pairs.texts[torch.tensor(cols)])
    return _lines(image, texts, found)


def _score_row(scorer: PairScorer, pairs: PhotoSet, *, row: int, cols: Sequence[int]) -> AlignedScores:
    """One photo, read as a whole set's are, with some of its set's captions. [len(cols)]"""
    alone = replace(
        pairs.subset([row]),
        captions=tuple(pairs.captions[col] for col in cols),
        caption_ids=tuple(str(number) for number in range(len(cols))),  # one caption may be asked for twice
        caption_image=torch.zeros(len(cols), dtype=torch.int64),
    )
    every = torch.arange(len(cols))
    return scorer.score_at(scorer.score_set(alone), rows=alone.caption_image, cols=every)


def score_photo(scorer: PairScorer, *, image: str, texts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """(image, text, score, grade, uncertainty) of a photo on disk with any words."""
    scores = scorer.score_all([image], list(texts))
    cols = torch.arange(len(texts))
    return _lines(image, texts, scorer.score_at(scores, rows=torch.zeros_like(cols), cols=cols))


def _lines(image: str, texts: Sequence[str], found: AlignedScores) -> Iterator[tuple[str, ...]]:
    for n, text in enumerate(texts):
        sigma = "–" if found.uncertainty is None else f"{float(found.uncertainty[n]):.4f}"
        yield image, text, f"{float(found.score[n]):.4f}", f"{float(found.grade[n]):.4g}", sigma


def _find_text(text: str, pairs: PairSet | PhotoSet, *, row: int) -> int:
    """The caption with these words or this id, of the image in ``row`` if it has one."""
    alike = [column for column, words in enumerate(pairs.captions or ()) if words == text]
    if not alike:
        return _find(text, pairs.caption_ids, "caption id")
    own = [column for column in alike if int(pairs.caption_image[column]) == row]
    chosen = own or alike
    if len(chosen) > 1:
        whose = f"image {pairs.image_ids[row]!r}" if own else "other images"
        message = f"{len(chosen)} captions of {whose} read {text!r}, {pairs.caption_ids[chosen[0]]!r} is taken"
        warnings.warn(f"{message} — give a caption id to choose", stacklevel=2)
    return chosen[0]


def _find(name: str, known: Sequence[str], what: str) -> int:
    try:
        return known.index(name)
    except ValueError as error:
        close = difflib.get_close_matches(name, known[:20000], n=1)
        hint = f" — did you mean '{close[0]}'?" if close else f" — the first is '{known[0]}'"
        raise DataError(f"no {what} '{name}' among {len(known)}{hint}") from error
