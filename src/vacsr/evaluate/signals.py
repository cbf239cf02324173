"""Two uncertainties, and what each is worth: that of a pair, and that of the answer to a query.

Of a pair: σ, the disagreement of members, 1 − cosine. Of an answer: the confidence, which is a softmax of the scores of
the best candidates at a temperature fitted to a dev split, and two signals that need no training, of *Over the Top-1*
(Gomez, UAI 2025), whose third is 1 − cosine: how many networks vote for another first answer, and how small a change of
the query would bring the second answer to the top.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from vacsr.evaluate.metrics import hits_at
from vacsr.evaluate.protocols import Gallery
from vacsr.evaluate.ranks import BothRanks
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.uncertainty import Array, risk_curve, selective_risk
from vacsr.scoring.scorer import Vectors
from vacsr.scoring.topk import DIRECTIONS, Direction

CANDIDATES = 200  # best answers that the softmax of a confidence is over
_PAIRS = 8192  # whose cosines are computed at once
_VOTES = 1 << 24  # cosines of all pairs at once
_TINY = 1e-9


class Temperature(NamedTuple):
    """Of the softmax of scores in each direction."""

    i2t: float
    t2i: float
    split: str = ""  # that it was fitted to; empty: the loss's own scale

    def of(self, direction: Direction) -> float:
        return self.i2t if direction == "i2t" else self.t2i


def pair_signals(scores: Scores, rows: Tensor, cols: Tensor) -> dict[str, Tensor]:
    """The score and every uncertainty of the pairs (rows[n], cols[n]) that there is. [P], [P] -> [P] each"""
    vectors = scores.vectors()
    values = {
        "score": scores.score_of(rows, cols),
        "sigma": scores.uncertainty(rows, cols),
        "disagreement": scores.disagreement(rows, cols),
        "one_minus_cosine": None if vectors is None else 1.0 - _cosine(vectors.images, vectors.texts, rows, cols),
    }
    return {name: value for name, value in values.items() if value is not None}


def _cosine(x: Tensor, y: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Of rows of x with rows of y. [N, d], [M, d], [P], [P] -> [P]"""
    parts = zip(*(torch.split(index.to(x.device), _PAIRS) for index in (rows, cols)), strict=True)
    return torch.cat([(x[row] * y[col]).sum(dim=1) for row, col in parts])


def answer_signals(
    scores: Scores, gallery: Gallery, direction: Direction, *, temperature: float | None
) -> dict[str, Tensor]:
    """The uncertainty of each query's first answer, by every signal that there is. -> [Q] each, on the CPU"""
    vectors, one = scores.vectors(), torch.zeros(1, dtype=torch.int64)
    if temperature is None and len(pair_signals(scores, one, one)) == 1:
        return {}  # scores alone: no answer need be looked for
    width = CANDIDATES if temperature is not None else 2 if vectors is not None else 1
    top = gallery.topk(scores, width, direction=direction)
    queries, first = gallery.queries(direction).to(top.index.device), top.index[:, 0]
    signals = pair_signals(scores, *((queries, first) if direction == "i2t" else (first, queries)))
    del signals["score"]
    if temperature is not None:
        signals["confidence"] = 1.0 - torch.from_numpy(confidence(top.score.double().cpu().numpy(), temperature))
    if vectors is not None and top.index.shape[1] > 1:
        asked, items = (vectors.images, vectors.texts) if direction == "i2t" else (vectors.texts, vectors.images)
        signals["perturbation"] = -flip_distance(asked[queries], items[first], items[top.index[:, 1]])
        if vectors.networks > 1:
            signals["votes"] = 1.0 - vote_share(vectors, gallery, direction)
    return {name: value.cpu() for name, value in signals.items()}


def confidence(top: Array, temperature: float) -> Array:
    """The first's share of a softmax over the best scores, best first. [Q, k] -> [Q]

    >>> confidence(np.array([[2.0, 2.0], [9.0, -99.0]]), 1.0)
    array([0.5, 1. ])
    """
    return np.asarray(1.0 / np.exp((top - top[:, :1]) / temperature).sum(axis=1))


def fit_temperature(top: Array, right: Array) -> float:
    """The temperature at which confidences best explain whether first answers are right. [Q, k], [Q] of 0, 1 or NaN

    Of highest likelihood. Queries without a positive (NaN) are left out.
    """
    known = ~np.isnan(right)
    best, hit = top[known], right[known]
    spread = float(best.std()) or 1.0

    def loss(log: float) -> float:
        chance = np.clip(confidence(best, spread * np.exp(log)), _TINY, 1 - _TINY)
        return float(-(hit * np.log(chance) + (1 - hit) * np.log1p(-chance)).mean())

    return float(spread * np.exp(minimize_scalar(loss, bounds=(-8.0, 4.0), method="bounded").x))


def fit_temperatures(scores: Scores, gallery: Gallery, ranks: BothRanks, *, split: str) -> Temperature:
    """Of both directions, on one gallery of labelled pairs."""
    i2t, t2i = (
        fit_temperature(
            gallery.topk(scores, CANDIDATES, direction=direction).score.double().cpu().numpy(),
            hits_at(one, 1).double().numpy(),
        )
        for direction, one in zip(DIRECTIONS, ranks, strict=True)
    )
    return Temperature(i2t, t2i, split)


def own_temperature(scores: Scores) -> Temperature | None:
    """That of the loss; None where it has none."""
    value = scores.temperature()
    return None if value is None else Temperature(value, value)


def flip_distance(query: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """How far a query must move, to first order, until the second item is as near by cosine. [Q, d] each -> [Q]

    The lead in cosine over the length of its gradient, for unit vectors.
    """
    apart = first - second
    lead = (query * apart).sum(dim=1)
    gradient: Tensor = torch.linalg.vector_norm(apart - lead.unsqueeze(1) * query, dim=1)
    return lead / gradient.clamp_min(_TINY)


def vote_share(vectors: Vectors, gallery: Gallery, direction: Direction) -> Tensor:
    """The share of networks whose first answer by cosine is the most common one. -> [Q]"""
    sides = (vectors.images, vectors.texts) if direction == "i2t" else (vectors.texts, vectors.images)
    rows = (gallery.images, gallery.captions) if direction == "i2t" else (gallery.captions, gallery.images)
    asked, held = (x[row.to(x.device)].chunk(vectors.networks, dim=1) for x, row in zip(sides, rows, strict=True))
    step = max(1, _VOTES // max(1, len(rows[1])))
    firsts = torch.stack([
        torch.cat([(part @ items.T).argmax(dim=1) for part in torch.split(queries, step)])
        for queries, items in zip(asked, held, strict=True)
    ])  # fmt: skip
    return (firsts.unsqueeze(0) == firsts.unsqueeze(1)).sum(dim=0).amax(dim=0) / vectors.networks


def signals_result(
    scores: Scores,
    galleries: Sequence[Gallery],
    ranks: Sequence[BothRanks],
    *,
    temperature: Temperature | None,
    missed: Mapping[str, float],
    cache: dict[Direction, dict[str, Tensor]],
) -> dict[str, Any]:
    """By signal: risk and coverage when the surest queries are answered first, and what it says of false negatives.

    The queries of all galleries together; ``missed``: the AUROC of false negatives by signal, of those that have one;
    ``cache`` keeps the signals of the whole gallery, which protocols share.
    """
    result: dict[str, Any] = {}
    for direction, of_galleries in zip(DIRECTIONS, zip(*ranks, strict=True), strict=True):
        heat = None if temperature is None else temperature.of(direction)
        parts = []
        for gallery in galleries:
            signals = cache.get(direction) if gallery.whole else None
            parts.append(signals or answer_signals(scores, gallery, direction, temperature=heat))
            if gallery.whole:
                cache[direction] = parts[-1]
        wrong = 1.0 - torch.cat([hits_at(one, 1) for one in of_galleries])
        for name in parts[0]:
            risk = selective_risk(torch.cat([part[name] for part in parts]), wrong)
            curve = {f"aurc_{direction}": 100.0 * float(risk.mean()), f"risk_{direction}": risk_curve(risk)}
            result.setdefault(name, {}).update(curve)
    for name in result:
        if name in missed:
            result[name]["auroc_false_negative"] = missed[name]
    if temperature is not None and "confidence" in result:
        fitted = {"temperature_i2t": temperature.i2t, "temperature_t2i": temperature.t2i}
        result["confidence"] |= {**fitted, "fitted_on": temperature.split or None}
    return result
