"""PCME: every item is a Gaussian, and a pair matches with the mean probability over samples of both."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from vacsr.methods.base import Embedding, register
from vacsr.methods.gaussians import (
    GaussianConfig,
    GaussianMethod,
    bottleneck,
    normal_draws,
    samples,
    squared_distances,
)
from vacsr.noise import RowNoise, Stream
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock

_TEST_SEED = 20_210_615  # of the draws that scores are made with; any number, always the same
_SMALLEST = 1e-12  # squared distance: the root has no slope at 0
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # distances alive at a time when scoring


class PcmeConfig(GaussianConfig):
    """Probabilistic embeddings compared by samples (PCME)."""

    name: Literal["pcme"] = "pcme"
    """The method's name."""
    samples: Annotated[int, Field(ge=1, le=64)] = 8
    """J draws of each item; a pair is judged by J² distances."""
    vib_reduction: Literal["mean", "sum"] = "mean"
    """Of the KL, over items and dimensions; PCME's and DAA's own code has sums."""
    reduction: Literal["sum", "rows", "mean"] = "sum"
    """Over pairs: summed, summed and divided by B, or averaged."""


@register("pcme", PcmeConfig, presets={"paper": {}})
class Pcme(GaussianMethod):
    """p(match) = mean over J² of σ(2l), l = b − a‖z_v − z_t‖, z = μ + σ·ε with J draws ε of each item.

    loss = 2·Σ_pairs −log p(label) + w·(VIB_v + VIB_t). The public code takes its head's output for logσ where it
    samples and for logσ² in VIB; here it is logσ² in both.
    """

    config: PcmeConfig
    pairwise = True
    variance_norm = 0.01

    def __init__(self, config: PcmeConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.pair_width = config.samples**2

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """The label's negative log probability over all pairs, and the bottleneck."""
        noise, lanes = pairs.noise, self.config.samples * v.mean.shape[-1]
        images = samples(v, normal_draws(RowNoise(noise.seed, noise.step, noise.rows, Stream.IMAGE_SAMPLES), lanes))
        texts = samples(t, normal_draws(RowNoise(noise.seed, noise.step, noise.cols, Stream.TEXT_SAMPLES), lanes))
        logit = self.logit(sample_distances(images, texts))
        nll = match_nll(logit, pairs.relevance).sum()
        counts = {"sum": 1, "rows": pairs.batch, "mean": pairs.pairs}
        match, vib = 2.0 * nll / counts[self.config.reduction], bottleneck(v, t, pairs)
        if self.config.vib_reduction == "sum":
            vib = vib * (pairs.batch * v.mean.shape[-1])
        total = match + self.config.vib_weight * vib
        return LossTerms(total, {"match": match.detach(), "vib": vib.detach()})

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """The logit of the mean match probability: the same order, and no ties where probabilities round to 0 or 1.

        All items share the same J draws, so that a pair's score depends on the pair alone. [I, d], [T, d] -> [I, T]
        """
        images = samples(v, self._test_draws(v, Stream.IMAGE_SAMPLES))
        texts = samples(t, self._test_draws(t, Stream.TEXT_SAMPLES))
        rows = max(1, _ELEMENTS.get(texts.device.type, 1 << 22) // max(1, self.config.samples**2 * len(texts)))
        out = images.new_empty(len(images), len(texts))
        for start in range(0, len(images), rows):
            block = slice(start, start + rows)
            logit = self.logit(sample_distances(images[block], texts))
            out[block] = _log_mean(logit) - _log_mean(-logit)
        return out

    def _test_draws(self, x: Embedding, stream: Stream) -> Tensor:
        """[1, J·d]"""
        first = torch.zeros(1, dtype=torch.int64, device=x.mean.device)
        noise = RowNoise(_TEST_SEED, first[0], first, stream)
        return normal_draws(noise, self.config.samples * x.mean.shape[-1])

    def grade(self, score: Tensor) -> Tensor:
        """The mean match probability."""
        return score.sigmoid()


def sample_distances(images: Tensor, texts: Tensor) -> Tensor:
    """‖z_v − z_t‖ of all samples of all pairs. [R, J, d], [C, J, d] -> [R, J, C, J]"""
    square = squared_distances(images.flatten(0, 1), texts.flatten(0, 1))
    return square.clamp_min(_SMALLEST).sqrt().view(*images.shape[:2], *texts.shape[:2])


def match_nll(logit: Tensor, relevance: Tensor) -> Tensor:
    """−log mean_{J²} σ(±2l), + for labelled matches. [R, J, C, J], [R, C] bool -> [R, C]"""
    sign = torch.where(relevance, 1.0, -1.0).to(logit.dtype)
    return -_log_mean(logit * sign[:, None, :, None])


def _log_mean(logit: Tensor) -> Tensor:
    """log mean_{J²} σ(2l). [R, J, C, J] -> [R, C]"""
    return functional.logsigmoid(2.0 * logit).logsumexp(dim=(1, 3)) - math.log(logit.shape[1] * logit.shape[3])
