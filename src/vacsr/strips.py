"""A loss over the pair matrix, one strip of full rows at a time: the memory of a strip, the gradients of the batch.

A strip has whole rows, so it finds its hard negatives by itself and any loss that is a sum over rows can be walked
like this. The gradient of a strip is computed as soon as its loss is known and added to one gradient of the embeddings
and parameters; then the strip is freed. The caller's ``backward`` scales these gradients and passes them on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock

_P = ParamSpec("_P")
_T = TypeVar("_T")

PairLoss = Callable[[Embedding, Embedding, PairBlock], LossTerms]
"""[R, d], [C, d] and their pairs -> the block's share of the batch's loss."""

_NUMBERS = 9 << 23  # pairs × width of a strip chosen by `auto`: 9 rows of 4,096 pairs of two components at d = 1024
_GRAPH_BYTES = 1 << 25  # the smallest strip of a CUDA graph: 4,096 such pairs in float32
_GRAPH_STRIPS = 64  # a graph with more strips than this gets larger ones
_FEW_ROWS = 16  # every strip reads all texts, so a strip of fewer rows may hold twice the pairs


def strip_rows(
    method: Method,
    tile: int | Literal["auto"],
    *,
    rows: int,
    columns: int,
    itemsize: int = 4,
    graphed: bool = False,
) -> int:
    """Rows of a strip of a [rows, columns] pair matrix; ``rows`` means that the matrix is taken whole.

    ``auto`` chooses strips that keep a GPU busy for longer than the host needs to launch them. A CUDA graph launches
    for free: there a strip is smaller, but has at least 32 MiB (``itemsize``: bytes of a number in a matrix product).

    >>> from vacsr.methods.sigmoid import SigmoidConfig
    >>> from vacsr.methods.sigmoid import Sigmoid
    >>> strip_rows(Sigmoid(SigmoidConfig(), dim=8), 64, rows=100, columns=100)
    50
    """
    if tile != "auto" and tile < 0:
        raise UsageError(f"train.tile={tile}: expected rows of a strip, 0 for the whole matrix, or auto")
    if tile == 0 or not rows * columns:
        return rows
    if not method.pairwise:
        if tile == "auto":
            return rows
        name = type(method).__name__.lower()
        raise UsageError(
            f"train.tile={tile}: the loss of '{name}' compares pairs across rows, so it cannot be split into strips "
            "— set train.tile=0 or auto"
        )
    if tile != "auto":
        return _even(rows, tile)
    width = method.pair_width
    pairs = _NUMBERS // width
    if graphed:
        pairs = min(pairs, max(_GRAPH_BYTES // (itemsize * width), rows * columns // _GRAPH_STRIPS))
    most = max(pairs // columns, min(_FEW_ROWS, 2 * pairs // columns), 1)
    return _equal_strips(rows, most=most)


def _equal_strips(rows: int, *, most: int) -> int:
    """The largest divisor of ``rows`` up to ``most``: strips of one shape are compiled once. Where the divisors are all
    small, the last strip is shorter.

    >>> _equal_strips(4096, most=9), _equal_strips(1009, most=36)
    (8, 35)
    """
    divisor = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return divisor if 2 * divisor >= min(rows, most) else _even(rows, most)


def _even(rows: int, most: int) -> int:
    """Rows of the fewest strips with at most ``most`` rows, all of one height but perhaps the last."""
    return -(-rows // -(-rows // most))


@dataclass(frozen=True)
class StripLoss:
    """A pair loss computed in strips of ``rows`` rows. Its total carries a gradient, its parts do not."""

    loss: PairLoss
    module: nn.Module  # its parameters learn from the loss
    rows: int

    def __call__(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""
        params = [p for p in self.module.parameters() if p.requires_grad]
        sums = _Sums([*v, *t, *params], learns=torch.is_grad_enabled())
        total, *parts = _GradientsInForward.apply(self, pairs, sums, *sums.inputs)  # type: ignore[no-untyped-call]
        return LossTerms(total, dict(zip(sums.names, parts, strict=True)))

    def compiled(self) -> StripLoss:
        """The same with its strip compiled; equal strips share one compilation."""
        return replace(self, loss=compile_pairs(self.loss))


class _Sums:
    """What the strips of one batch add up to."""

    def __init__(self, inputs: list[Tensor | None], *, learns: bool) -> None:
        self.inputs = inputs  # v's mean and log-variance, t's, parameters
        self.learns = learns
        self.gradients: list[Tensor | None] = [None] * len(inputs)
        self.names: tuple[str, ...] = ()
        self.values: Tensor | None = None  # the loss and its parts

    def add_values(self, terms: LossTerms) -> None:
        """Add the loss of a strip and its parts."""
        values = torch.stack([terms.total, *terms.parts.values()]).detach()
        self.values = values if self.values is None else self.values + values
        self.names = tuple(terms.parts)

    def add_gradients(self, gradients: dict[int, Tensor | None], rows: slice) -> None:
        """Add a strip's gradients of some inputs, by their numbers, in one launch; of v it has only these rows."""
        sums, new = [], []
        for number, gradient in gradients.items():
            x = self.inputs[number]
            if gradient is None or x is None:
                continue
            whole = self.gradients[number]
            if whole is None:
                whole = self.gradients[number] = torch.zeros_like(x)
            sums.append(whole[rows] if number < 2 else whole)
            new.append(gradient)
        if sums:
            torch._foreach_add_(sums, new)


class _GradientsInForward(torch.autograd.Function):
    """Computes a loss together with its gradients, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, strips: StripLoss, pairs: PairBlock, sums: _Sums, *inputs: Tensor) -> tuple[Tensor, ...]:
        needs = [sums.learns and need for need in ctx.needs_input_grad[3:]]
        wanted = [number for number, need in enumerate(needs) if need]
        v, t = inputs[:2], [_leaf(x, need) for x, need in zip(inputs[2:4], needs[2:4], strict=True)]
        for start in range(0, len(pairs.relevance), strips.rows):
            rows = slice(start, start + strips.rows)
            leaves: list[Any] = [*(_leaf(x, need, rows) for x, need in zip(v, needs, strict=False)), *t, *inputs[4:]]
            with torch.set_grad_enabled(bool(wanted)):
                terms = strips.loss(Embedding(*leaves[:2]), Embedding(*leaves[2:4]), pairs.rows(rows))
                learning = [leaves[number] for number in wanted]
                gradients = torch.autograd.grad(terms.total, learning, allow_unused=True) if wanted else ()
            sums.add_values(terms)
            sums.add_gradients(dict(zip(wanted, gradients, strict=True)), rows)
        assert sums.values is not None, "a pair matrix has rows"
        total, *parts = (value.clone() for value in sums.values)
        ctx.save_for_backward(*sums.gradients)
        ctx.mark_non_differentiable(*parts)
        return (total, *parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *(None if g is None else g * grads[0] for g in ctx.saved_tensors))


def _leaf(x: Tensor | None, learns: bool, rows: slice = slice(None)) -> Tensor | None:
    """Some rows of an input, cut from its graph."""
    return None if x is None else x.detach()[rows].requires_grad_(learns)


def compile_pairs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """torch.compile for one shape at a time, told to keep matrix products for the backward pass and little else.

    All other numbers of a pair (draws, variances, KL) follow from these inside the kernel that needs them; by default
    the compiler keeps five times as much in half precision. The outputs of hand-written kernels are kept too where
    torch has an option for it: to run the kernels again would cost more than to read their outputs.
    """
    compiled = torch.compile(function, dynamic=False)
    wishes = {"aggressive_recomputation": True, "is_non_builtin_to_include": True}
    options = {name: value for name, value in wishes.items() if hasattr(torch._functorch.config, name)}

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch._functorch.config.patch(options):
            return compiled(*args, **kwargs)

    return call
