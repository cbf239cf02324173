"""Two networks, each trained on what the other takes for clean: the part that NCR and BiCro share.

Three stages, one after the other: warm-up on all pairs; then the pairs that the other network calls clean; then the
noisy ones too, with soft labels. A pair i with soft label y_i costs, by its hardest negatives,

    L_i = max_j (m(y_i) + s_ij − s_ii)₊ + max_j (m(y_i) + s_ji − s_ii)₊,   m(y) = m·(10^y − 1)/9.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.config import BicroConfig, NcrConfig
from vacsr.methods.base import Embedding, Method, TrainingView
from vacsr.methods.hinge import hinge_costs, soft_margin
from vacsr.methods.mixtures import rescaled
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock, cosines

WARM, CLEAN, ALL = 0, 1, 2
"""Stages."""


class Halves(NamedTuple):
    """Both networks' view of a batch; first axis: the network."""

    v: Tensor  # [2, B, d], unit vectors
    t: Tensor  # [2, B, d]
    score: Tensor  # [2, B, B], cosines


class CoTeaching(Method):
    """Score = mean of both networks' cosines, which the joined embedding gives by itself."""

    config: NcrConfig | BicroConfig
    networks = 2
    least_label = 0.0
    """Pairs with a smaller label are left out."""
    clean: Tensor
    stage: Tensor

    def __init__(self, config: NcrConfig | BicroConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.register_training_state("clean", torch.ones(2, 0))  # [2, M]: what each network thinks, as a probability
        self.register_training_state("stage", torch.zeros((), dtype=torch.int64))

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """Room for each caption; all are trusted at first."""
        self.register_training_state("clean", torch.ones(2, len(caption_image)))

    @torch.no_grad()
    def start_epoch(self, view: TrainingView) -> None:
        """After warm-up, fit a mixture to each network's losses before every epoch."""
        warm = view.first_epochs(self.config.warmup)
        late = view.epoch - warm >= self.config.noisy_from * (view.epochs - warm)
        self.stage.fill_(WARM if view.epoch < warm else ALL if late else CLEAN)
        if view.epoch >= warm:
            losses = caption_losses(view, margin=self.config.margin)
            self.clean.copy_(torch.stack([self.probability(rescaled(loss)) for loss in losses]))

    @abstractmethod
    def probability(self, losses: Tensor) -> Tensor:
        """Of being clean, from losses rescaled to [0, 1]. [M] -> [M]"""

    @abstractmethod
    def warm_weights(self, loss: Tensor) -> Tensor:
        """Which pairs of a batch warm-up trains on. [2, B] -> [2, B] of 0 and 1"""

    @abstractmethod
    def labels(self, halves: Halves, clean: Tensor, relevance: Tensor) -> Tensor:
        """Soft labels in [0, 1] that each network is trained with; ``clean`` is what the other one thinks.

        [2, B] -> [2, B]
        """

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """The mean over pairs, both networks added. Warm-up where nothing is known of the captions."""
        halves = split_networks(v.mean, t.mean)
        mean = hinge_costs(halves.score, pairs.relevance, margin=self.config.margin).mean()
        warm = (mean * self.warm_weights(mean.detach())).mean(dim=1).sum()
        if pairs.captions is None or self.clean.shape[1] == 0:
            return LossTerms(warm, {"warmup": warm.detach()})
        clean = self.clean[:, pairs.captions].flip(0)
        trusted = clean > self.config.threshold
        with torch.no_grad():
            label = self.labels(halves, clean, pairs.relevance)
        margin = soft_margin(label, margin=self.config.margin, base=self.config.base)
        hardest = hinge_costs(halves.score, pairs.relevance, margin=margin).hardest()
        kept = (trusted | (self.stage == ALL)) & (label >= self.least_label)
        taught = (hardest * kept).mean(dim=1).sum()
        total = torch.where(self.stage == WARM, warm, taught)
        parts = {"warmup": warm.detach(), "hinge": taught.detach(), "trusted": trusted.float().mean()}
        return LossTerms(total, parts)


def split_networks(v: Tensor, t: Tensor) -> Halves:
    """A joined embedding back to both networks' unit vectors. [B, 2d], [B, 2d]"""
    v2, t2 = (torch.stack(x.chunk(2, dim=-1)) * math.sqrt(2.0) for x in (v, t))
    return Halves(v2, t2, torch.stack([cosines(a, b) for a, b in zip(v2, t2, strict=True)]))


def agreement(score: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """p = (m − ½·(mean costs of both directions)) within [0, m]: how well a pair stands out. [2, B, B] -> [2, B]"""
    costs = hinge_costs(score, relevance, margin=margin).mean()
    return (margin - 0.5 * costs).clamp(0.0, margin)


def anchor_count(batch: int, *, share: float = 0.1) -> int:
    """A tenth of the batch and one more."""
    return min(batch, int(batch * share) + 1)


def caption_losses(view: TrainingView, *, margin: float, at_once: int = 64) -> Tensor:
    """Both networks' mean-negative hinge loss of every training caption, in random groups. -> [2, M]"""
    images, texts = view.embed()
    groups, found = view.groups(), []
    for some in torch.split(groups, at_once):
        image = view.caption_image[some]
        matches = image.unsqueeze(2) == image.unsqueeze(1)
        v, t = (torch.stack(x.chunk(2, dim=-1)) for x in (images[image], texts[some]))
        score = 2.0 * torch.einsum("kgid,kgjd->kgij", v, t)
        found.append(hinge_costs(score, matches, margin=margin).mean().flatten(1))
    return view.by_caption(torch.cat(found, dim=1))
