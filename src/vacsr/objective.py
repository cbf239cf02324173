"""The loss terms of the paper as pure functions, one equation each, and the objective that adds them up."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from vacsr import fused
from vacsr.adapter import VariationalAdapter
from vacsr.config import ObjectiveConfig
from vacsr.distributions import (
    MixturePosterior,
    bounded_variance,
    mixture_draw,
    mixture_kl_bound,
    relaxed_one_hot,
    ste_sigmoid,
)
from vacsr.draws import PairNoise
from vacsr.pairwise import PairBlock, cosines


@dataclass(frozen=True)
class LossTerms:
    """A loss and its named parts, for the log and for the error that names a part gone wrong."""

    total: Tensor
    parts: dict[str, Tensor]


def reconstruction_error(logit: Tensor, target: Tensor, *, kind: str = "ste") -> Tensor:
    """½(ŷ−p)² per pair with p = sigmoid(logit), its sigmoid straight-through (``ste``) or not (``plain``); or BCE.

    [...], [...] -> [...]
    """
    if kind == "bce":
        return functional.binary_cross_entropy_with_logits(logit, target, reduction="none")
    score = ste_sigmoid(logit) if kind == "ste" else torch.sigmoid(logit)
    return 0.5 * (target - score).square()


def sigma_loss(variance: Tensor, error: Tensor, *, reduction: str = "mean") -> Tensor:
    """L_σ = e/(2v) + ½·log v over the D dimensions of one pair; its minimum is at v = e. [..., D], [...] -> [...]

    >>> e = torch.tensor([0.25])
    >>> grid = torch.linspace(0.05, 1.0, 96).view(-1, 1)
    >>> float(grid[sigma_loss(grid, e.expand(96)).argmin()])
    0.25
    """
    per_dimension = error.unsqueeze(-1) / (2.0 * variance) + 0.5 * variance.log()
    return per_dimension.mean(dim=-1) if reduction == "mean" else per_dimension.sum(dim=-1)


def hardest(values: Tensor, relevance: Tensor, *, count: int) -> Tensor:
    """Mask of each row's ``count`` largest values among its non-positives; fewer where a row has fewer. [R, C] bool"""
    masked = values.detach().masked_fill(relevance, -torch.inf)
    chosen = masked.topk(min(count, values.shape[1]), dim=1).indices
    return torch.zeros_like(relevance).scatter(1, chosen, True) & ~relevance


def mean_over_rows(values: Tensor, chosen: Tensor, *, rows: int) -> Tensor:
    """Mean over each row's chosen entries, summed over rows / ``rows``; rows without any add nothing. -> 0-d"""
    count = chosen.sum(dim=1).clamp_min(1)
    return (torch.where(chosen, values, 0.0).sum(dim=1) / count).sum() / rows


def contrastive_tolerance(scores: Tensor, false_negative: Tensor, *, temperature: float) -> Tensor:
    """r_i = (1/τ)·Σ_{true negatives j} softmax(S_i/τ)_j (paper Eq. 2); the diagonal is the positive. [B, B] -> [B]"""
    true_negative = ~false_negative & ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    return torch.where(true_negative, torch.softmax(scores / temperature, dim=1), 0.0).sum(dim=1) / temperature


def sigmoid_tolerance(scores: Tensor, false_negative: Tensor, *, scale: float, bias: float) -> Tensor:
    """r_i = |a|·[(1−P_ii) − Σ_{false negatives j} P_ij], P = sigmoid(aS+b) (paper Eq. 3, sign mended). [B, B] -> [B]"""
    p = torch.sigmoid(scale * scores + bias)
    others = false_negative & ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    return abs(scale) * ((1.0 - p.diagonal()) - torch.where(others, p, 0.0).sum(dim=1))


@dataclass(frozen=True)
class Decoded:
    """One draw for every pair of a block, decoded."""

    decoded: Tensor  # [R, C] decoder logit
    cosine: Tensor | None  # [R, C] residual logit a·cos+b

    @property
    def logit(self) -> Tensor:
        """What the labels are compared with."""
        return self.decoded if self.cosine is None else self.decoded + self.cosine


@dataclass(frozen=True)
class PairDraw(Decoded):
    """With the distribution it comes from."""

    posterior: MixturePosterior
    weights: Tensor  # [R, C, K] Gumbel weights
    sigma_log_var: Tensor  # [R, C, K, D] logσ² as L_σ sees it: its gradient may stop at the heads
    bounded: bool  # σ² itself already lies in (0, 1)


@dataclass(frozen=True)
class FusedDraw(Decoded):
    """With what the losses need of the distribution, which was never written out."""

    kl: Tensor  # [R, C] bound on the KL
    inverse: Tensor  # [R, C] 1/(2v) over the D dimensions: what L_σ multiplies the error by
    log_variance: Tensor  # [R, C] ½·log v over the D dimensions


@dataclass(frozen=True)
class VacsrObjective:
    """L = α·KL + recon + β(L_P + γ·L_N) over one block of pairs (paper Eq. 13, Appendix E's reading)."""

    config: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __call__(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, block: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""
        c = self.config
        block = block.diagonal() if c.positives == "diagonal" else block
        draw = self.draw(adapter, v, t, block=block)
        informative = hardest(draw.logit, block.relevance, count=c.hard_negatives)
        sigma = self.sigma_matrix(draw, 1.0)
        negative = sigma if c.negative_target == 1 else self.sigma_matrix(draw, 0.0)
        parts = {
            "recon": self.reconstruction(draw, block),
            "kl": self.kl(draw, block, informative),
            "sigma_pos": torch.where(block.relevance, sigma, 0.0).sum() / block.positives,
            "sigma_neg": self.sigma_negative(negative, draw, block, informative),
        }
        parts |= self.cosine(draw, block)
        return LossTerms(self.total(parts), parts)

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the parts."""
        c = self.config
        kl, recon = c.kl_weight * parts["kl"], parts["recon"]
        if c.weighting == "eq13":
            sigma = c.negative_weight * (parts["sigma_pos"] + parts["sigma_neg"])
            whole = kl + c.sigma_weight * (recon + sigma)
        else:
            whole = kl + recon + c.sigma_weight * (parts["sigma_pos"] + c.negative_weight * parts["sigma_neg"])
        return whole + c.cosine_weight * parts["cosine"] if "cosine" in parts else whole

    def draw(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, block: PairBlock) -> PairDraw | FusedDraw:
        """Sample z once for every pair and decode it."""
        hidden = adapter.features(v.unsqueeze(1), t.unsqueeze(0))
        return self.draw_from(adapter, hidden, cosine=cosines(v, t), noise=block.noise)

    def draw_from(
        self, adapter: VariationalAdapter, hidden: Tensor, *, cosine: Tensor, noise: PairNoise
    ) -> PairDraw | FusedDraw:
        """The same from the trunk's output, for pairs in any order. [..., H], [...] -> fields [..., K, D] and [...]"""
        if fused.runs(hidden, adapter.config, objective=self.config, latent=adapter.latent):
            return self._fused(adapter, hidden, cosine=cosine, noise=noise)
        posterior = adapter.posterior(hidden)
        weights = self._gumbel(posterior.log_alpha, noise)
        normal = noise.normal(adapter.components * adapter.latent).view_as(posterior.mean)
        z = mixture_draw(posterior.mean, posterior.log_var, weights=weights, noise=normal)
        sigma_log_var = adapter.log_var(hidden.detach()) if self.config.sigma_detach else posterior.log_var
        bounded = adapter.config.variance == "sigmoid"
        decoded, residual = adapter.decode(z).float(), adapter.residual_logit(cosine)
        return PairDraw(decoded, residual, posterior, weights, sigma_log_var, bounded)

    def _fused(self, adapter: VariationalAdapter, hidden: Tensor, *, cosine: Tensor, noise: PairNoise) -> FusedDraw:
        """The same draw by a kernel that keeps little of a pair. [..., H], [...] -> fields [...]"""
        c, log_alpha = self.config, adapter.log_alpha(hidden)
        alpha, weights = log_alpha.exp(), self._gumbel(log_alpha, noise)
        mixing = weights if c.sigma_component == "gumbel" else alpha.expand_as(weights)
        found = fused.pair_latents(
            adapter.heads(hidden).flatten(end_dim=-2), weights.flatten(end_dim=-2),
            sigma_weights=mixing.flatten(end_dim=-2), keys=noise.normal_keys().flatten(),
            reading=fused.Reading.of(adapter.config, c),
        )  # fmt: skip
        pairs, share = hidden.shape[:-1], adapter.latent if c.sigma_reduction == "mean" else 1
        decoded = adapter.decode(found.z).float().view(pairs)
        kl = (alpha * found.kl.view_as(weights)).sum(dim=-1)
        return FusedDraw(
            decoded, adapter.residual_logit(cosine), kl,
            found.inverse.view(pairs) / share, found.log_variance.view(pairs) / share,
        )  # fmt: skip

    def _gumbel(self, log_alpha: Tensor, noise: PairNoise) -> Tensor:
        """Relaxed one-hot weights of the components. -> [..., K]"""
        gumbel = noise.gumbel(log_alpha.shape[-1])
        c = self.config
        return relaxed_one_hot(log_alpha, gumbel, temperature=c.gumbel_temperature, hard=c.gumbel_hard)

    def targets(self, draw: Decoded, block: PairBlock) -> Tensor:
        """The labels, moved by ``correction`` towards the cosine's own detached score where asked for. [R, C]"""
        y = block.relevance.to(draw.logit.dtype)
        if self.config.correction == 0 or draw.cosine is None:
            return y
        return torch.lerp(y, torch.sigmoid(draw.cosine.detach()), self.config.correction)

    def reconstruction(self, draw: Decoded, block: PairBlock) -> Tensor:
        """½(ŷ−p)² over all pairs, divided by B, or by B² for ``mean``."""
        error = reconstruction_error(draw.logit, self.targets(draw, block), kind=self.config.reconstruction)
        return error.sum() / (block.batch if self.config.reduction == "rows" else block.pairs)

    def kl(self, draw: PairDraw | FusedDraw, block: PairBlock, informative: Tensor) -> Tensor:
        """Bound on the KL to N(0, I): mean over all pairs, or over each row's positives and hard negatives."""
        kl = self.kl_bound(draw)
        if self.config.kl_pairs == "all":
            return kl.sum() / block.pairs
        return mean_over_rows(kl, informative | block.relevance, rows=block.batch)

    def kl_bound(self, draw: PairDraw | FusedDraw) -> Tensor:
        """Of every pair. [R, C]"""
        if isinstance(draw, FusedDraw):
            return draw.kl
        return mixture_kl_bound(draw.posterior, free_bits=self.config.free_bits)

    def cosine(self, draw: Decoded, block: PairBlock) -> dict[str, Tensor]:
        """The sigmoid loss of the residual alone, where there is one and it counts."""
        if draw.cosine is None or self.config.cosine_weight == 0:
            return {}
        bce = reconstruction_error(draw.cosine, block.relevance.to(draw.cosine.dtype), kind="bce")
        return {"cosine": bce.sum() / block.batch}

    def sigma_variance(self, draw: PairDraw) -> Tensor:
        """v of L_σ: from logσ² mixed with the draw's Gumbel weights (or α). [R, C, D]"""
        weights = draw.weights if self.config.sigma_component == "gumbel" else draw.posterior.log_alpha.exp()
        if self.config.sigma_detach:  # predicted mixing weights are another way to the trunk
            weights = weights.detach()
        mixed = (weights.unsqueeze(-1) * draw.sigma_log_var).sum(dim=-2)
        squash = self.config.sigma_variance == "sigmoid" and not draw.bounded
        return bounded_variance(mixed) if squash else mixed.exp()

    def sigma_matrix(self, draw: PairDraw | FusedDraw, target: float) -> Tensor:
        """L_σ of every pair against one label, the error detached. [R, C]"""
        error = (target - torch.sigmoid(draw.logit.detach())).square()
        if isinstance(draw, FusedDraw):
            return torch.addcmul(draw.log_variance, error, draw.inverse)
        return sigma_loss(self.sigma_variance(draw), error, reduction=self.config.sigma_reduction)

    def sigma_negative(self, loss: Tensor, draw: Decoded, block: PairBlock, chosen: Tensor) -> Tensor:
        """L_σ of the hard negatives, mean over the chosen of each row and over rows (and columns for ``both``)."""
        c = self.config
        if c.negative_rule == "literal_max":
            chosen = hardest(loss, block.relevance, count=c.hard_negatives)
        rows = mean_over_rows(loss, chosen, rows=block.batch)
        if c.negative_direction == "rows":
            return rows
        values = loss if c.negative_rule == "literal_max" else draw.logit
        columns = hardest(values.T, block.relevance.T, count=c.hard_negatives)
        return 0.5 * (rows + mean_over_rows(loss.T, columns, rows=block.relevance.shape[1]))
