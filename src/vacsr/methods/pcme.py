"""PCME: every item is a Gaussian, and a pair matches with the mean probability over samples of both."""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method, RetrievalConfig, register
from vacsr.noise import RowNoise, Stream
from vacsr.objective import LossTerms, PairBlock


class GaussianConfig(RetrievalConfig):
    """Settings that PCME and PCME++ share."""

    scale: Annotated[float, Field(gt=0)] = 5.0
    """a at the start, of the logit b − a·distance."""
    shift: float = 5.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    vib_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL to N(0, I)."""
    log_var_start: float = -8.0
    """logσ² at the start is around this; the public code starts at 0, and short runs do not recover from that."""


class GaussianMethod(Method):
    """A logit b − a·distance with learned a and b; the uncertainty of a pair is Σσ²_v + Σσ²_t."""

    config: GaussianConfig

    def __init__(self, config: GaussianConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.log_var_start = config.log_var_start
        self.affine = nn.Parameter(torch.tensor([config.scale, config.shift]), config.learnable)

    def logit(self, distance: Tensor) -> Tensor:
        """b − a·distance. [...] -> [...]"""
        return self.affine[1] - self.affine[0] * distance

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        return total_variance(v) + total_variance(t)


class PcmeConfig(GaussianConfig):
    """Probabilistic embeddings compared by samples (PCME)."""

    name: Literal["pcme"] = "pcme"
    samples: Annotated[int, Field(ge=1, le=64)] = 8
    """J draws of each item; a pair is judged by J² distances."""
    vib_reduction: Literal["mean", "sum"] = "mean"
    """Of the KL, over items and dimensions; PCME's and DAA's own code has sums."""


@register("pcme", PcmeConfig, presets={"paper": {}})
class Pcme(GaussianMethod):
    """p(match) = mean over J² of σ(2l), l = b − a‖z_v − z_t‖, z = μ + σ·ε with J draws ε of each item.

    loss = 2·Σ_pairs −log p(label) + w·(VIB_v + VIB_t).
    """

    config: PcmeConfig
    pairwise = True
    variance_norm = 0.01
    at_once: int = 1 << 22  # distances held at a time when scoring; 16 times as many on a GPU

    def __init__(self, config: PcmeConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.pair_width = config.samples**2

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        noise, count = pairs.noise, self.config.samples
        images = samples(v, RowNoise(noise.seed, noise.step, noise.rows, Stream.IMAGE_SAMPLES), count=count)
        texts = samples(t, RowNoise(noise.seed, noise.step, noise.cols, Stream.TEXT_SAMPLES), count=count)
        logit = self.logit(sample_distances(images, texts))
        match, vib = 2.0 * match_nll(logit, pairs.relevance).sum(), bottleneck(v, t, pairs)
        if self.config.vib_reduction == "sum":
            vib = vib * (pairs.batch * v.mean.shape[-1])
        total = match + self.config.vib_weight * vib
        return LossTerms(total, {"match": match.detach(), "vib": vib.detach()})

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """The logit of the mean match probability: the same order, and no ties where probabilities round to 0 or 1.

        All items share the same J draws, so that a pair's score depends on the pair alone. [I, d], [T, d] -> [I, T]
        """
        count, device = self.config.samples, v.mean.device
        images = samples(v, scoring_noise(Stream.IMAGE_SAMPLES, device), count=count)
        texts = samples(t, scoring_noise(Stream.TEXT_SAMPLES, device), count=count)
        at_once = self.at_once * (16 if device.type == "cuda" else 1)
        score = images.new_empty(len(images), len(texts))
        rows = max(1, at_once // max(1, count**2 * len(texts)))
        for start in range(0, len(images), rows):
            block = slice(start, start + rows)
            logit = self.logit(sample_distances(images[block], texts))
            score[block] = _log_mean(logit) - _log_mean(-logit)
        return score

    def grade(self, score: Tensor) -> Tensor:
        return score.sigmoid()  # the mean match probability


def log_variance(x: Embedding) -> Tensor:
    """logσ² of items that must have one. -> [N, d]"""
    if x.log_var is None:
        raise UsageError("these embeddings have no variance, which this method needs — use MatchingModel.build")
    return x.log_var


def total_variance(x: Embedding) -> Tensor:
    """Σ_d σ² of each item. -> [N]"""
    return log_variance(x).exp().sum(dim=-1)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖² by one matrix product, never below 0 and never in half precision. [R, d], [C, d] -> [R, C]"""
    with torch.autocast(x.device.type, enabled=False):
        square = x.square().sum(dim=-1).unsqueeze(1) + y.square().sum(dim=-1)
        return (square - 2.0 * (x @ y.T)).clamp_min(0.0)


def kl_per_dimension(x: Embedding) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) / d = mean over d of −½(1 + logσ² − μ² − σ²). -> [N]"""
    log_var = log_variance(x)
    return -0.5 * (1.0 + log_var - x.mean.square() - log_var.exp()).mean(dim=-1)


def bottleneck(v: Embedding, t: Embedding, pairs: PairBlock) -> Tensor:
    """VIB_v + VIB_t, each the mean over the batch's items; a block of rows gives its share of both. -> 0-d

    A block holds every caption, so it counts them in proportion to its rows.
    """
    texts = kl_per_dimension(t).mean() * len(v.mean)
    return (kl_per_dimension(v).sum() + texts) / pairs.batch


def scoring_noise(stream: Stream, device: torch.device) -> RowNoise:
    """One row of draws that serves for all items that are scored; the seed is any number, always the same."""
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return RowNoise(20_210_615, first[0], first, stream)


def samples(x: Embedding, noise: RowNoise, *, count: int) -> Tensor:
    """z = μ + σ·ε, J = ``count`` draws ε of each item, or the same for all where ``noise`` has one row. -> [N, J, d]"""
    dim = x.mean.shape[-1]
    draws = noise.normal(count * dim).view(-1, count, dim).to(x.mean.dtype)
    return x.mean.unsqueeze(1) + (0.5 * log_variance(x)).exp().unsqueeze(1) * draws


def sample_distances(images: Tensor, texts: Tensor) -> Tensor:
    """‖z_v − z_t‖ of all samples of all pairs. [R, J, d], [C, J, d] -> [R, J, C, J]"""
    square = squared_distances(images.flatten(0, 1), texts.flatten(0, 1))
    return square.clamp_min(1e-12).sqrt().view(*images.shape[:2], *texts.shape[:2])  # the root has no slope at 0


def match_nll(logit: Tensor, relevance: Tensor) -> Tensor:
    """−log mean_{J²} σ(±2l), + for labelled matches. [R, J, C, J], [R, C] bool -> [R, C]"""
    sign = torch.where(relevance, 1.0, -1.0).to(logit.dtype)
    return -_log_mean(logit * sign[:, None, :, None])


def _log_mean(logit: Tensor) -> Tensor:
    """log mean_{J²} σ(2l). [R, J, C, J] -> [R, C]"""
    return functional.logsigmoid(2.0 * logit).logsumexp(dim=(1, 3)) - math.log(logit.shape[1] * logit.shape[3])
