"""The pairs of a batch, the loss terms of the paper as pure functions, one equation each, and their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from vacsr import distributions, kernels
from vacsr.adapter import VariationalAdapter
from vacsr.config import Config
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.noise import PairNoise


@dataclass(frozen=True)
class LossTerms:
    """A loss and its named parts, for the log and for the error that names a part gone wrong."""

    total: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class PairBlock:
    """Rows ``noise.rows`` of the batch's pair matrix, and what is known about its pairs.

    Losses are normalised by the counts of the *whole* batch, so the terms of disjoint row blocks add up to the terms of
    the batch. This lets ranks share a batch, and lets a large matrix be walked in strips; labels are not stored, since
    those of 65,536 × 65,536 pairs would take 4 GiB.
    """

    row_ids: Tensor  # [R] what each row is of
    col_ids: Tensor  # [C] a pair with equal ids is labelled a match
    batch: int  # rows of the whole batch, the B of the losses
    positives: Tensor  # 0-d, labelled matches in the whole batch
    noise: PairNoise
    captions: Tensor | None = None  # [C] the captions' rows in the training set
    epoch: Tensor | None = None  # 0-d, from 0, for losses that change during training; else None
    targets: Tensor | None = None  # [R, C] soft labels in [0, 1], of mixed images or from a teacher; else None
    trust: Tensor | None = None  # [C] how likely each caption is right; None where all are trusted

    @property
    def relevance(self) -> Tensor:
        """Is this pair labelled a match? [R, C] bool"""
        return same_image(self.row_ids, self.col_ids)

    @property
    def pairs(self) -> int:
        """Pairs of the whole batch."""
        return self.batch * len(self.col_ids)

    def rows(self, rows: slice) -> Self:
        """A block of this block's rows; the counts stay those of the whole batch."""
        targets = None if self.targets is None else self.targets[rows]
        noise = replace(self.noise, rows=self.noise.rows[rows])
        return replace(self, row_ids=self.row_ids[rows], noise=noise, targets=targets)

    def weigh(self, values: Tensor) -> Tensor:
        """Values of pairs, with labelled matches weighed by the trust in their caption. [R, C] -> [R, C]"""
        return values if self.trust is None else torch.where(self.relevance, self.trust, 1.0) * values

    def weigh_rows(self, values: Tensor) -> Tensor:
        """Values of rows, weighed by the trust in the caption that the row's image came with. [R] -> [R]"""
        return values if self.trust is None else self.trust[self.noise.rows] * values

    def diagonal(self) -> Self:
        """The same pairs with only (i, i) called a match, a strict reading of binary labels."""
        positives = torch.full_like(self.positives, self.batch)
        return replace(self, row_ids=self.noise.rows, col_ids=self.noise.cols, positives=positives)


def same_image(row_ids: Tensor, col_ids: Tensor) -> Tensor:
    """Every caption of the same image is a match, never just the diagonal. [..., R], [..., C] -> [..., R, C] bool

    >>> same_image(torch.tensor([7, 8]), torch.tensor([8, 7, 7]))
    tensor([[False,  True,  True],
            [ True, False, False]])
    """
    return row_ids.unsqueeze(-1) == col_ids.unsqueeze(-2)


def cosines(v: Tensor, t: Tensor) -> Tensor:
    """Every pair's cosine of unit vectors, in float32 also under autocast: a large scale would show the rounding.

    [..., R, d], [..., C, d] -> [..., R, C]
    """
    with torch.autocast(v.device.type, enabled=False):
        return v.float() @ t.float().mT


def pair_cosines(v: Tensor, t: Tensor) -> Tensor:
    """The same beside v⊙t of every pair: compiled, it is a sum over products that are in registers anyway."""
    if not torch.compiler.is_compiling():
        return cosines(v, t)
    return (v.float().unsqueeze(0) * t.float().unsqueeze(1)).sum(dim=-1).T


def batch_block(
    row_ids: Tensor, col_ids: Tensor | None = None, *, seed: int | Tensor, step: int | Tensor,
    captions: Tensor | None = None, epoch: Tensor | None = None,
) -> PairBlock:  # fmt: skip
    """The block of one training batch, where equal ids match. Without ``col_ids`` row i is the image of caption i."""
    col_ids = row_ids if col_ids is None else col_ids
    noise = PairNoise.create(seed=seed, step=step, rows=len(row_ids), cols=len(col_ids), device=row_ids.device)
    ordered = col_ids.sort().values
    matches = torch.searchsorted(ordered, row_ids, right=True) - torch.searchsorted(ordered, row_ids)  # of each row
    return PairBlock(row_ids, col_ids, len(row_ids), matches.sum(), noise, captions, epoch)


def reconstruction_error(logit: Tensor, target: Tensor, *, kind: str = "ste") -> Tensor:
    """½(ŷ−p)² per pair with p = sigmoid(logit), its sigmoid straight-through (``ste``) or not (``plain``); or BCE.

    [...], [...] -> [...]
    """
    if kind == "bce":
        return functional.binary_cross_entropy_with_logits(logit, target, reduction="none")
    score = distributions.ste_sigmoid(logit) if kind == "ste" else torch.sigmoid(logit)
    return 0.5 * (target - score).square()


def sigma_loss(inverse: Tensor, log_variance: Tensor, *, error: Tensor) -> Tensor:
    """L_σ = e/(2v) + ½·log v of every pair, from its variance's 1/(2v) and ½·log v. All [...]

    Both are means over the D dimensions of z: the error e of a pair is one number, so L_σ is linear in it. For a single
    variance v the minimum is at v = e.

    >>> v = torch.linspace(0.05, 1.0, 96)
    >>> float(v[sigma_loss(0.5 / v, 0.5 * v.log(), error=torch.tensor(0.25)).argmin()])
    0.25
    """
    return torch.addcmul(log_variance, error, inverse)


def hardest(values: Tensor, relevance: Tensor, *, count: int) -> Tensor:
    """Mask of each row's ``count`` largest values among its non-positives; fewer where a row has fewer. [R, C] bool"""
    masked = values.detach().masked_fill(relevance, -torch.inf)
    if count == 1:  # the compiler makes this part of the kernels around it; a GPU's top-k is slow for few long rows
        best = masked.argmax(dim=1, keepdim=True)
        return (torch.arange(values.shape[1], device=values.device) == best) & ~relevance
    chosen = masked.topk(min(count, values.shape[1]), dim=1).indices
    return torch.zeros_like(relevance).scatter(1, chosen, True) & ~relevance


def mean_over_rows(values: Tensor, chosen: Tensor, *, rows: int) -> Tensor:
    """Mean over each row's chosen entries, summed over rows / ``rows``; rows without any add nothing. -> 0-d"""
    count = chosen.sum(dim=1).clamp_min(1)
    return (torch.where(chosen, values, 0.0).sum(dim=1) / count).sum() / rows


def own_caption_loss(logit: Tensor, block: PairBlock, *, dim: int = 1) -> Tensor:
    """−log softmax(logit_i) at row i's own caption; other captions of its image do not compete. [R, C] -> [R]

    ``dim`` 0 looks along columns, at each caption's own image; the block then has to be the whole batch. -> [C]
    """
    own = same_image(block.noise.rows, block.noise.cols)
    log_share = logit.masked_fill(block.relevance & ~own, -torch.inf).log_softmax(dim=dim)
    return -torch.where(own, log_share, 0.0).sum(dim=dim)


@dataclass(frozen=True)
class PairDraw:
    """One draw of z for every pair of a block, decoded, and what the losses need of its distribution. All [R, C]"""

    decoded: Tensor  # logit of the decoder
    cosine: Tensor | None  # residual logit a·cos+b
    kl: Tensor  # bound on the KL to N(0, I)
    inverse: Tensor  # 1/(2v), mean (or sum) over D
    log_variance: Tensor  # ½·log v, mean (or sum) over D

    @property
    def logit(self) -> Tensor:
        """What the labels are compared with."""
        return self.decoded if self.cosine is None else self.decoded + self.cosine


class ObjectiveConfig(Config):
    """Weights and readings of L = α·KL + recon + β(L_P + γ·L_N)."""

    kl_weight: Annotated[float, Field(ge=0)] = 5e-4
    """α of the paper."""
    sigma_weight: Annotated[float, Field(ge=0)] = 1.0
    """β: weight of the distributional loss (Appendix E's reading)."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """γ: weight of the hard negatives in it."""
    weighting: Literal["appendix", "eq13"] = "appendix"
    """`eq13` multiplies recon by β and both σ terms by γ; equal at β=γ=1."""
    reconstruction: Literal["ste", "plain", "bce"] = "ste"
    """½(y−p)² with a straight-through sigmoid; without it the gradient dies near 0 and 1."""
    reduction: Literal["rows", "mean"] = "rows"
    """Reconstruction summed over pairs and divided by B; `mean` divides by B² and learns far less."""
    sigma_variance: Literal["sigmoid", "exp"] = "sigmoid"
    """What L_σ sees of logσ²; `exp` is the paper's ablation "without sigmoid"."""
    sigma_component: Literal["gumbel", "alpha"] = "gumbel"
    """logσ² mixed with the draw's Gumbel weights, or with α."""
    sigma_reduction: Literal["mean", "sum"] = "mean"
    """L_σ over the D dimensions."""
    negative_rule: Literal["logit", "literal_max"] = "logit"
    """Hardest by score; `literal_max` takes the printed max over the loss, which picks the easiest."""
    hard_negatives: Annotated[int, Field(ge=1)] = 1
    """N_h, averaged."""
    negative_target: Literal[0, 1] = 1
    """ŷ of hard negatives in L_σ, 1 as written."""
    negative_direction: Literal["rows", "both"] = "rows"
    """Hard negatives per image, or per image and per caption."""
    positives: Literal["ids", "diagonal"] = "ids"
    """Every caption of the same image matches, or the diagonal alone."""
    gumbel_temperature: Annotated[float, Field(gt=0)] = 1.0
    """τ of the relaxed one-hot."""
    gumbel_hard: bool = False
    """Round the one-hot forward, keep the soft gradient."""
    contrastive_weight: Annotated[float, Field(ge=0)] = 0.0
    """Cross entropy of each image's own caption among the batch's, over the same logits (ours): ranks as InfoNCE."""
    contrastive_direction: Literal["rows", "both"] = "rows"
    """Each image's own caption, or the mean of that and each caption's own image."""
    cosine_weight: Annotated[float, Field(ge=0)] = 0.3
    """Sigmoid loss on the residual's own a·cos+b (ours): the cosine stays a grade by itself."""
    correction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share by which a label gives way to the residual's own detached score (ours): wrong labels pull less."""
    fused: bool | Literal["auto"] = "auto"
    """Draw z and its KL in one kernel, the same loss; `auto`: where Triton, a CUDA GPU and the settings allow it."""


@dataclass(frozen=True)
class VacsrObjective:
    """L = α·KL + recon + β(L_P + γ·L_N) over one block of pairs (paper Eq. 13, Appendix E's reading)."""

    config: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __call__(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, block: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""
        c = self.config
        block = block.diagonal() if c.positives == "diagonal" else block
        draw = self.draw(adapter, v, t, noise=block.noise)
        relevance, logit = block.relevance, draw.logit
        labels = relevance.to(logit.dtype)
        targets = labels if block.targets is None else block.targets
        if c.correction and draw.cosine is not None:  # labels give way to the cosine: (1 − c)·y + c·sigmoid(a·cos + b)
            targets = torch.lerp(targets, torch.sigmoid(draw.cosine.detach()), c.correction)
        recon = block.weigh(reconstruction_error(logit, targets, kind=c.reconstruction))
        p = torch.sigmoid(logit.detach())
        sigma = sigma_loss(draw.inverse, draw.log_variance, error=(1.0 - p).square())
        negative = sigma if c.negative_target == 1 else sigma_loss(draw.inverse, draw.log_variance, error=p.square())
        parts = {
            "recon": recon.sum() / (block.batch if c.reduction == "rows" else block.pairs),
            "kl": draw.kl.sum() / block.pairs,
            "sigma_pos": block.weigh(torch.where(relevance, sigma, 0.0)).sum() / block.positives,
            "sigma_neg": self.hard_negatives(negative, logit, relevance, batch=block.batch),
        }
        if draw.cosine is not None and c.cosine_weight:
            parts["cosine"] = block.weigh(reconstruction_error(draw.cosine, labels, kind="bce")).sum() / block.batch
        if c.contrastive_weight:
            own = own_caption_loss(logit, block)
            if c.contrastive_direction == "both":
                own = 0.5 * (own + own_caption_loss(logit, block, dim=0))
            parts["contrastive"] = block.weigh_rows(own).sum() / block.batch
        return LossTerms(self.total(parts), parts)

    def draw(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, noise: PairNoise) -> PairDraw:
        """Sample z once for every pair and decode it. [R, d], [C, d]

        Weights [C, R, K] mix z [C, R, D], sigma_weights its logσ²; kl [C, R, K] is each component's. Texts are the
        slow dimension: a strip of few rows reads each text, and adds to its gradient, once and not once per row.
        """
        c, hidden = self.config, adapter.features(v.unsqueeze(0), t.unsqueeze(1))
        log_alpha, gumbel = adapter.log_alpha(hidden), noise.gumbel(adapter.components).transpose(0, 1)
        alpha, tau = log_alpha.exp(), c.gumbel_temperature
        weights = distributions.relaxed_one_hot(log_alpha, gumbel, temperature=tau, hard=c.gumbel_hard)
        sigma_weights = weights if c.sigma_component == "gumbel" else alpha.expand_as(weights)
        bounded = adapter.config.variance == "sigmoid"
        squash = c.sigma_variance == "sigmoid" and not bounded
        if self.uses_kernel(adapter, hidden):  # it writes z alone, and draws the noise itself
            from vacsr.kernels.latents import pair_latents

            flat = pair_latents(
                adapter.heads(hidden).flatten(end_dim=-2), weights.flatten(end_dim=-2),
                sigma_weights=sigma_weights.flatten(end_dim=-2), keys=noise.normal_keys().T.flatten(),
                clamp=adapter.config.log_var_clamp, bounded=bounded, squash=squash,
            )  # fmt: skip
            z, kl, inverse, log_variance = [x.view(*hidden.shape[:-1], *x.shape[1:]) for x in flat]
        else:
            mean, log_var = adapter.mean(hidden), adapter.log_var(hidden)
            normal = noise.normal(adapter.components * adapter.latent).transpose(0, 1).view(mean.shape)
            mixed = (sigma_weights.unsqueeze(-1) * log_var).sum(dim=-2)
            variance = distributions.bounded_variance(mixed) if squash else mixed.exp()
            z = distributions.mixture_draw(mean, log_var, weights=weights, noise=normal)
            kl = distributions.kl_to_standard_normal(mean, log_var)
            inverse, log_variance = (0.5 / variance).sum(dim=-1), (0.5 * variance.log()).sum(dim=-1)
        share = adapter.latent if c.sigma_reduction == "mean" else 1
        return PairDraw(
            decoded=adapter.decode(z).float().T,
            cosine=adapter.residual_logit(pair_cosines(v, t)),
            kl=distributions.mixture_kl_bound(alpha, kl).T,
            inverse=inverse.T / share,
            log_variance=log_variance.T / share,
        )

    def uses_kernel(self, adapter: VariationalAdapter, hidden: Tensor) -> bool:
        """Whether ``fused`` asks for the kernel and it can run; an error where it must and cannot."""
        fits = adapter.components <= 4 and adapter.latent <= 8192 and hidden.dtype != torch.float64
        runs, remedy = kernels.available(hidden.device), "set method.objective.fused=auto"
        if self.config.fused is True and not fits:
            raise UsageError(f"the fused kernel takes at most 4 components and 8,192 numbers of z — {remedy}")
        if self.config.fused is True and not runs:
            raise EnvironmentProblem(f"the fused kernel needs Triton and a CUDA device, not {hidden.device} — {remedy}")
        return self.config.fused is not False and fits and runs

    def hard_negatives(self, loss: Tensor, logit: Tensor, relevance: Tensor, *, batch: int) -> Tensor:
        """L_σ of the hard negatives, mean over those of each row and over rows (and columns for ``both``)."""
        c = self.config
        values = loss if c.negative_rule == "literal_max" else logit
        chosen = hardest(values, relevance, count=c.hard_negatives)
        rows = mean_over_rows(loss, chosen, rows=batch)
        if c.negative_direction == "rows":
            return rows
        chosen = hardest(values.T, relevance.T, count=c.hard_negatives)
        return 0.5 * (rows + mean_over_rows(loss.T, chosen, rows=relevance.shape[1]))

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the parts."""
        c = self.config
        kl, recon = c.kl_weight * parts["kl"], parts["recon"]
        if c.weighting == "eq13":
            sigma = c.negative_weight * (parts["sigma_pos"] + parts["sigma_neg"])
            whole = kl + c.sigma_weight * (recon + sigma)
        else:
            whole = kl + recon + c.sigma_weight * (parts["sigma_pos"] + c.negative_weight * parts["sigma_neg"])
        for name, weight in (("cosine", c.cosine_weight), ("contrastive", c.contrastive_weight)):
            whole = whole + weight * parts[name] if name in parts else whole
        return whole
