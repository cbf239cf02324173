"""What a method is: a head on two embeddings, a loss over their pairs, a score and perhaps an uncertainty."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock


class Embedding(NamedTuple):
    """A batch of items in the shared space."""

    mean: Tensor  # [N, d], L2-normalised
    log_var: Tensor | None = None  # [N, d] for methods that give each item a variance


def take(x: Embedding, rows: slice | Tensor) -> Embedding:
    """Some rows of an embedding."""
    return Embedding(x.mean[rows], None if x.log_var is None else x.log_var[rows])


class ParamGroup(NamedTuple):
    """Parameters that share a learning rate."""

    name: str
    params: list[nn.Parameter]
    lr_scale: float = 1.0
    decay: bool = True


@runtime_checkable
class Method(Protocol):
    """An nn.Module that knows embeddings, not pixels or files."""

    pairwise: bool
    """The loss is a sum over rows of pairs: ranks and strips may split it."""

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """Every pair's score, larger is more alike. [I, d], [T, d] -> [I, T]"""

    def grade(self, score: Tensor) -> Tensor:
        """Scores mapped to (0, 1), order kept: what a person is shown. [...] -> [...]"""

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """Of aligned pairs; None where the method has none. [N, d], [N, d] -> [N]"""

    def param_groups(self) -> list[ParamGroup]:
        """Its parameters with their learning rates and decay."""


def split_by_decay(name: str, named: Iterable[tuple[str, nn.Parameter]], *, lr_scale: float = 1.0) -> list[ParamGroup]:
    """Matrices decay; biases, norms and scalars do not."""
    params = [p for _, p in named if p.requires_grad]
    groups = [
        ParamGroup(name, [p for p in params if p.ndim >= 2], lr_scale, True),
        ParamGroup(f"{name}-plain", [p for p in params if p.ndim < 2], lr_scale, False),
    ]
    return [group for group in groups if group.params]
