"""A loss over the pair matrix, one strip of full rows at a time: the memory of a strip, the gradients of the batch.

A strip has whole rows, so it finds its hard negatives by itself and any loss that is a sum over rows can be walked
like this. The gradient of a strip is computed as soon as its loss is known and added to one gradient of the embeddings
and parameters; then the strip is freed. The caller's ``backward`` scales these gradients and passes them on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vacsr.methods.base import Embedding, take
from vacsr.objective import LossTerms, PairBlock

PairLoss = Callable[[Embedding, Embedding, PairBlock], LossTerms]
"""[R, d], [C, d] and their pairs -> the block's share of the batch's loss."""
Loss = TypeVar("Loss", bound=Callable[..., LossTerms])


@dataclass(frozen=True)
class StripLoss:
    """A pair loss computed in strips of ``rows`` rows. Its total carries a gradient, its parts do not."""

    loss: PairLoss
    module: nn.Module  # its parameters learn from the loss
    rows: int

    def __call__(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""
        params = [p for p in self.module.parameters() if p.requires_grad]
        inputs = [*v, *t, *params]
        gradients: list[Tensor | None] = [None] * len(inputs)
        values: list[Tensor] = []
        texts = t.map(_leaf)
        for start in range(0, len(pairs.row_ids), self.rows):
            rows = slice(start, start + self.rows)
            images = take(v, rows).map(_leaf)
            terms = self.loss(images, texts, pairs.rows(rows))
            if torch.is_grad_enabled():
                add_gradients(gradients, terms.total, [*images, *texts, *params], whole=inputs, rows=rows, split=2)
            values.append(torch.stack([terms.total, *terms.parts.values()]).detach())
        total, *parts = torch.stack(values).sum(dim=0)
        total = _WithGradients.apply(total, gradients, *inputs)  # type: ignore[no-untyped-call]
        return LossTerms(total, dict(zip(terms.parts, parts, strict=True)))


def _leaf(x: Tensor) -> Tensor:
    """Cut from its graph."""
    return x.detach().requires_grad_(x.requires_grad)


def add_gradients(
    sums: list[Tensor | None], output: Tensor, leaves: Sequence[Tensor | None], *, whole: Sequence[Tensor | None],
    rows: slice, split: int, push: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the gradients of a strip to those of the whole inputs; of the first ``split`` a strip has only these rows.

    ``push``: the gradient with respect to ``output``, if that is not a loss.
    """
    learning = {n: x for n, x in enumerate(leaves) if x is not None and x.requires_grad}
    if not learning:
        return
    parts, gradients = [], []
    grads = torch.autograd.grad(output, [*learning.values()], push, allow_unused=True)
    for n, gradient in zip(learning, grads, strict=True):
        x, total = whole[n], sums[n]
        if gradient is None or x is None:
            continue
        if total is None:
            total = sums[n] = torch.zeros_like(x)
        parts.append(total[rows] if n < split else total)
        gradients.append(gradient)
    if parts:
        torch._foreach_add_(parts, gradients)  # in one launch


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already: backward only scales them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if gradient is None else gradient * grad for gradient in ctx.saved_tensors))


def compile_pairs(loss: Loss) -> Loss:
    """torch.compile for one shape at a time, told to keep matrix products for the backward pass and little else.

    Of a loss in strips a strip is compiled: the compiler would unroll the loop over them. All other numbers of a pair
    (draws, variances, KL) follow from the products inside the kernel that needs them; by default the compiler keeps
    five times as much in half precision. The outputs of hand-written kernels are kept too where torch has an option
    for it: to run the kernels again would cost more than to read their outputs.
    """
    if isinstance(loss, StripLoss):
        return cast(Loss, replace(loss, loss=compile_pairs(loss.loss)))
    compiled = torch.compile(loss, dynamic=False)
    wishes = {"aggressive_recomputation": True, "is_non_builtin_to_include": True}
    options = {name: value for name, value in wishes.items() if hasattr(torch._functorch.config, name)}

    @functools.wraps(loss)
    def call(*args: Any, **kwargs: Any) -> LossTerms:
        with torch._functorch.config.patch(options):
            return compiled(*args, **kwargs)

    return cast(Loss, call)
