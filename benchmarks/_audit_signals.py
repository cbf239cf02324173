"""What an audit may rank by, and how well a ranking finds what it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.evaluate.uncertainty import auroc
from vacsr.methods.mixtures import clean_by_gaussians, rescaled
from vacsr.scoring import PairScorer, PairScores
from vacsr.search.audit import (
    caption_sums,
    find_neighbours,
    own_agreement,
    prototypes,
    signals,
    suspicion,
    weights,
)

HIGH_RECALLS = (50, 70, 80, 90, 95, 99)
RECALLS = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
_OTHERS = 127  # that a pair's loss is computed among: a batch of 128
_RIVAL = 0.5


def measured(value: Tensor, target: Tensor, *, recalls: Sequence[int] = RECALLS) -> dict[str, Any]:
    """Precision at the true number and along the recall, average precision, AUROC; in percent. [P], [P] bool"""
    hit = target[value.argsort(descending=True, stable=True)].double()
    count, total = hit.cumsum(0), int(target.sum())
    precision = count / torch.arange(1, len(hit) + 1)
    at = [int((count >= recall / 100 * total).int().argmax()) for recall in recalls]
    return {
        "n": total,
        "of": len(hit),
        "precision_at_n": 100 * float(precision[total - 1]),
        "ap": 100 * float(precision[hit > 0].mean()),
        "auroc": 100 * auroc(value, target.float()),
        "precision_at_recall": {
            str(r): 100 * float(precision[position]) for r, position in zip(recalls, at, strict=True)
        },
    }


@torch.inference_mode()
def wrong_signals(scorer: PairScorer, pairs: Any, *, name: str) -> dict[str, Tensor]:
    """Of labelled pairs; larger is more suspect. [M] each"""
    scores, owner = scorer.score_set(pairs), pairs.caption_image
    cols, v, t = torch.arange(len(pairs)), scores.images.mean, scores.texts.mean
    audit = signals(scores, owner)
    cosine = (v[owner] * t).sum(dim=1)
    values = {f"{name} audit": audit.suspicion, f"{name} agreement": -audit.own, f"{name} cosine": -cosine}
    sigma = scores.uncertainty(owner, cols)
    if sigma is not None:
        return values | {f"{name} grade": -audit.level, f"{name} σ": sigma}
    loss = rescaled(batch_losses(scorer, scores, owner))
    chance = clean_by_gaussians(loss)
    clean = chance.float()
    sums = caption_sums(t, owner, clean, images=len(v))
    own = own_agreement(v, t, owner, weight=clean, sums=sums)
    elsewhere = find_neighbours(prototypes(v, sums), t, owner, captions=1).image_agreement
    values |= {f"{name} loss GMM": by_both(-chance, loss), f"{name} loss GMM + siblings": -own}
    return values | {f"{name} loss GMM + siblings + rival image": suspicion(own, elsewhere)}


@torch.inference_mode()
def missing_signals(scorer: PairScorer, pairs: Any, rows: Tensor, cols: Tensor, *, name: str) -> dict[str, Tensor]:
    """Of unlabelled pairs; larger is more like a match. [P] each"""
    scores, owner = scorer.score_set(pairs), pairs.caption_image
    v, t = scores.images.mean, scores.texts.mean
    own = scores.score_of(owner, torch.arange(len(owner)))
    prototype = prototypes(v, caption_sums(t, owner, weights(own, scores.grade(own)), images=len(v)))
    agreement = (prototype[rows] * t[cols]).sum(dim=1)
    rival = _RIVAL * other_images(prototype @ t.T, owner, rows, cols)
    values = {f"{name} audit": agreement, f"{name} cosine": (v[rows] * t[cols]).sum(dim=1)}
    values |= {f"{name} audit + rival image": agreement + rival, f"{name} audit − rival image": agreement - rival}
    sigma = scores.uncertainty(rows, cols)
    if sigma is not None:
        score = scores.score_of(rows, cols)
        values |= {f"{name} score": score, f"{name} σ": sigma}
        values |= {f"{name} score + 0.1σ": standard(score) + 0.1 * standard(sigma)}
    if name == "infonce":
        loss = candidate_losses(scorer, scores, owner, rows, cols)
        values |= {f"{name} loss GMM": by_both(clean_by_gaussians(rescaled(loss)), -loss)}
    return values


def other_images(agreement: Tensor, owner: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Of each pair: the agreement of its caption with the best image besides this one and its own. [N, M] -> [P]"""
    free = agreement.clone()
    free[owner, torch.arange(len(owner))] = -torch.inf
    best = free.topk(2, dim=0)
    return torch.where(best.indices[0, cols] == rows, best.values[1, cols], best.values[0, cols])


def batch_losses(scorer: PairScorer, scores: PairScores, owner: Tensor, *, rounds: int = 8) -> Tensor:
    """Each labelled pair's InfoNCE loss among 127 others, both directions, mean over some shuffles. -> [M]"""
    scale = float(scorer.model.method.log_scale.exp())  # type: ignore[union-attr, operator]
    generator, total = torch.Generator().manual_seed(0), torch.zeros(len(owner))
    for _ in range(rounds):
        for batch in torch.randperm(len(owner), generator=generator).split(_OTHERS + 1):
            logit = scale * scores.images.mean[owner[batch]] @ scores.texts.mean[batch].T
            both = logit.logsumexp(1) + logit.logsumexp(0) - 2 * logit.diagonal()
            total[batch] += 0.5 * both / rounds
    return total


def candidate_losses(
    scorer: PairScorer, scores: PairScores, owner: Tensor, rows: Tensor, cols: Tensor, *, rounds: int = 8
) -> Tensor:
    """The same loss of unlabelled pairs, as if each were labelled, among 127 labelled pairs of other images. -> [P]"""
    scale = float(scorer.model.method.log_scale.exp())  # type: ignore[union-attr, operator]
    v, t = scores.images.mean, scores.texts.mean
    generator, total = torch.Generator().manual_seed(0), torch.zeros(len(rows))
    own = scale * (v[rows] * t[cols]).sum(dim=1)
    for _ in range(rounds):
        batch = torch.randperm(len(owner), generator=generator)[:_OTHERS]
        home = owner[batch]
        to_texts = (scale * v @ t[batch].T).masked_fill(torch.arange(len(v)).unsqueeze(1) == home, -torch.inf)
        to_images = (scale * t @ v[home].T).masked_fill(owner.unsqueeze(1) == home, -torch.inf)
        both = torch.logaddexp(own, to_texts.logsumexp(1)[rows]) + torch.logaddexp(own, to_images.logsumexp(1)[cols])
        total += (0.5 * both - own) / rounds
    return total


def by_both(first: Tensor, second: Tensor) -> Tensor:
    """Positions by ``first``, equal ones by ``second``; larger is better: chances may be 0 or 1 for many. [P], [P]"""
    order = second.argsort(descending=True, stable=True)
    order = order[first[order].argsort(descending=True, stable=True)]
    return torch.empty(len(order)).scatter(0, order, -torch.arange(len(order), dtype=torch.float32))


def standard(x: Tensor) -> Tensor:
    """Mean 0, deviation 1."""
    return functional.layer_norm(x, x.shape)
