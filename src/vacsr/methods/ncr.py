"""NCR (Huang et al. 2021): noisy correspondence rectified by two networks that divide the data for each other."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vacsr.config import Share
from vacsr.methods.base import Embedding, Method, RetrievalConfig, TrainingView, register
from vacsr.methods.mixtures import clean_by_gaussians, rescaled
from vacsr.methods.vse import hinge_costs
from vacsr.objective import LossTerms, PairBlock, cosines

WARMUP, CLEAN, ALL = range(3)  # stages: all pairs count as right; only the clean ones train; the noisy ones too


class CoTeachingConfig(RetrievalConfig):
    """Settings that NCR and BiCro share."""

    margin: Annotated[float, Field(gt=0)] = 0.2
    """m of the hinge, for a pair that is surely right."""
    warmup: Share = 0.1
    """Share of the epochs, one at least unless 0, in which all pairs count as right, all negatives averaged; NCR: ⅓."""
    noisy_from: Share = 1.0
    """Share of the epochs after warm-up from which pairs called noisy train too; 1 for never. Both papers: half."""
    threshold: Share = 0.5
    """A pair is called clean above this probability."""
    base: Annotated[float, Field(gt=1)] = 10.0
    """Soft margin m·(base^y − 1)/(base − 1)."""


class NcrConfig(CoTeachingConfig):
    """NCR: two networks, a Gaussian mixture of losses tells clean from noisy, labels become soft margins."""

    name: Literal["ncr"] = "ncr"


class BothNetworks(NamedTuple):
    """A batch as both networks embed it; first axis: the network."""

    v: Tensor  # [2, B, d], unit vectors
    t: Tensor  # [2, B, d]
    score: Tensor  # [2, B, B], cosines


@register("ncr", NcrConfig, presets={"paper": {"warmup": 0.35, "noisy_from": 0.5}})
class Ncr(Method):
    """Score = mean of both networks' cosines, which is the cosine of the joined embeddings.

    Before each epoch after warm-up: each network's mean-negative losses → [0, 1] → two Gaussians → p(clean). Network k
    is trained on the other one's p. With ŷ_k its own guess (:func:`guess`) for a pair,

        clean (p > ½):  y = p + (1−p)·ŷ_k          noisy:  y = ½(ŷ_1 + ŷ_2), only in the last stage

    and the pair costs, by its hardest negatives,

        L_i = max_j (m(y_i) + s_ij − s_ii)₊ + max_j (m(y_i) + s_ji − s_ii)₊,   m(y) = m·(10^y − 1)/9.

    docs/methods/ncr.md lists what differs from the public code.
    """

    config: CoTeachingConfig
    networks = 2
    least_label = 0.0  # pairs with a smaller label are excluded
    clean: Tensor
    stage: Tensor

    def __init__(self, config: CoTeachingConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.register_training_state("stage", torch.zeros((), dtype=torch.int64))
        self.fit(None, torch.zeros(0))

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        self.register_training_state("clean", torch.ones(2, len(caption_image)))  # each network's probability

    @torch.no_grad()
    def start_epoch(self, view: TrainingView) -> None:
        warmup = view.first_epochs(self.config.warmup)
        late = view.epoch - warmup >= self.config.noisy_from * (view.epochs - warmup)
        self.stage.fill_(WARMUP if view.epoch < warmup else ALL if late else CLEAN)
        if view.epoch >= warmup:
            losses = view.caption_losses(view.embed(), self)
            self.clean.copy_(torch.stack([self.probability(rescaled(loss)) for loss in losses]))

    def probability(self, losses: Tensor) -> Tensor:
        """Of being clean, from losses rescaled to [0, 1]. [M] -> [M]"""
        return clean_by_gaussians(losses)

    def warmup_weights(self, loss: Tensor) -> Tensor:
        """Which pairs of a batch warm-up trains on. [2, B] -> [2, B] of 0 and 1"""
        return torch.ones_like(loss)

    def labels(self, both: BothNetworks, clean: Tensor, relevance: Tensor) -> Tensor:
        """Soft labels in [0, 1] that each network is trained with; ``clean`` is the other one's. [2, B] -> [2, B]"""
        guesses = guess(both.score, relevance, margin=self.config.margin)
        mean = guesses.mean(dim=0, keepdim=True)
        return torch.where(clean > self.config.threshold, clean + (1.0 - clean) * guesses, mean)

    def pair_losses(self, v: Embedding, t: Embedding, relevance: Tensor) -> Tensor:
        """Both networks' hinge losses, negatives averaged. [..., B, 2d], [..., B, 2d], [..., B, B] -> [2, ..., B]"""
        return mean_costs(split_networks(v.mean, t.mean).score, relevance, margin=self.config.margin)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """Warm-up where nothing is known of the captions."""
        both = split_networks(v.mean, t.mean)
        mean = mean_costs(both.score, pairs.relevance, margin=self.config.margin)
        warmup = (mean * self.warmup_weights(mean.detach())).mean(dim=1).sum()
        if pairs.captions is None or self.clean.shape[1] == 0:
            return LossTerms(warmup, {"warmup": warmup.detach()})
        clean = self.clean[:, pairs.captions].flip(0)
        trusted = clean > self.config.threshold
        with torch.no_grad():
            label = self.labels(both, clean, pairs.relevance)
        margin = soft_margin(label, margin=self.config.margin, base=self.config.base)
        i2t, t2i = hinge_costs(both.score, pairs.relevance, margin=margin)
        hardest = i2t.amax(dim=-1) + t2i.amax(dim=-2)
        used = (trusted | (self.stage == ALL)) & (label >= self.least_label)
        hinge = (hardest * used).mean(dim=1).sum()
        total = torch.where(self.stage == WARMUP, warmup, hinge)
        parts = {"warmup": warmup.detach(), "hinge": hinge.detach(), "trusted": trusted.float().mean()}
        return LossTerms(total, parts)


def split_networks(v: Tensor, t: Tensor) -> BothNetworks:
    """A joined embedding back to both networks' unit vectors. [..., B, 2d], [..., B, 2d]"""
    v, t = (torch.stack(x.chunk(2, dim=-1)) * math.sqrt(2.0) for x in (v, t))
    return BothNetworks(v, t, cosines(v, t))


def mean_costs(score: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """Both directions' costs of each pair, averaged over the batch. [..., B, B] -> [..., B]"""
    i2t, t2i = hinge_costs(score, relevance, margin=margin)
    return i2t.mean(dim=-1) + t2i.mean(dim=-2)


def soft_margin(label: Tensor, *, margin: float, base: float) -> Tensor:
    """m·(base^y − 1)/(base − 1): the whole margin for a label of 1, none for 0, much less in between. [...]

    >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]), margin=0.2, base=10.0)
    tensor([0.0000, 0.0481, 0.2000])
    """
    return margin * (base**label - 1.0) / (base - 1.0)


def agreement(score: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """p = (m − ½·(mean costs of both directions)) within [0, m]: how well a pair stands out. [2, B, B] -> [2, B]"""
    return (margin - 0.5 * mean_costs(score, relevance, margin=margin)).clamp(0.0, margin)


def guess(score: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """ŷ: how well a pair stands out, relative to the best tenth of the batch, within [0, 1]. [2, B, B] -> [2, B]"""
    quality = agreement(score, relevance, margin=margin)
    best = quality.topk(quality.shape[-1] // 10 + 1, dim=-1).values.mean(dim=-1, keepdim=True)
    return (quality / best.clamp_min(1e-8)).clamp(0.0, 1.0)
