"""Where variances come from: on towers a second last block, and heads that give logσ² beside those that give μ."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from vacsr.backbones.heads import ProjectionHead
from vacsr.backbones.pooling import build_pooling
from vacsr.config import HeadConfig


class _Tower(Protocol):
    def blocks(self) -> list[nn.Module]:
        """Its repeated layers, input first."""


class _Call(NamedTuple):
    args: tuple[Any, ...]
    named: dict[str, Any]


class VarianceBranch(nn.Module):
    """A parallel copy of a tower's last block, fed with the same input (PCME++'s uncertainty path).

    The input is noted when the tower runs and used up by the next call of the branch. Noting it is plain Python, which
    a compiled block might skip, so the tower's last block must not be compiled; the copy may be.
    """

    def __init__(self, tower: _Tower) -> None:
        super().__init__()
        last = tower.blocks()[-1]
        self.block = deepcopy(last)
        self._seen: _Call | None = None
        last.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._seen = _Call(args, named)

    def forward(self) -> Tensor:
        """The branch's tokens for what the tower has just seen, before norm and projection. -> [B, L, W]"""
        assert self._seen is not None, "the tower runs before its branch"
        (args, named), self._seen = self._seen, None
        out = self.block(*args, **named)
        tokens: Tensor = out[0] if isinstance(out, tuple) else out
        return tokens


class VarianceHead(nn.Module):
    """Shaped like the head of the means, with a pooling of its own; its output is logσ²."""

    def __init__(self, dim: int, config: HeadConfig, *, pooling: Literal["gpo", "mean", "cls"], start: float) -> None:
        super().__init__()
        self.head = ProjectionHead(dim, config)
        self.pool = build_pooling(pooling)
        nn.init.constant_(self.head.last.bias, start)
