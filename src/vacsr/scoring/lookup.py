"""Scores of single pairs by their names in a data set."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import torch

from vacsr.data.pairs import PairSet
from vacsr.errors import DataError
from vacsr.scoring import PairScorer


def score_named(scorer: PairScorer, pairs: PairSet, *, image: str, texts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """(image, text, score, grade, uncertainty) of each text, by caption id or by a caption's exact words."""
    scorer.model.provenance.check(pairs.provenance)
    row = _find(image, pairs.image_ids, "image id")
    cols = [_find_text(text, pairs) for text in texts]
    found = scorer.score_pairs(pairs.images[torch.tensor([row] * len(cols))], pairs.texts[torch.tensor(cols)])
    for n, text in enumerate(texts):
        sigma = "–" if found.uncertainty is None else f"{float(found.uncertainty[n]):.4f}"
        yield image, text, f"{float(found.score[n]):.4f}", f"{float(found.grade[n]):.4g}", sigma


def _find_text(text: str, pairs: PairSet) -> int:
    if pairs.captions is not None and text in pairs.captions:
        return pairs.captions.index(text)
    return _find(text, pairs.caption_ids, "caption id")


def _find(name: str, known: Sequence[str], what: str) -> int:
    try:
        return known.index(name)
    except ValueError as error:
        close = difflib.get_close_matches(name, known[:20000], n=1)
        hint = f" — did you mean '{close[0]}'?" if close else f" — the first is '{known[0]}'"
        raise DataError(f"no {what} '{name}' among {len(known)}{hint}") from error
