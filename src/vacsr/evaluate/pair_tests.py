"""Tests of single pairs: their captions are looked up or embedded, scored, and compared with people and rivals.

Captions need not be in the data: others are embedded as words, or looked up in files of caption vectors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

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
    rivals: Mapping[str, Scored] = {}
    """Scores of other systems, by name."""
    captions: CaptionVectors | None = None
    """Features of captions that are not in the data."""


def pair_values(
    scores: Scores,
    pairs: LabelledPairs,
    images: Sequence[str],
    names: Sequence[Sequence[str]],
    *,
    captions: CaptionVectors | None = None,
) -> dict[str, Array]:
    """Score and uncertainties of pairs of an image id and a caption, NaN where image or caption is unknown. -> [N] each

    ``names[n]``: what the caption goes by, its id and perhaps its text, which is the last. It is looked for in the
    data, then among ``captions``; else the model embeds the text, if it can.
    """
    rows = {name: row for row, name in enumerate(pairs.image_ids)}
    gallery = {text: col for col, text in enumerate(pairs.captions or ())}
    gallery |= {name: col for col, name in enumerate(pairs.caption_ids)}
    stored, words = {} if captions is None else captions.rows, dict[str, int]()
    sources: list[list[tuple[int, int, int]]] = [[], [], []]  # of each: position, row, column
    for position, (image, called) in enumerate(zip(images, names, strict=True)):
        if image not in rows:
            continue
        for source, known in enumerate((gallery, stored)):
            name = next((name for name in called if name in known), None)
            if name is not None:
                sources[source].append((position, rows[image], known[name]))
                break
        else:
            sources[2].append((position, rows[image], words.setdefault(called[-1], len(words))))
    others = (
        scores,
        scores.against(captions.vectors) if captions is not None and sources[1] else None,
        scores.against(list(words)) if words else None,
    )
    values: dict[str, Array] = {"score": np.full(len(images), math.nan)}
    for listed, scored in zip(sources, others, strict=True):
        if scored is not None and listed:
            places, image_rows, cols = torch.tensor(listed).unbind(1)
            for name, value in pair_signals(scored, image_rows, cols).items():
                filled = values.setdefault(name, np.full(len(images), math.nan))
                filled[places.numpy()] = value.double().cpu().numpy()
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
        every = pair_values(scores, pairs, part.image_ids, _names(part), captions=tests.captions)
        known = ~np.isnan(every["score"])
        if len(part) and not known.any():
            _warn_of_captions(part.name)
        if not known.any():
            continue
        left_out, part = int((~known).sum()), part.take(np.flatnonzero(known).tolist())
        called = list(zip(part.image_ids, _names(part), strict=True))
        own = [any((image, name) in labelled for name in names) for image, names in called]
        part = replace(part, same_image=part.same_image | np.array(own))
        values = {name: value[known] for name, value in every.items()}
        rivals = {name: _look_up(scored, called) for name, scored in tests.rivals.items()}
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
    for given in tests.preferences:
        sides = [
            pair_values(scores, pairs, given.image_ids, [(text,) for text in side], captions=tests.captions)["score"]
            for side in (given.better, given.worse)
        ]
        known = ~np.isnan(sides[0]) & ~np.isnan(sides[1])
        here = sum(image in set(pairs.image_ids) for image in given.image_ids)
        if here and not known.any():
            _warn_of_captions(given.name)
        if not known.any():
            continue
        rows = np.flatnonzero(known).tolist()
        images = [given.image_ids[row] for row in rows]
        texts = [[side[row] for row in rows] for side in (given.better, given.worse)]
        rivals = {}
        for name, scored in tests.rivals.items():
            both = [
                _look_up(scored, [(image, (text,)) for image, text in zip(images, side, strict=True)]) for side in texts
            ]
            if not np.isnan(both[0] - both[1]).all():
                rivals[name] = (both[0], both[1])
        kinds = [given.kinds[row] for row in rows] if given.kinds else ()
        better, worse = (side[known] for side in sides)
        accuracy = preference_accuracy(better, worse, images=images, kinds=kinds, rivals=rivals)
        result[given.name] = {**accuracy, "left_out": here - len(rows)}
    return result


def _names(judged: Judgments) -> list[tuple[str, str]]:
    """What each caption goes by: its id, and its text where that is known."""
    return list(zip(judged.caption_ids, judged.captions or judged.caption_ids, strict=True))


def _look_up(scored: Scored, called: Sequence[tuple[str, Sequence[str]]]) -> Array:
    """A rival's scores; NaN where it has none. -> [N]"""
    found = (
        next((scored[image, name] for name in names if (image, name) in scored), math.nan) for image, names in called
    )
    return np.array(list(found), dtype=np.float64)


def _warn_of_captions(name: str) -> None:
    message = f"{name}: the model cannot embed words, and the data do not have these captions"
    warnings.warn(f"{message} — give their vectors: --captions FILE (vacsr embed --captions writes it)", stacklevel=4)
