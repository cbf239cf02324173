"""What a walk over tiles keeps: the largest values of every row, and one gradient of each side's embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vacsr.methods.base import Embedding


class RunningTop:
    """The ``count`` largest values of each row of a matrix that is seen tile by tile.

    >>> top = RunningTop(1, 2, like=torch.zeros(()))
    >>> top.add(slice(0, 1), torch.tensor([[3.0, 9.0]]), first=0)
    >>> top.add(slice(0, 1), torch.tensor([[1.0, 5.0]]), first=2)
    >>> top.values, top.places
    (tensor([[9., 5.]]), tensor([[1, 3]]))
    """

    def __init__(self, rows: int, count: int, *, like: Tensor) -> None:
        self.values = like.new_full((rows, count), -torch.inf)  # [rows, count]
        self.places = torch.zeros(rows, count, dtype=torch.int64, device=like.device)

    def add(self, rows: slice, values: Tensor, *, first: int) -> None:
        """A tile [R, C] of these rows, whose first column is number ``first``."""
        count = self.values.shape[1]
        best, places = values.topk(min(count, values.shape[1]), dim=1)
        known = torch.cat((self.values[rows], best), dim=1)
        where = torch.cat((self.places[rows], places + first), dim=1)
        self.values[rows], kept = known.topk(count, dim=1)
        self.places[rows] = where.gather(1, kept)

    @property
    def filled(self) -> Tensor:
        """False where a row had fewer values above −inf. [rows, count] bool"""
        return self.values != -torch.inf


class SideGradient:
    """The embeddings of one side, cut from the graph, and the gradient that tiles add to them."""

    def __init__(self, x: Embedding, wanted: Sequence[bool]) -> None:
        self.tensors = [y.detach() for y in x if y is not None]
        self.grads = [torch.zeros_like(y) if need else None for y, need in zip(self.tensors, wanted, strict=True)]

    def leaf(self, rows: slice | Tensor) -> Embedding:
        """Some rows as leaves of a tile's own graph."""
        parts = [y[rows].requires_grad_(g is not None) for y, g in zip(self.tensors, self.grads, strict=True)]
        return Embedding(*parts)

    def wanted(self, x: Embedding) -> list[Tensor]:
        """Those of a leaf's tensors that need a gradient."""
        return [y for y in x if y is not None and y.requires_grad]

    def add(self, rows: slice | Tensor, grads: Sequence[Tensor | None]) -> None:
        """Add what :meth:`wanted` was given; rows may come several times."""
        whole = [g for g in self.grads if g is not None]
        for into, grad in zip(whole, grads, strict=True):
            if grad is None:
                continue
            if isinstance(rows, slice):
                into[rows] += grad
            else:
                into.index_put_((rows,), grad, accumulate=True)
