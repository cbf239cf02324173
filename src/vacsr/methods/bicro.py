"""BiCro (Yang et al. 2023): soft labels from how alike both sides of a pair are to a trusted anchor."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vacsr.config import Share
from vacsr.methods.base import register
from vacsr.methods.mixtures import clean_by_betas, clean_by_gaussians, falling
from vacsr.methods.ncr import BothNetworks, CoTeachingConfig, Ncr, agreement
from vacsr.objective import cosines


class BicroConfig(CoTeachingConfig):
    """BiCro: as NCR, with soft labels from how alike the nearest anchors are on both sides."""

    name: Literal["bicro"] = "bicro"
    warmup: Share = 0.2
    """Share of the epochs, one at least unless 0, on each batch's smallest losses; negatives averaged."""
    warmup_keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a batch that warm-up trains on; BiCro: 0.3 on COCO with 40% noise."""
    mixture: Literal["gaussian", "beta"] = "gaussian"
    """What is fitted to the losses. BiCro's Betas let too many wrong pairs through here, NCR's Gaussians do not."""
    label_threshold: Share = 0.5
    """Soft labels up to this become 0."""
    discard: bool = True
    """Exclude pairs whose label became 0; otherwise a hinge without margin still pulls them together."""
    anchors: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of a batch that serves as anchors: its most trusted clean pairs."""


_PAPER = {"warmup": 0.35, "warmup_keep": 0.3, "noisy_from": 0.5, "mixture": "beta", "discard": False}


@register("bicro", BicroConfig, presets={"paper": _PAPER})
class Bicro(Ncr):
    """As NCR, with warm-up on a batch's smallest losses, Betas as the mixture (a switch), and labels of its own kind:

        y_i = ½·(ratio at the anchor with the nearest image + ratio at the anchor with the nearest caption)
        ratio = min(s_v/s_t, s_t/s_v), the cosines of i's image and of i's caption with that anchor's

    as the other network sees them. Anchors are the clean pairs of the batch that stand out most. Clean pairs get
    ½ + ½·y, so that anchors have 1; labels up to ½ become 0. docs/methods/bicro.md lists what differs from the public
    code.
    """

    config: BicroConfig

    def __init__(self, config: BicroConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.least_label = 1e-6 if config.discard else 0.0

    def probability(self, losses: Tensor) -> Tensor:
        clean = clean_by_betas(losses) if self.config.mixture == "beta" else clean_by_gaussians(losses)
        return falling(clean, losses)

    def warmup_weights(self, loss: Tensor) -> Tensor:
        keep = max(1, int(loss.shape[1] * self.config.warmup_keep))
        smallest = loss.topk(keep, dim=1, largest=False).indices
        return torch.zeros_like(loss).scatter(1, smallest, 1.0)

    def labels(self, both: BothNetworks, clean: Tensor, relevance: Tensor) -> Tensor:
        other = BothNetworks(*(x.flip(0) for x in both))  # each network gets the other's labels
        trusted = clean > self.config.threshold
        quality = agreement(other.score, relevance, margin=self.config.margin)
        best = torch.where(trusted, quality + 2.0 * self.config.margin, quality)  # quality lies within the margin
        count = int(quality.shape[1] * self.config.anchors) + 1
        anchors = best.argsort(dim=1, descending=True, stable=True)[:, :count]  # many have no cost and tie
        usable = trusted.gather(1, anchors)
        y = two_sided_ratio(other, anchors, usable=usable)
        y = y.scatter(1, anchors, torch.where(usable, 1.0, y.gather(1, anchors)))  # another may show the same image
        y = torch.where(trusted, 0.5 + 0.5 * y, y)
        return torch.where(y > self.config.label_threshold, y, 0.0)


def two_sided_ratio(both: BothNetworks, anchors: Tensor, *, usable: Tensor) -> Tensor:
    """y of every pair of a batch. Anchors that are not ``usable`` are ignored, unless none is usable.

    [2, A] rows of the batch, [2, A] bool -> [2, B]
    """
    # Cosines of all items with the anchors. [2, B, A]
    image, text = (cosines(x, torch.take_along_dim(x, anchors.unsqueeze(-1), dim=1)) for x in (both.v, both.t))
    penalty = torch.where(usable, 0.0, -4.0).unsqueeze(1)  # below any cosine
    by_image = (image + penalty).argmax(dim=-1, keepdim=True)
    by_text = (text + penalty).argmax(dim=-1, keepdim=True)
    return 0.5 * (_ratio(image, text, by_image) + _ratio(image, text, by_text))


def _ratio(image: Tensor, text: Tensor, anchor: Tensor) -> Tensor:
    """min(s_v/s_t, s_t/s_v) at one anchor each; 0 where a cosine is not positive. [2, B, A], [2, B, 1] -> [2, B]"""
    v, t = image.gather(-1, anchor).squeeze(-1), text.gather(-1, anchor).squeeze(-1)
    return torch.minimum(v, t).clamp_min(0.0) / torch.maximum(v, t).clamp_min(1e-6)
