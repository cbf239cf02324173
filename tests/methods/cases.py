"""Small batches of unit vectors and Gaussians, and losses compared with their gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.methods import Embedding
from vacsr.objective import PairBlock, batch_block


def unit(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def pair(seed: int, size: int, dim: int = 5) -> tuple[Embedding, Embedding]:
    """Images and texts with a gradient. [size, dim] each"""
    v, t = unit(seed, 2, size, dim)
    return Embedding(v.requires_grad_()), Embedding(t.requires_grad_())


def gaussians(seed: int, count: int, dim: int = 3, *, log_var: float = -2.0) -> Embedding:
    """Float64 items whose log variances lie around ``log_var``, with a gradient in both."""
    spread = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    return Embedding(
        unit(seed, count, dim, dtype=torch.float64).requires_grad_(), (0.5 * spread + log_var).requires_grad_()
    )


def both_networks(seed: int, size: int, dim: int = 4) -> tuple[Tensor, Tensor]:
    """Joined embeddings of two networks, matching pairs alike. float64 [size, 2·dim] each"""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(2, size, dim, generator=generator, dtype=torch.float64)
    sides = [base + 0.7 * torch.randn(2, size, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    v, t = (torch.cat(list(functional.normalize(x, dim=-1)), dim=-1) / 2**0.5 for x in sides)
    return v, t


def block(ids: Sequence[int] | Tensor, *, epoch: int | None = None, captions: Tensor | None = None) -> PairBlock:
    number = None if epoch is None else torch.tensor(epoch)
    return batch_block(torch.as_tensor(ids), seed=5, step=3, epoch=number, captions=captions)


def assert_same(ours: Tensor, expected: Tensor, leaves: Sequence[Tensor], *, atol: float, rtol: float) -> None:
    """In value and in gradient."""
    torch.testing.assert_close(ours.to(expected.dtype), expected, atol=atol, rtol=rtol)
    pairs = zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=10 * atol, rtol=10 * rtol)
