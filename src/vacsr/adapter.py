"""The variational adapter: v⊙t → trunk → K Gaussians over z → decoder → one logit (paper §3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, reduce
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config import Config
from vacsr.distributions import bounded_variance
from vacsr.errors import NotFoldable, ShapeMismatch

WIDE_SUMS = hasattr(torch.ops.aten.mm, "dtype")
"""This torch can leave products of half precision in float32, on a GPU."""


class AdapterConfig(Config):
    """Shape of the variational adapter: encoder, mixture and decoder."""

    components: Annotated[int, Field(ge=1, le=16)] = 2
    """K: two Gaussians, the paper's best of 1-4; 1 is its ablation "without GMM"."""
    hidden: Annotated[int, Field(ge=0)] = 0
    """Trunk width; 0 means d, which fits the paper's 5.26 M extra parameters."""
    latent: Annotated[int, Field(ge=0)] = 0
    """Width of z; 0 means d."""
    decoder_hidden: Annotated[int, Field(ge=0)] = 16
    """Decoder Linear-ReLU-Linear of this width; 0 makes it one linear layer."""
    input_scale: Literal["d", "sqrt_d", "layernorm", "none"] = "d"
    """Entries of v⊙t are ~1/d after L2 norm and would drown in the bias; ×d brings them to ~1."""
    trunk_norm: bool = False
    """LayerNorm after the trunk: also fits the paper's parameter count, but cannot be folded."""
    mixing: Literal["global", "head"] = "global"
    """α written without (s) in the paper: global logits; `head` predicts them per pair."""
    log_var_clamp: Annotated[float, Field(gt=0)] = 10.0
    """logσ² is kept within ± this: exp stays finite."""
    variance: Literal["exp", "sigmoid"] = "exp"
    """σ² for sampling and KL; `sigmoid` is the reading "sigmoid everywhere"."""
    residual: Literal["none", "cosine"] = "cosine"
    """`cosine` adds a·cos+b to the logit (ours): keeps grades where the decoder overfits labels."""
    residual_scale: float = 10.0
    """a at the start, learnable."""
    residual_bias: float = -10.0
    """b at the start, learnable."""
    residual_learnable: bool = True
    """False keeps a and b where they start: a bounded residual."""
    decode: Literal["mean", "argmax"] = "mean"
    """Test-time z: Σα_kμ_k, or the likeliest component's mean."""
    uncertainty: Literal["variance", "std", "exp"] = "variance"
    """Reported σ of a pair: mean over D of Σα_k·sigmoid(logσ²_k), its root, or with exp."""


class VariationalAdapter(nn.Module):
    """Scores a pair of L2-normalised vectors with a logit, and says how sure it is.

    >>> adapter = VariationalAdapter(1024)
    >>> sum(p.numel() for p in adapter.parameters()) - 2  # the two scalars of the cosine residual are ours
    5264419
    """

    def __init__(self, dim: int, config: AdapterConfig | None = None) -> None:
        super().__init__()
        self.dim, self.config = dim, config or AdapterConfig()
        c = self.config
        hidden, latent = c.hidden or dim, c.latent or dim
        self.components, self.latent = c.components, latent
        self.scale = {"d": float(dim), "sqrt_d": math.sqrt(dim)}.get(c.input_scale, 1.0)
        self.input_norm = nn.LayerNorm(dim) if c.input_scale == "layernorm" else None
        self.trunk = nn.Linear(dim, hidden)
        self.trunk_norm = nn.LayerNorm(hidden) if c.trunk_norm else None
        self.mean_heads = nn.Linear(hidden, c.components * latent)
        self.log_var_heads = nn.Linear(hidden, c.components * latent)
        self.mixing_logits = nn.Parameter(torch.zeros(c.components)) if c.mixing == "global" else None
        self.mixing_head = nn.Linear(hidden, c.components) if c.mixing == "head" else None
        self.decoder = nn.Sequential(nn.Linear(latent, c.decoder_hidden or 1))
        if c.decoder_hidden:
            self.decoder.extend((nn.ReLU(), nn.Linear(c.decoder_hidden, 1)))
        start = torch.tensor([c.residual_scale, c.residual_bias])
        self.residual = nn.Parameter(start, c.residual_learnable) if c.residual == "cosine" else None

    def features(self, v: Tensor, t: Tensor) -> Tensor:
        """Trunk output for pairs, broadcasting over the leading dimensions. [..., d], [..., d] -> [..., hidden]"""
        if v.shape[-1] != self.dim or t.shape[-1] != self.dim:
            dims = f"{v.shape[-1]} (image) and {t.shape[-1]} (text)"
            raise ShapeMismatch(f"the adapter expects dimension {self.dim}, not {dims} — embed with its own model")
        pair = v * t
        pair = self.input_norm(pair) if self.input_norm is not None else pair * self.scale
        hidden = functional.relu(self.trunk(pair))
        return self.trunk_norm(hidden) if self.trunk_norm is not None else hidden

    def mean(self, hidden: Tensor) -> Tensor:
        """μ_k of every component, in float32 also under autocast. [..., hidden] -> [..., K, D]"""
        mean: Tensor = self.mean_heads(hidden).float().unflatten(-1, (self.components, self.latent))
        return mean

    def log_var(self, hidden: Tensor) -> Tensor:
        """logσ²_k of every component, clamped, in float32. [..., hidden] -> [..., K, D]"""
        raw = self.log_var_heads(hidden).float().unflatten(-1, (self.components, self.latent))
        clamped = raw.clamp(-self.config.log_var_clamp, self.config.log_var_clamp)
        return functional.logsigmoid(clamped) if self.config.variance == "sigmoid" else clamped

    def heads(self, hidden: Tensor) -> Tensor:
        """What both heads give, means first, unclamped, in one product. [..., hidden] -> [..., 2·K·D]"""
        both = (self.mean_heads, self.log_var_heads)
        weight, bias = torch.cat([head.weight for head in both]), torch.cat([head.bias for head in both])
        return functional.linear(hidden, weight, bias)

    def log_alpha(self, hidden: Tensor) -> Tensor:
        """Log mixing weights, in float32: [K] if global, [..., K] if predicted."""
        logits = self.mixing_logits if self.mixing_head is None else self.mixing_head(hidden)
        assert logits is not None
        return torch.log_softmax(logits.float(), dim=-1)

    def decode(self, z: Tensor) -> Tensor:
        """Decoder logit, without the residual. [..., D] -> [...]"""
        logit: Tensor = self.decoder(z).squeeze(-1)
        return logit

    def residual_logit(self, cosine: Tensor) -> Tensor | None:
        """a·cos + b, or None without a residual. [...] -> [...]"""
        return None if self.residual is None else self.residual[0] * cosine + self.residual[1]

    def logit(self, v: Tensor, t: Tensor) -> Tensor:
        """Test-time logit: decode the mixture's mean, no noise. [..., d], [..., d] -> [...]"""
        hidden = self.features(v, t)
        mean, log_alpha = self.mean(hidden), self.log_alpha(hidden)
        if self.config.decode == "argmax":
            best = log_alpha.argmax(dim=-1).expand(mean.shape[:-2])[..., None, None]
            z = mean.gather(-2, best.expand(*mean.shape[:-2], 1, self.latent)).squeeze(-2)
        else:
            z = (log_alpha.exp().unsqueeze(-1) * mean).sum(dim=-2)
        logit, residual = self.decode(z), self.residual_logit((v * t).sum(dim=-1))
        return logit if residual is None else logit + residual

    def uncertainty(self, v: Tensor, t: Tensor) -> Tensor:
        """Mean over D of Σ_k α_k·v_k, in (0, 1) unless the config says otherwise. [..., d], [..., d] -> [...]"""
        hidden, kind = self.features(v, t), self.config.uncertainty
        log_var = self.log_var(hidden)
        # With variance "sigmoid" the log-variance is already that of a variance in (0, 1).
        plain = kind == "exp" or self.config.variance == "sigmoid"
        variance = log_var.exp() if plain else bounded_variance(log_var)
        per_component = (variance.sqrt() if kind == "std" else variance).mean(dim=-1)
        return (self.log_alpha(hidden).exp() * per_component).sum(dim=-1)

    @torch.no_grad()
    def fold(self) -> FoldedAdapter:
        """The same test-time logit at the trunk's cost alone; exact, because all after the trunk's ReLU is linear up to
        the decoder's own ReLU. Raises :class:`NotFoldable` where it is not."""
        obstacles = {
            "mixing: head": self.mixing_head is not None,
            "decode: argmax": self.config.decode == "argmax" and self.components > 1,
            "input_scale: layernorm": self.input_norm is not None,
            "trunk_norm: true": self.trunk_norm is not None,
        }
        if settings := ", ".join(name for name, present in obstacles.items() if present):
            raise NotFoldable(f"an adapter with {settings} has no folded form — score it with the dense path")
        alpha = self.log_alpha(self.trunk.bias).exp().double()
        weight = self.mean_heads.weight.double().view(self.components, self.latent, -1)
        bias = self.mean_heads.bias.double().view(self.components, self.latent)
        first, last = self.decoder[0], self.decoder[-1]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        small = first.weight.double() @ torch.einsum("k,kdh->dh", alpha, weight)
        small_bias = first.weight.double() @ (alpha @ bias) + first.bias.double()
        deep = len(self.decoder) > 1
        return FoldedAdapter(
            trunk=(self.trunk.weight * self.scale).detach().clone(),
            trunk_bias=self.trunk.bias.detach().clone(),
            small=small.float(),
            small_bias=small_bias.float(),
            last=last.weight[0].detach().clone() if deep else None,
            last_bias=float(last.bias) if deep else 0.0,
            residual=None if self.residual is None else self.residual.detach().clone(),
        )


@dataclass(frozen=True)
class FoldedScore:
    """A sum of folded adapters, each on its own part of the embedding: the members of an ensemble, or just one."""

    parts: tuple[FoldedAdapter, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> FoldedScore:
        """A copy on a device, see :meth:`FoldedAdapter.to`."""
        return FoldedScore(tuple(part.to(device, dtype) for part in self.parts))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each part sees of embeddings. [N, M·d] -> M times [N, d]"""
        return x.chunk(len(self.parts), dim=-1)

    def aligned_logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Logits of pairs (n, n). [N, d], [N, d] -> [N] float32"""
        return reduce(torch.add, (part.aligned_logits(x, y) for part, x, y in self._each(v, t)))

    def list_logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Logits of queries, each with its own items. [Q, d], [Q, m, d] -> [Q, m] float32"""
        return reduce(torch.add, (part.list_logits(x, y) for part, x, y in self._each(v, t)))

    def logits(self, v: Tensor, t: Tensor, *, pairs: int | None = None) -> Tensor:
        """Every pair's logit, see :meth:`FoldedAdapter.logits`. [I, d], [T, d] -> [I, T] float32"""
        return reduce(torch.add, (part.logits(x, y, pairs=pairs) for part, x, y in self._each(v, t)))

    def _each(self, v: Tensor, t: Tensor) -> Iterable[tuple[FoldedAdapter, Tensor, Tensor]]:
        return zip(self.parts, self.split(v), self.split(t), strict=True)


@dataclass(frozen=True)
class FoldedAdapter:
    """relu(W (v⊙t) + b), then one small matrix, then the decoder's last layer: a pair costs the trunk."""

    trunk: Tensor  # [H, d], the input scale already inside
    trunk_bias: Tensor  # [H]
    small: Tensor  # [M, H]: μ heads, α and the decoder's first layer in one
    small_bias: Tensor  # [M]
    last: Tensor | None  # [M], after a ReLU; None where the decoder is linear (M = 1)
    last_bias: float
    residual: Tensor | None  # a, b of the cosine residual

    def to(self, device: torch.device, dtype: torch.dtype) -> FoldedAdapter:
        """A copy on a device: trunk and small matrix in ``dtype``, what follows them in float32."""
        moved: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            if isinstance(value := getattr(self, name), Tensor):
                moved[name] = value.to(device, dtype if name in ("trunk", "trunk_bias", "small") else torch.float32)
        return replace(self, **moved)

    def averaged(self, count: int) -> FoldedAdapter:
        """1/count of its logit, for vectors of length 1/√count: one part of a mean over ``count`` members."""
        share = 1.0 / count
        out: dict[str, Any] = {"small": self.small * share, "small_bias": self.small_bias * share}
        if self.last is not None:
            out = {"last": self.last * share, "last_bias": self.last_bias * share}
        residual = None if self.residual is None else self.residual * self.residual.new_tensor([1.0, share])
        return replace(self, trunk=self.trunk * count, residual=residual, **out)

    def aligned_logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Logits of pairs (n, n). [N, d], [N, d] -> [N] float32"""
        logit = self._decode((v * t).to(self.trunk.dtype)).squeeze(-1)
        return logit if self.residual is None else logit + self._residual((v.float() * t.float()).sum(dim=-1))

    def list_logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Logits of queries, each with its own items: no query is copied. [Q, d], [Q, m, d] -> [Q, m] float32"""
        pair = torch.mul(v.unsqueeze(1), t, out=t.new_empty(t.shape, dtype=self.trunk.dtype))
        logit = self._decode(pair).squeeze(-1)
        if self.residual is None:
            return logit
        v, t = v.float(), t.float()
        if t.device.type != "cpu":
            return logit + self._residual(torch.bmm(t, v.unsqueeze(2)).squeeze(2))
        cosine = torch.empty_like(logit)
        for row, items, query in zip(cosine, t, v, strict=True):  # a batch of them is slow on a CPU
            torch.mv(items, query, out=row)
        return logit + self._residual(cosine)

    def logits(self, v: Tensor, t: Tensor, *, pairs: int | None = None) -> Tensor:
        """Every pair's logit: W(v⊙t) = (W·diag v) t, so each image is a plain GEMM. [I, d], [T, d] -> [I, T] float32

        Texts are the rows of the product: the bias then runs along memory and is part of the GEMM, not a copy of the
        whole tile. v⊙t is symmetric, so the side with fewer items is the one that scales the weights. ``pairs`` have
        their trunk outputs held at a time, by default all; v⊙t itself is formed where it is smaller than the weights.
        """
        if len(t) < len(v):
            return self.logits(t, v, pairs=pairs).T
        (height, dim), texts = self.trunk.shape, t.to(self.trunk.dtype)
        formed, pairs = pairs is not None and len(t) < height, pairs or max(1, len(v) * len(t))
        images = max(1, min(len(v), pairs // max(1, len(t))))
        out = torch.empty(len(v), len(t), device=v.device)
        for rows, block in zip(torch.split(v.to(texts.dtype), images), torch.split(out, images), strict=True):
            if formed:
                block.copy_(self._decode((rows.unsqueeze(1) * texts).view(-1, dim)).view_as(block))
                continue
            scaled = (rows.unsqueeze(1) * self.trunk).view(-1, dim)  # [I·H, d]
            bias, step = self.trunk_bias.repeat(len(rows)), max(1, pairs // images)
            for part, columns in zip(torch.split(texts, step), torch.split(block, step, dim=1), strict=True):
                columns.copy_(self._decode(part, scaled, bias).T)
        return out if self.residual is None else out.add_(self._residual(v.float() @ t.float().T))

    @cached_property
    def packed(self) -> Tensor:
        """The trunk in the layout in which oneDNN multiplies, which it otherwise makes for each product."""
        layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.trunk)
        return layout

    def _decode(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Trunk and decoder, of n trunks, one below the other, if given. [..., d], [n·H, d], [n·H] -> [..., n]"""
        height, count = len(self.trunk), 1 if weight is None else len(weight) // len(self.trunk)
        bias = self.trunk_bias if bias is None else bias
        if fuses_relu(x):
            weight = self.packed if weight is None else weight
            hidden = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu", [], "").view(-1, height)
        else:
            hidden = functional.linear(x, self.trunk if weight is None else weight, bias).relu_().view(-1, height)
        half = hidden.device.type == "cuda" and hidden.dtype != torch.float32
        if half and self.last is not None and WIDE_SUMS and not torch.compiler.is_compiling():
            out = torch.mm(hidden, self.small.T, out_dtype=torch.float32).add_(self.small_bias)
        else:
            out = functional.linear(hidden, self.small).float().add_(self.small_bias)
        logit = out.squeeze(-1) if self.last is None else torch.mv(out.relu_(), self.last).add_(self.last_bias)
        return logit.view(*x.shape[:-1], count)

    def _residual(self, cosine: Tensor) -> Tensor:
        assert self.residual is not None
        return self.residual[0] * cosine + self.residual[1]


def fuses_relu(x: Tensor) -> bool:
    """Can oneDNN apply a ReLU to a product with ``x`` while it is in registers? On CPUs that multiply in bfloat16."""
    plain = x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling()
    return not plain and x.numel() > 0 and fast_bfloat16()


@cache
def fast_bfloat16() -> bool:
    """Does this CPU multiply in bfloat16?"""
    known: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
