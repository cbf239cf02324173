"""NPC (Zhang et al. 2024): a pair counts as much as training on it helps the trusted pairs most like it."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.config import Share
from vacsr.methods.base import Embedding, Method, RetrievalConfig, SetEmbeddings, TrainingView, register
from vacsr.methods.infonce import cross_entropy
from vacsr.methods.mixtures import clean_by_gaussians, rescaled
from vacsr.objective import LossTerms, PairBlock, cosines


class NpcConfig(RetrievalConfig):
    """NPC: each pair weighs as much as a trial step on the batch helps the trusted pairs most like it."""

    name: Literal["npc"] = "npc"
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, as InfoNCE's."""
    learnable: bool = True
    """Whether the scale learns."""
    warmup: Share = 0.1
    """Share of the epochs, one at least unless 0, before the first bank; NPC starts from a trained CLIP instead."""
    refresh: bool = True
    """Rebuild the bank before each epoch; otherwise build it once, after warm-up."""
    threshold: Share = 0.9
    """A pair is in the bank above this probability of being clean."""
    rescale: bool = True
    """Bring the losses to [0, 1] before the mixture is fitted, so that it also splits losses near 0; NPC does not."""
    look_ahead: Annotated[float, Field(gt=0)] = 0.1
    """Length of the trial step relative to the length of the heads' weights; 0.02 is about an Adam step."""
    bank_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the bank pairs' own loss, which trains heads and pooling."""


_PAPER = {"scale": 100.0, "refresh": False, "rescale": False, "look_ahead": 0.02}
"""NPC starts from CLIP with its scale of 100, and fits the mixture to raw losses."""


@register("npc", NpcConfig, presets={"paper": _PAPER})
class Npc(Method):
    """Score = cosine. L = mean_i w_i·ℓ_i + mean of the neighbours' ℓ, with ℓ the two-way cross entropy of one pair.

    Before an epoch two Gaussians are fitted to all ℓ; pairs with p(clean) > 0.9 form the bank. Each pair has two
    neighbours in it: the one with the most similar image (I) and the one with the most similar caption (T). A trial
    step on the batch changes their losses from L to L':

        w = ½·(L_I/L'_I + L_T/L'_T),  and tanh(w) where w < 1, else 1.

    The step moves heads and pooling only. docs/methods/npc.md lists what differs from the public code.
    """

    config: NpcConfig
    clean: Tensor
    weight: Tensor
    nearest: Tensor
    ready: Tensor

    def __init__(self, config: NpcConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.look_ahead = config.look_ahead
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.scale)), config.learnable)
        self.register_training_state("ready", torch.zeros(()))  # 1 when there is a bank
        self.fit(None, torch.zeros(0))

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """All captions are trusted at first, and their own neighbours."""
        count = len(caption_image)
        self.register_training_state("clean", torch.ones(count))
        self.register_training_state("weight", torch.ones(count))
        self.register_training_state("nearest", torch.arange(count).repeat(2, 1))  # by image, by text

    @torch.no_grad()
    def start_epoch(self, view: TrainingView) -> None:
        """After warm-up, build the bank and find the neighbours of all captions in it."""
        warmup = view.first_epochs(self.config.warmup)
        if view.epoch < warmup or (view.epoch > warmup and not self.config.refresh):
            return
        embedded = view.embed()
        losses = view.caption_losses(embedded, self).double()
        losses = rescaled(losses) if self.config.rescale else losses
        self.clean.copy_(clean_by_gaussians(losses, steps=100))
        self.nearest.copy_(nearest_in_bank(embedded, view.caption_image, self.clean, threshold=self.config.threshold))
        self.ready.fill_(1.0)

    def neighbours(self, captions: Tensor) -> Tensor:
        return self.nearest[:, captions]

    def pair_losses(self, v: Embedding, t: Embedding, relevance: Tensor) -> Tensor:
        """ℓ_i = ½·(cross entropy of row i + of column i), spread over the labelled matches."""
        logit = self.log_scale.exp() * cosines(v.mean, t.mean)
        return 0.5 * (cross_entropy(logit, relevance) + cross_entropy(logit.mT, relevance.mT))

    def weigh(self, captions: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Store the batch's weights, all 1 before there is a bank; returns the bank's part of the loss."""
        with torch.no_grad():
            weight = torch.where(self.ready > 0, pair_weights(before, after), 1.0)
            self.weight.index_copy_(0, captions, weight)
        return self.config.bank_weight * self.ready * before.mean(dim=1).sum()

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        losses = self.pair_losses(v, t, pairs.relevance)
        fitted = pairs.captions is not None and len(self.weight) > 0
        weight = self.weight[pairs.captions] if fitted else torch.ones_like(losses)
        total = (weight * losses).mean()
        return LossTerms(total, {"cross_entropy": losses.detach().mean(), "weight": weight.mean()})


def pair_weights(before: Tensor, after: Tensor) -> Tensor:
    """w = ½·(L_I/L'_I + L_T/L'_T); tanh(w) below 1, else 1. [2, B], [2, B] -> [B]

    A neighbour that is learned so well that its loss rounds to 0 has nothing to lose: 0/0 counts as 1.
    """
    tiny = 1e-6  # smaller differences of a loss are rounding in float32
    w = ((before.detach() + tiny) / (after + tiny)).mean(dim=0)
    return torch.where(w < 1.0, w.tanh(), torch.ones_like(w))


def nearest_in_bank(embedded: SetEmbeddings, caption_image: Tensor, clean: Tensor, *, threshold: float) -> Tensor:
    """Each caption's nearest bank pair by image and by text; a bank pair is its own. -> [2, M]

    An image stands for itself where one of its captions is in the bank: the most trusted one. Where no caption reaches
    the threshold, the most trusted caption of all is the bank.
    """
    inside = clean > torch.minimum(clean.new_tensor(threshold), clean.max() * (1.0 - 1e-6))
    bank = inside.nonzero().squeeze(1)
    order = bank[clean[bank].argsort(stable=True)]  # the most trusted last
    rank = torch.full((len(embedded.images),), -1, dtype=torch.int64, device=clean.device)  # of each image's last one
    rank.scatter_reduce_(0, caption_image[order], torch.arange(len(order), device=clean.device), "amax")
    best = order[rank.clamp_min(0)]  # [N]
    with_bank, without = (rank >= 0).nonzero().squeeze(1), (rank < 0).nonzero().squeeze(1)
    best[without] = best[with_bank][_nearest(embedded.images[without], embedded.images[with_bank])]
    captions = torch.arange(len(clean), device=clean.device)
    by_image, by_text = torch.where(inside, captions, best[caption_image]), captions.clone()
    outside = (~inside).nonzero().squeeze(1)
    by_text[outside] = bank[_nearest(embedded.texts[outside], embedded.texts[bank])]
    return torch.stack((by_image, by_text))


def _nearest(x: Tensor, among: Tensor, *, at_once: int = 1 << 24) -> Tensor:
    """Row of the largest cosine. [n, d], [m, d] -> [n]"""
    rows = max(1, at_once // len(among))
    return torch.cat([(part @ among.T).argmax(dim=1) for part in torch.split(x, rows)])
