"""NCR (Huang et al. 2021): noisy correspondence rectified by two networks that divide the data for each other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vacsr.methods.base import register
from vacsr.methods.coteaching import BothNetworks, CoTeaching, CoTeachingConfig, agreement, anchor_count
from vacsr.methods.mixtures import clean_by_gaussians


class NcrConfig(CoTeachingConfig):
    """NCR: two networks, a Gaussian mixture of losses tells clean from noisy, labels become soft margins."""

    name: Literal["ncr"] = "ncr"


@register("ncr", NcrConfig, presets={"paper": {"warmup": 0.35, "noisy_from": 0.5}})
class Ncr(CoTeaching):
    """Before each epoch after warm-up: each network's mean-negative losses → [0, 1] → two Gaussians → p(clean).

    Network k is trained on the other one's p. With ŷ_k its own guess (:func:`guess`) for a pair,

        clean (p > ½):  y = p + (1−p)·ŷ_k          noisy:  y = ½(ŷ_1 + ŷ_2), only in the last stage

    and y becomes a margin (:mod:`vacsr.methods.coteaching`). Unlike the public code: clean and noisy pairs share a
    batch and serve as each other's negatives, both networks see the same batches (with their own draws), guesses come
    from the training pass instead of a second one, other captions of the image are no negatives, and the two networks
    are averaged by their joined embedding.
    """

    config: NcrConfig

    def probability(self, losses: Tensor) -> Tensor:
        return clean_by_gaussians(losses)

    def labels(self, both: BothNetworks, clean: Tensor, relevance: Tensor) -> Tensor:
        guesses = guess(both.score, relevance, margin=self.config.margin)
        mean = guesses.mean(dim=0, keepdim=True)
        return torch.where(clean > self.config.threshold, clean + (1.0 - clean) * guesses, mean)


def guess(score: Tensor, relevance: Tensor, *, margin: float) -> Tensor:
    """ŷ: how well a pair stands out, relative to the best tenth of the batch, within [0, 1]. [2, B, B] -> [2, B]"""
    quality = agreement(score, relevance, margin=margin)
    best = quality.topk(anchor_count(quality.shape[-1]), dim=-1).values.mean(dim=-1, keepdim=True)
    return (quality / best.clamp_min(1e-8)).clamp(0.0, 1.0)
