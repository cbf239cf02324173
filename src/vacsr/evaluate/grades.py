"""Graded and preference tests of any pairs: how a model's scores order them, beside people and rivals.

Captions need not be in the data: others are embedded as words, or looked up in files of caption vectors. Intervals are
95% bootstrap intervals over images, since pairs of one image are not independent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import rankdata

from vacsr.data.pairs import LabelledPairs
from vacsr.evaluate.agreement import Judgments, false_negative_auroc, kendall_tau, published_form
from vacsr.evaluate.pair_files import CaptionVectors, Preferences, Scored
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.signals import pair_signals
from vacsr.evaluate.significance import Interval, Part, image_draws, interval, paired_bootstrap
from vacsr.evaluate.uncertainty import Array, Values, as_vector, check_length, pearson

Integers = NDArray[np.int64]
DRAWS = 1000
_BLOCK = 1 << 23  # pairs of rows that are compared at once


class PairTests(NamedTuple):
    """What single pairs are tested with, besides graded judgments."""

    preferences: tuple[Preferences, ...] = ()
    rivals: Mapping[str, Scored] = {}
    """Scores of other systems, by name."""
    captions: CaptionVectors | None = None
    """Features of captions that are not in the data."""


def graded_agreement(
    score: Values,
    ratings: Values,
    *,
    images: Sequence[Any],
    own: Sequence[bool] | NDArray[np.bool_] | None = None,
    variant: Literal["b", "c"] = "c",
    rivals: Mapping[str, Values] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """How well scores [N] order pairs that people rated [N, R], NaN where a rating is missing. Times 100.

    ``images`` [N]: the image of each pair; ``own`` [N]: whether the caption was written for it; ``rivals``: scores [N]
    of other systems, NaN where unknown. ``tau_published`` has every rating as a row and leaves own captions out;
    ``tau`` and ``spearman`` are with mean ratings of all pairs. ``human_tau``: each rater against the others' mean.

    >>> result = graded_agreement([0.9, 0.5, 0.1], [[4, 4], [2, 3], [1, 1]], images=["a", "b", "c"], draws=10)
    >>> round(result["tau"], 1), round(result["spearman"], 1)
    (100.0, 100.0)
    """
    values, every = as_vector("score", score), np.atleast_2d(np.asarray(ratings, dtype=np.float64).T).T
    check_length(values, every)
    mask = np.zeros(len(values), dtype=bool) if own is None else np.asarray(own, dtype=bool)
    image = np.unique(np.asarray(images), return_inverse=True)[1]
    times = image_draws(int(image.max(initial=-1)) + 1, draws=draws, generator=np.random.default_rng(seed))
    published, mean = published_form(values, every, own=mask), np.nanmean(every, axis=1)
    forms = {
        "tau_published": (published.score, published.rating, image[published.row]),
        "tau": (values, mean, image),
    }
    result: dict[str, Any] = {"variant": variant}
    for name, (x, y, of) in forms.items():
        low, high = _ends(drawn_taus(x, y, image=of, times=times, variant=variant))
        result |= {name: kendall_tau(x, y, variant=variant), f"{name}_low": low, f"{name}_high": high}
    result |= {
        "spearman": 100 * pearson(rankdata(values), rankdata(mean)),
        "human_tau": human_tau(every[~mask], variant=variant),
        "pairs": len(values),
        "pairs_published": len(np.unique(published.row)),
        "images": len(np.unique(image)),
    }
    beside = {
        name: _beside(values, other, every, own=mask, image=image, times=times, variant=variant)
        for name, other in (rivals or {}).items()
    }
    return result | ({"rivals": beside} if beside else {})


def _beside(
    score: Array,
    other: Values,
    ratings: Array,
    *,
    own: NDArray[np.bool_],
    image: Integers,
    times: Array,
    variant: Literal["b", "c"],
) -> dict[str, Any]:
    """A rival's τ in the published form, ours on the pairs that it scored, and the difference over the same draws."""
    rival = np.asarray(other, dtype=np.float64)
    hidden = own | np.isnan(rival)
    ours, theirs = (published_form(values, ratings, own=hidden) for values in (score, rival))
    taus = [kendall_tau(form.score, form.rating, variant=variant) for form in (ours, theirs)]
    drawn = [
        drawn_taus(form.score, form.rating, image=image[form.row], times=times, variant=variant)
        for form in (ours, theirs)
    ]
    difference = drawn[0] - drawn[1]
    tested = interval(taus[0] - taus[1], difference[~np.isnan(difference)]) if len(ours.row) > 1 else None
    named = {"difference": math.nan, "low": math.nan, "high": math.nan, "p": math.nan}
    pairs = len(np.unique(ours.row))
    return {"pairs": pairs, "tau_published": taus[1], "ours": taus[0], **(tested._asdict() if tested else named)}


def human_tau(ratings: Array, *, variant: Literal["b", "c"] = "c") -> float | None:
    """The ceiling: τ of each rater with the mean of the others, averaged. [N, R], NaN where missing; None if R is 1

    >>> human_tau(np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 3.0]]))
    100.0
    """
    taus = []
    for rater in range(ratings.shape[1] if ratings.shape[1] > 1 else 0):
        others = np.delete(ratings, rater, axis=1)
        both = ~np.isnan(ratings[:, rater]) & ~np.isnan(others).all(axis=1)
        taus.append(kendall_tau(np.nanmean(others[both], axis=1), ratings[both, rater], variant=variant))
    return float(np.mean(taus)) if taus else None


def drawn_taus(x: Array, y: Array, *, image: Integers, times: Array, variant: Literal["b", "c"]) -> Array:
    """Kendall's τ times 100 when image i is drawn ``times[d, i]`` times, NaN where undefined. [N] each, [D, I] -> [D]

    What two rows add depends on their images alone once they are summed over these, so a draw is a quadratic form:
    the result is scipy's on the drawn rows, and no draw is sorted.
    """
    order, size = image.argsort(kind="stable"), times.shape[1]
    owner = image[order]
    ranks = [np.unique(values[order], return_inverse=True)[1].astype(np.int32) for values in (x, y)]
    agreed = np.zeros((size, size))
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    step = max(1, _BLOCK // max(1, len(x)))
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        sign = np.ones((len(owner[rows]), len(x)), dtype=np.int8)
        for rank in ranks:
            sign *= (rank[rows, None] > rank).astype(np.int8) - (rank[rows, None] < rank).astype(np.int8)
        summed = np.zeros((len(sign), size))
        summed[:, owner[starts]] = np.add.reduceat(sign, starts, axis=1, dtype=np.int64)
        np.add.at(agreed, owner[rows], summed)
    surplus = ((times @ agreed) * times).sum(axis=1) / 2  # concordant less discordant
    counts = [csr_array((np.ones(len(x)), (rank, owner)), shape=(len(x), size)) @ times.T for rank in ranks]
    number = counts[0].sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        if variant == "b":
            ties = [(count * (count - 1)).sum(axis=0) / 2 for count in counts]
            total = number * (number - 1) / 2
            return np.asarray(100 * surplus / np.sqrt((total - ties[0]) * (total - ties[1])))
        classes = np.minimum(*((count > 0).sum(axis=0) for count in counts))
        return np.asarray(100 * 2 * surplus / (number**2 * (classes - 1) / classes))


def preference_accuracy(
    better: Values,
    worse: Values,
    *,
    images: Sequence[Any],
    kinds: Sequence[str] = (),
    rivals: Mapping[str, tuple[Values, Values]] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """How often the better caption of an image scores higher, a tie counting half, in percent. [N] each

    ``rivals``: the two scores [N] by other systems, NaN where unknown.

    >>> preference_accuracy([0.9, 0.2], [0.1, 0.3], images=["a", "b"], kinds=["swap", "add"], draws=10)["accuracy"]
    50.0
    """
    above, below = as_vector("better", better), as_vector("worse", worse)
    check_length(above, below)
    right, labels = 50.0 * (1 + np.sign(above - below)), np.asarray(kinds)
    image = np.unique(np.asarray(images), return_inverse=True)[1]

    def bootstrap(values: Array, rows: NDArray[np.bool_]) -> Interval:
        return paired_bootstrap([Part(values[rows, None], image[rows])], draws=draws, seed=seed)[0]

    def accuracy(rows: NDArray[np.bool_]) -> dict[str, Any]:
        share, low, high, _ = bootstrap(right, rows)
        return {"accuracy": share, "low": low, "high": high, "pairs": int(rows.sum())}

    result = accuracy(np.ones(len(right), dtype=bool))
    if len(labels):
        result["kinds"] = {str(kind): accuracy(labels == kind) for kind in np.unique(labels)}
        result["mean_of_kinds"] = float(np.mean([part["accuracy"] for part in result["kinds"].values()]))
    for name, both in (rivals or {}).items():
        theirs = 50.0 * (1 + np.sign(np.asarray(both[0], dtype=np.float64) - np.asarray(both[1], dtype=np.float64)))
        known = ~np.isnan(theirs)
        shares = {
            "pairs": int(known.sum()),
            "accuracy": float(theirs[known].mean()),
            "ours": float(right[known].mean()),
        }
        result.setdefault("rivals", {})[name] = {**shares, **bootstrap(right - theirs, known)._asdict()}
    return result


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


def _ends(drawn: Array) -> tuple[float, float]:
    """Of the 95% interval; draws without a value are left out."""
    known = drawn[~np.isnan(drawn)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (math.nan, math.nan)
    return float(low), float(high)
