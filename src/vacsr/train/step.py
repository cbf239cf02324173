"""One training step: loss, gradient, clip, update; eager, compiled, or replayed as a CUDA graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.train.distributed import sum_gradients, sum_over_ranks
from vacsr.train.optim import AdamP

if TYPE_CHECKING:
    from vacsr.train.trainer import Task


class TrainStep:
    """Turns a batch into an update; returns the loss, its parts and the gradient norm as one tensor."""

    def __init__(self, task: Task, optimizer: Optimizer, config: Any) -> None:
        self.task, self.optimizer, self.config = task, optimizer, config
        self.device = task.device
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.names: tuple[str, ...] = ()
        self.loss_scale = torch.ones((), device=self.device)
        """Multiplies the gradient, not the logged loss."""
        self.loss = task.compile() if task.compiled else task.loss
        self.falls_back = task.falls_back

    def reset(self) -> None:
        """Call this when towers were frozen or unfrozen."""

    def __call__(self, batch: Any, step: int) -> Tensor:
        """-> [loss, parts..., gradient norm]; the norm is 0 where gradients only accumulate."""
        number = torch.tensor(step, device=self.device)
        return self.run(batch, number, last=(step + 1) % self.config.accumulate == 0)

    def run(self, batch: Any, step: Tensor, *, last: bool) -> Tensor:
        """Add one batch's gradient; at the ``last`` of an optimiser step also clip and update.

        A non-finite gradient changes nothing on a CPU; on a GPU the check would wait for the device. Where
        ``compile=auto`` fails, warn and continue without the compiler.
        """
        try:
            values = self.backward(batch, step)
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self.falls_back:
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__  # the whole message has pages
            warnings.warn(f"torch.compile failed ({reason}); training continues uncompiled", stacklevel=2)
            self.task.uncompile()
            self.loss, self.falls_back = self.task.loss, False
            if isinstance(self.optimizer, AdamP):
                self.optimizer.uncompile()
            self.optimizer.zero_grad(set_to_none=True)
            values = self.backward(batch, step)
        values = sum_over_ranks(values, self.task.world)
        norm = values.new_zeros(())
        if last:
            sum_gradients(self.params, self.task.world)
            limit = (self.config.clip_norm or math.inf) / math.sqrt(self.task.members)
            norm = torch.nn.utils.clip_grad_norm_(self.params, limit, foreach=True).detach()
            if self.device.type == "cuda" or bool(norm.isfinite()):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return torch.cat((values, norm.reshape(1)))

    def backward(self, batch: Any, step: Tensor) -> Tensor:
        """Add the gradient of one batch. -> [loss, parts...] of this rank"""
        terms = self.loss(batch, step)
        (terms.total * self.loss_scale / self.config.accumulate).backward()
        self.names = ("loss", *terms.parts)
        return torch.stack([part.detach() for part in (terms.total, *terms.parts.values())]).float()


class GraphedStep(TrainStep):
    """The same step captured once and replayed: one launch instead of hundreds. Needs full batches and one rank.

    A batch is a tuple of tensors (or None) whose shapes do not change.
    """

    def __init__(self, task: Task, optimizer: Optimizer, config: Any) -> None:
        super().__init__(task, optimizer, config)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager_steps = 0
        self.batch: Any = None
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.values = torch.zeros(0, device=self.device)

    def reset(self) -> None:
        self.graph, self.eager_steps = None, 0

    def __call__(self, batch: Any, step: int) -> Tensor:
        if self.batch is None:
            self.batch = type(batch)(*(None if x is None else x.clone() for x in batch))
        for static, new in zip(self.batch, batch, strict=True):
            if static is not None:
                static.copy_(new)
        self.step.fill_(step)
        if self.graph is None and self.eager_steps < 3:  # as CUDA graphs ask for; what compiles, compiles here
            self.eager_steps += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                values = super().__call__(self.batch, step)
            torch.cuda.current_stream().wait_stream(self.stream)
            return values
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.values = self.run(self.batch, self.step, last=True)
        self.graph.replay()
        return self.values.clone()


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """``tf32`` lets CUDA round float32 matrix products, anything else forbids it; torch's setting is restored after."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
