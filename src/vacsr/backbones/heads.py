"""From a backbone's tokens to the shared space: pooling into one vector per item, and projection.

GPO (the generalized pooling operator of VSE∞) sorts every channel over the tokens and weighs the ranks. The weights
come from a small recurrent network that sees the ranks only, so they depend on nothing but the number of tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr import kernels
from vacsr.config import HeadConfig
from vacsr.errors import UsageError
from vacsr.noise import RowNoise

if TYPE_CHECKING:
    from vacsr.backbones.base import Tokens

_WIDTH = 32  # of the rank codes and of the recurrent state
_TEMPERATURE = 0.1  # of the softmax over ranks


class ProjectionHead(nn.Module):
    """Linear-GELU-Dropout-Linear, Linear, or nothing. The dropout mask is a draw of the item's batch position."""

    last: nn.Module

    def __init__(self, in_dim: int, config: HeadConfig) -> None:
        super().__init__()
        if config.kind == "none" and in_dim != config.dim:
            message = f"a tower gives {in_dim} dimensions, backbone.head.dim is {config.dim}"
            raise UsageError(f"{message} — set it to the width of both towers, or backbone.head.kind to linear or mlp")
        hidden, mlp = config.hidden or config.dim, config.kind == "mlp"
        self.dropout = config.dropout if mlp else 0.0
        self.first = nn.Linear(in_dim, hidden) if mlp else None
        self.last = nn.Identity() if config.kind == "none" else nn.Linear(hidden if mlp else in_dim, config.dim)
        for layer in (self.first, self.last) if config.init == "xavier" else ():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, noise: RowNoise | None = None) -> Tensor:
        """Without ``noise`` nothing is dropped. [B, ..., in_dim] -> [B, ..., dim]"""
        if self.first is not None:
            x = functional.gelu(self.first(x))
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
        if config.kind == "none":
            raise UsageError("variances need a head of their own — set backbone.head.kind to linear or mlp")
        self.head = ProjectionHead(dim, config)
        self.pool = build_pooling(pooling)
        self.norm: nn.Module = nn.Identity()
        if norm is None:
            assert isinstance(self.head.last, nn.Linear)
            nn.init.constant_(self.head.last.bias, start)
        else:
            self.norm = layer = nn.LayerNorm(config.dim)
            nn.init.constant_(layer.weight, norm)
            nn.init.constant_(layer.bias, start)


def build_pooling(kind: Literal["gpo", "mean", "cls"]) -> nn.Module:
    """The pooling of that name; ``forward(tokens [B, L, D]) -> [B, D]``, in float32 or wider."""
    kinds: dict[str, type[nn.Module]] = {"gpo": GeneralizedPooling, "mean": MeanPooling, "cls": SummaryPooling}
    return kinds[kind]()


class MeanPooling(nn.Module):
    """The mean of the real tokens."""

    def forward(self, tokens: Tokens) -> Tensor:
        real = tokens.mask.unsqueeze(-1)
        total = tokens.values.float().masked_fill(~real, 0.0).sum(dim=1)
        return total / real.sum(dim=1).clamp(min=1)


class SummaryPooling(nn.Module):
    """The class (CLIP text: end) token alone. Dropping tokens in training does not touch it."""

    def forward(self, tokens: Tokens) -> Tensor:
        position = tokens.summary.view(-1, 1, 1).expand(-1, 1, tokens.values.shape[-1])
        summary = tokens.values.gather(1, position).squeeze(1)
        return summary.to(torch.promote_types(summary.dtype, torch.float32))


class GeneralizedPooling(nn.Module):
    """GPO: a weighted sum of sorted values, 12,704 parameters whatever the dimension.

    >>> sum(p.numel() for p in GeneralizedPooling().parameters())
    12704
    """

    def __init__(self) -> None:
        super().__init__()
        self.gru = RankNetwork()
        self.score = nn.Linear(_WIDTH, 1, bias=False)

    def forward(self, tokens: Tokens) -> Tensor:
        weights = self.weights(tokens.mask.sum(dim=1), rank_codes(tokens.mask.shape[1], device=tokens.mask.device))
        if kernels.available(tokens.mask.device):
            from vacsr.kernels import gpo

            return gpo.ranked_sum(tokens.values, tokens.mask, weights)
        return ranked_sum(tokens.values, tokens.mask, weights)

    def weights(self, lengths: Tensor, codes: Tensor) -> Tensor:
        """How much each rank counts, for items of these lengths; ranks past the end weigh 0. [B], [L, 32] -> [B, L]

        On a CPU each distinct length is worked out once. Elsewhere, and when compiled, every item is, so that no shape
        depends on the data and nothing waits for the device.
        """
        item = None
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            lengths, item = torch.unique(lengths, return_inverse=True)
        lengths = lengths.clamp(min=1)
        past_end = torch.arange(codes.shape[0], device=codes.device) >= lengths.unsqueeze(1)
        with torch.autocast(codes.device.type, enabled=False):
            logits = self.score(self.states(lengths, codes)).squeeze(-1)
        weights = torch.softmax((logits / _TEMPERATURE).masked_fill(past_end, -torch.inf), dim=-1)
        return weights if item is None else weights[item]

    def states(self, lengths: Tensor, codes: Tensor) -> Tensor:
        """Both directions' states, averaged; past an item's end they mean nothing. [N], [L, 32] -> [N, L, 32]

        Forwards, the state at a rank is the same for every length: one more row of the batch gives it. Backwards, the
        network must start at the item's own last rank; its codes are pushed to the row's end, where a backward pass
        starts.
        """
        if kernels.available(codes.device):
            from vacsr.kernels import gpo

            forwards, backwards = gpo.gru_states(self.gru, codes, lengths=lengths)
            return (forwards + backwards) / 2
        longest = codes.shape[0]
        rank, shift = torch.arange(longest, device=codes.device), longest - lengths.unsqueeze(1)
        pushed = codes[(rank - shift).clamp(min=0)]  # [N, L, 32]
        states: Tensor = self.gru(torch.cat((pushed, codes.unsqueeze(0))))
        pulled = (rank + shift).clamp(max=longest - 1).unsqueeze(-1).expand(-1, -1, _WIDTH)
        return (states[-1:, :, :_WIDTH] + states[:-1, :, _WIDTH:].gather(1, pulled)) / 2


class RankNetwork(nn.Module):
    """The weights of a one-layer bidirectional nn.GRU, under its names and drawn as it draws them.

    Not an nn.GRU: that one moves its weights whenever a model is sent to the device it is already on, behind the back
    of a captured CUDA graph, and `torch.compile` refuses to look into it.
    """

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in nn.GRU(_WIDTH, _WIDTH, bidirectional=True).named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Both directions' states. [N, L, 32] -> [N, L, 64]"""
        start = x.new_zeros(2, len(x), _WIDTH)
        states: Tensor = torch.gru(x, start, list(self.parameters()), True, 1, 0.0, self.training, True, True)[0]
        return states


def rank_codes(length: int, *, device: torch.device | None = None) -> Tensor:
    """Sine and cosine of the rank at 16 wavelengths between 2π and 10,000·2π. -> [length, 32]"""
    rank = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(1)
    even = torch.arange(0, _WIDTH, 2, device=device, dtype=torch.float32)
    angle = rank * torch.exp(even * (-math.log(10_000.0) / _WIDTH))
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)


def ranked_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sort each channel's real values from large to small and weigh the ranks. [B, L, D], [B, L], [B, L] -> [B, D]"""
    channels = values.float().masked_fill(~mask.unsqueeze(-1), -torch.inf).transpose(1, 2).contiguous()  # [B, D, L]
    ranked = channels.sort(dim=-1, descending=True).values
    past_end = torch.arange(mask.shape[1], device=mask.device) >= mask.sum(dim=1, keepdim=True)
    ranked = ranked.masked_fill(past_end.unsqueeze(1), 0.0)
    with torch.autocast(values.device.type, enabled=False):
        return torch.matmul(ranked, weights.unsqueeze(-1)).squeeze(-1)
