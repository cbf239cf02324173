"""PCME++: every item is a Gaussian, and pairs are compared by a distance in closed form."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from vacsr.config import MixConfig
from vacsr.methods.base import Embedding, register
from vacsr.methods.pcme import GaussianConfig, GaussianMethod, bottleneck, squared_distances, total_variance
from vacsr.objective import LossTerms, PairBlock, same_image


class PcmeppConfig(GaussianConfig):
    """Probabilistic embeddings compared in closed form (PCME++)."""

    name: Literal["pcmepp"] = "pcmepp"
    vib_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the KL to N(0, I), averaged over items and dimensions."""
    pseudo_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the loss with pseudo-positives, in each direction."""
    smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 1e-4
    """Labels become (1−ε)y + ε(1−y)."""
    reduction: Literal["rows", "mean"] = "rows"
    """BCE summed over pairs and divided by B; `mean` averages over pairs, and VIB then weighs B times as much."""
    mix: MixConfig = MixConfig()
    """Mixup and cutmix."""


@register("pcmepp", PcmeppConfig, presets={"paper": {"reduction": "mean"}})
class Pcmepp(GaussianMethod):
    """l = b − a·CSD with CSD = ‖μ_v − μ_t‖² + Σσ²_v + Σσ²_t, the expected squared distance of samples.

    loss = 2·BCE(l, y) + w·(VIB_v + VIB_t) + u·(BCE with pseudo-positives, per image and per caption). Score = −CSD.
    Pseudo-positives of a caption lie in any row, so blocks of rows are not allowed.
    """

    config: PcmeppConfig

    def __init__(self, config: PcmeppConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.mix = config.mix

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        logit = self.logit(closed_form_distance(v, t))
        labels = pairs.relevance if pairs.targets is None else pairs.targets  # mixed images match captions of both
        target = smooth(labels.to(logit.dtype), self.config.smoothing)
        diagonal = same_image(pairs.noise.rows, pairs.noise.cols)
        match = self._bce(logit, target, pairs)
        rows = self._bce(logit, with_pseudo_positives(logit, target, diagonal), pairs)
        cols = self._bce(logit, with_pseudo_positives(logit.T, target.T, diagonal.T).T, pairs)
        vib, pseudo = bottleneck(v, t, pairs), rows + cols
        total = 2.0 * match + self.config.vib_weight * vib + self.config.pseudo_weight * pseudo
        return LossTerms(total, {"match": match.detach(), "vib": vib.detach(), "pseudo": pseudo.detach()})

    def _bce(self, logit: Tensor, target: Tensor, pairs: PairBlock) -> Tensor:
        total = functional.binary_cross_entropy_with_logits(logit, target, reduction="sum")
        return total / (pairs.pairs if self.config.reduction == "mean" else pairs.batch)

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return -closed_form_distance(v, t)

    def grade(self, score: Tensor) -> Tensor:
        return self.logit(-score).sigmoid()  # the probability that the loss trains


def closed_form_distance(v: Embedding, t: Embedding) -> Tensor:
    """CSD = E‖z_v − z_t‖² = ‖μ_v − μ_t‖² + Σσ²_v + Σσ²_t. [R, d], [C, d] -> [R, C]"""
    return squared_distances(v.mean, t.mean) + total_variance(v).unsqueeze(1) + total_variance(t)


def smooth(labels: Tensor, amount: float) -> Tensor:
    """(1−ε)y + ε(1−y). [...] -> [...]"""
    return labels + amount * (1.0 - 2.0 * labels)


def with_pseudo_positives(logit: Tensor, target: Tensor, diagonal: Tensor) -> Tensor:
    """Every pair that scores at least as high as the row's strongest label gets that label. [R, C] -> [R, C]

    ``diagonal`` marks the pairs of the batch: among equal labels of a row, theirs counts as the strongest.
    """
    strongest = torch.where(diagonal, target + 1e-6, target).argmax(dim=1, keepdim=True)
    return torch.where(logit >= logit.gather(1, strongest), target.gather(1, strongest), target)
