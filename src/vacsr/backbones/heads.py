"""Projection from a backbone's tokens into the shared space: heads for means, and heads for variances."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from vacsr.backbones.pooling import build_pooling
from vacsr.config import HeadConfig
from vacsr.noise import RowNoise


class ProjectionHead(nn.Module):
    """Linear, or Linear-GELU-Dropout-Linear. The dropout mask is a draw of the item's position in the batch."""

    def __init__(self, in_dim: int, config: HeadConfig) -> None:
        super().__init__()
        hidden = config.hidden or config.dim
        self.dropout = config.dropout if config.kind == "mlp" else 0.0
        self.first = nn.Linear(in_dim, hidden) if config.kind == "mlp" else None
        self.activation = nn.GELU()
        self.last = nn.Linear(hidden if config.kind == "mlp" else in_dim, config.dim)
        for layer in (self.first, self.last) if config.init == "xavier" else ():
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, noise: RowNoise | None = None) -> Tensor:
        """Without ``noise`` nothing is dropped. [B, ..., in_dim] -> [B, ..., dim]"""
        if self.first is not None:
            x = self.activation(self.first(x))
        if noise is not None and self.dropout > 0.0:
            keep = noise.uniform(x.shape[-1]) >= self.dropout  # one mask per item, the same for all its tokens
            x = x * keep.view(len(x), *[1] * (x.ndim - 2), x.shape[-1]) / (1.0 - self.dropout)
        out: Tensor = self.last(x)
        return out


class VarianceHead(nn.Module):
    """Shaped like the head of the means, with a pooling and perhaps a norm of its own; its output is logσ²."""

    def __init__(
        self, dim: int, config: HeadConfig, *, pooling: Literal["gpo", "mean", "cls"], start: float, norm: float | None
    ) -> None:
        """``start``: of the last bias. ``norm``: the weight that a final LayerNorm starts with; None for no norm."""
        super().__init__()
        self.head = ProjectionHead(dim, config)
        self.pool = build_pooling(pooling)
        self.norm: nn.Module = nn.Identity()
        if norm is None:
            nn.init.constant_(self.head.last.bias, start)
        else:
            self.norm = layer = nn.LayerNorm(config.dim)
            nn.init.constant_(layer.weight, norm)
            nn.init.constant_(layer.bias, start)
