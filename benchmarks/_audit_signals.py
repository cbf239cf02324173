"""What an audit may rank by, and how well a ranking finds what it should."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.evaluate.uncertainty import auroc
from vacsr.methods.mixtures import clean_by_gaussians, rescaled
from vacsr.scoring import PairScorer, PairScores
from vacsr.search.audit import (
    caption_sums,
    prototypes,
    signals,
    weights,
)

LEMON = (5.0, 5.0, 0.1, 5.0)
"""The paper's fixed β, γ, τ₁ and τ₂, with k=30."""
_DEV = 10  # LEMoN is tuned on the labels of every tenth image
_BLOCK = 1000
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
def wrong_signals(scorer: PairScorer, pairs: Any, wrong: Tensor) -> dict[str, Tensor]:
    """Of labelled pairs of a cosine method; larger is more suspect. [M] each. ``wrong``: what LEMoN is tuned on."""
    scores, owner = scorer.score_set(pairs), pairs.caption_image
    v, t = scores.images.mean, scores.texts.mean
    audit = signals(scores, owner)
    loss = rescaled(batch_losses(scorer, scores, owner))
    confidence, margin = candidate_confidence(v, t, owner, scale=float(scorer.model.method.log_scale.exp()))  # type: ignore[union-attr, operator]
    lemon, part = Lemon.of(v, t, owner), owner % _DEV == 0
    best = max(lemon_grid(), key=lambda values: measured(lemon.score(*values)[part], wrong[part])["precision_at_n"])
    return {
        "audit": audit.suspicion,
        "agreement": -audit.own,
        "CLIP score": -(v[owner] * t).sum(dim=1),
        "loss GMM": by_both(-clean_by_gaussians(loss), loss),
        "self-confidence": -confidence,
        "normalized margin": -margin,
        "LEMoN": lemon.score(*LEMON),
        "LEMoN, tuned": lemon.score(*best),
    }


def candidate_confidence(v: Tensor, t: Tensor, owner: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Probability of each caption's image among all images, and how far it is ahead of the best other. [M], [M]

    These are cleanlab's self-confidence and normalized margin, where every image is a class.
    """
    own, margin = [], []
    for rows in torch.arange(len(t)).split(_BLOCK):
        chance, at = (scale * t[rows] @ v.T).softmax(dim=1), owner[rows].unsqueeze(1)
        own.append(chance.gather(1, at).squeeze(1))
        margin.append(own[-1] - chance.scatter(1, at, 0.0).amax(dim=1))
    return torch.cat(own), torch.cat(margin)


class Lemon(NamedTuple):
    """LEMoN (Zhang et al., ICML 2025): a pair's distance, and those of its neighbours in one kind to it in the other.

    Neighbours are labelled pairs besides the pair itself, so the other captions of an image are among them.
    """

    distance: Tensor  # [M] of image and caption
    near: Tensor  # [2, M, k] distance to each neighbour: of images, of captions
    across: Tensor  # [2, M, k] of captions, of images
    theirs: Tensor  # [2, M, k] of the neighbours' own image and caption

    @classmethod
    def of(cls, v: Tensor, t: Tensor, owner: Tensor, *, k: int = 30) -> Lemon:
        distance = 1 - (v[owner] * t).sum(dim=1)
        by_image = torch.cat([(rows @ v.T)[:, owner].topk(k + 1).indices for rows in v.split(_BLOCK)])[owner]
        by_text = torch.cat([(rows @ t.T).topk(k + 1).indices for rows in t.split(_BLOCK)])
        parts: tuple[list[Tensor], ...] = ([], [], [])
        for index, kind, other in ((by_image, v[owner], t), (by_text, t, v[owner])):
            neighbours = _without_self(index)
            for part, vectors in ((parts[0], kind), (parts[1], other)):
                part.append(torch.stack([1 - (vectors * vectors[column]).sum(dim=1) for column in neighbours.T], dim=1))
            parts[2].append(distance[neighbours])
        return cls(distance, *map(torch.stack, parts))

    def score(self, beta: float, gamma: float, tau_1: float, tau_2: float) -> Tensor:
        """``beta`` weighs neighbours of the image, ``gamma`` those of the caption. [M]"""
        image, text = ((-tau_1 * self.near - tau_2 * self.theirs).exp() * self.across).mean(dim=2)
        return self.distance + beta * image + gamma * text


def _without_self(index: Tensor) -> Tensor:
    """Neighbours of each row but itself; the farthest goes where it is not among them. [M, k + 1] -> [M, k]"""
    keep = index != torch.arange(len(index)).unsqueeze(1)
    keep[keep.all(dim=1), -1] = False
    return index[keep].view(len(index), -1)


def lemon_grid() -> Iterator[tuple[float, float, float, float]]:
    weight = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
    return itertools.product(weight, weight, (0.0, 0.1, 1.0, 5.0), (0.0, 1.0, 5.0, 10.0))


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
