"""Tests of single pairs: their captions are looked up or embedded, scored, and compared with people and rivals.

Captions need not be in the data: others are embedded as words, or looked up in files of caption vectors.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vacsr.data.pairs import LabelledPairs
from vacsr.evaluate.agreement import Judgments, false_negative_auroc
from vacsr.evaluate.grades import graded_agreement, preference_accuracy
from vacsr.evaluate.pair_files import CaptionVectors, Preferences, Scored
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.signals import pair_signals
from vacsr.evaluate.uncertainty import Array


class PairTests(NamedTuple):
    """What single pairs are tested with, besides graded judgments."""

    preferences: tuple[Preferences, ...] = ()
    rivals: Mapping[str, Scored] = {}  # scores of other systems, by name
    captions: CaptionVectors | None = None  # features of captions that are not in the data


def pair_values(
    scores: Scores,
    pairs: LabelledPairs,
    images: Sequence[str],
    *,
    ids: Sequence[str],
    texts: Sequence[str] | None,
    captions: CaptionVectors | None = None,
) -> dict[str, Array]:
    """Score and uncertainties of pairs of an image id and a caption, NaN where image or caption is unknown. -> [N] each

    A caption is looked for in the data, then among ``captions``, by id and by text; else the model embeds its text, if
    that is known and the model can.
    """
    rows = {name: row for row, name in enumerate(pairs.image_ids)}
    gallery = {text: col for col, text in enumerate(pairs.captions or ())}
    gallery |= {name: col for col, name in enumerate(pairs.caption_ids)}
    stored, words = {} if captions is None else captions.rows, dict[str, int]()
    sources: list[list[tuple[int, int, int]]] = [[], [], []]  # of each: position, row, column
    for position, (image, *called) in enumerate(zip(images, ids, texts or ids, strict=True)):
        columns = (
            (source, known[name]) for source, known in enumerate((gallery, stored)) for name in called if name in known
        )
        source, col = next(columns, (2, -1))
        if source == 2 and texts is not None and image in rows:
            col = words.setdefault(called[1], len(words))
        if image in rows and col >= 0:
            sources[source].append((position, rows[image], col))
    others = (
        scores,
        scores.against(captions.vectors) if captions is not None and sources[1] else None,
        scores.against(list(words)) if words else None,
    )
    values: dict[str, Array] = {"score": np.full(len(images), math.nan)}
    for listed, scored in zip(sources, others, strict=True):
        if scored is not None and listed:
            positions, image_rows, cols = torch.tensor(listed).unbind(1)
            for name, value in pair_signals(scored, image_rows, cols).items():
                filled = values.setdefault(name, np.full(len(images), math.nan))
                filled[positions.numpy()] = value.double().cpu().numpy()
    return values


def grades_result(
    scores: Scores, pairs: LabelledPairs, judgments: Sequence[Judgments], tests: PairTests
) -> dict[str, Any]:
    """By name: agreement with all judged pairs whose image is in ``pairs``, and AUROCs of false negatives."""
    result: dict[str, Any] = {}
    held = set(pairs.image_ids)
    owners = [pairs.image_ids[row] for row in pairs.caption_image.tolist()]
    labelled = {*zip(owners, pairs.caption_ids, strict=True), *zip(owners, pairs.captions or (), strict=False)}
    for judged in judgments:
        part = judged.take([row for row, image in enumerate(judged.image_ids) if image in held])
        every = pair_values(
            scores, pairs, part.image_ids, ids=part.caption_ids, texts=part.captions, captions=tests.captions
        )
        known = ~np.isnan(every["score"])
        left_out = _count_unknown(part.name, known)
        if not known.any():
            continue
        part = part.take(np.flatnonzero(known).tolist())
        called = [part.image_ids, part.caption_ids, part.captions or part.caption_ids]
        own = [bool({(image, name), (image, text)} & labelled) for image, name, text in zip(*called, strict=True)]
        part = replace(part, same_image=part.same_image | np.array(own))
        values = {name: value[known] for name, value in every.items()}
        rivals = {name: _look_up(scored, *called) for name, scored in tests.rivals.items()}
        result[part.name] = graded_agreement(
            values["score"], part.ratings, images=part.image_ids, own=part.same_image, variant=part.variant,
            rivals={name: score for name, score in rivals.items() if not np.isnan(score).all()},
        )  # fmt: skip
        missed = {name: false_negative_auroc(value, part) for name, value in values.items()}
        result[part.name] |= {"left_out": left_out, "auroc_false_negative": missed}
    return result


def preferences_result(scores: Scores, pairs: LabelledPairs, tests: PairTests) -> dict[str, Any]:
    """By name: accuracy over the preferences whose image is in ``pairs``."""
    result: dict[str, Any] = {}
    held = set(pairs.image_ids)
    for given in tests.preferences:
        here = [row for row, image in enumerate(given.image_ids) if image in held]
        images, *sides = ([column[row] for row in here] for column in (given.image_ids, given.better, given.worse))
        better, worse = (
            pair_values(scores, pairs, images, ids=side, texts=side, captions=tests.captions)["score"] for side in sides
        )
        known = ~np.isnan(better + worse)
        left_out = _count_unknown(given.name, known)
        if not known.any():
            continue
        rivals = {}
        for name, scored in tests.rivals.items():
            above, below = (_look_up(scored, images, side, side)[known] for side in sides)
            if not np.isnan(above - below).all():
                rivals[name] = (above, below)
        kinds = np.array([given.kinds[row] for row in here])[known] if given.kinds else ()
        accuracy = preference_accuracy(
            better[known], worse[known], images=np.array(images)[known], kinds=kinds, rivals=rivals
        )
        result[given.name] = {**accuracy, "left_out": left_out}
    return result


def _look_up(scored: Scored, images: Sequence[str], ids: Sequence[str], texts: Sequence[str]) -> Array:
    """A rival's scores, by caption id or else by text; NaN where it has none. -> [N]"""
    called = zip(images, ids, texts, strict=True)
    return np.array([scored.get((image, name), scored.get((image, text), math.nan)) for image, name, text in called])


def _count_unknown(name: str, known: NDArray[np.bool_]) -> int:
    """How many pairs have a caption without a vector; a warning says so."""
    unknown = int((~known).sum())
    if unknown:
        message = f"{name}: {unknown:,} of {len(known):,} pairs are left out, as their captions have no vectors"
        action = "give these with --captions FILE, which vacsr embed --captions writes"
        warnings.warn(f"{message} — {action}", stacklevel=4)
    return unknown
