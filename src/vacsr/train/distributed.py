"""Several processes as one: each owns its rows of the batch, sees every caption and adds up the gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.scoring import choose_device

_GROUPS = count()
"""Numbers the process groups of this process; all ranks join in the same order."""


@dataclass(frozen=True)
class World:
    """This process's place among all."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Writes files and shows progress."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank owns."""
        if batch % self.size:
            raise UsageError(f"a batch of {batch} does not divide over {self.size} ranks — set train.batch_size")
        share = batch // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


ALONE = World()
"""One process."""


def take_device(name: str) -> torch.device:
    """The device of a run. A numbered GPU becomes CUDA's current one, where streams and graphs are made."""
    device = choose_device(name)
    if device.type == "cuda" and device.index is not None:
        there = torch.cuda.device_count()
        if device.index >= there:
            raise EnvironmentProblem(f"no GPU '{name}', there are {there} — use a number below {there}, or cuda")
        torch.cuda.set_device(device)
    return device


def is_first_rank() -> bool:
    """The one that writes files, known before the others are met."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return ranks() == 1 or int(os.environ.get("RANK", "0")) == 0


def ranks() -> int:
    """How many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_world(device: torch.device) -> World:
    """The world that torchrun set up (nccl on CUDA, gloo otherwise), or a world of one."""
    if ranks() == 1 and not dist.is_initialized():
        return World()
    if not dist.is_initialized():
        if device.type == "cuda" and device.index is None:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # each rank its own GPU
        _join("nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size())


def _join(backend: str) -> None:
    """A process group with keys of its own: torchrun's store outlives a group, and old addresses hang the next one."""
    store, rank, size = _meeting_place()
    own = dist.PrefixStore(f"vacsr-{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


@cache
def _meeting_place() -> tuple[Any, int, int]:
    """Where the ranks find each other, as torchrun's environment says: store, rank, size."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    return store, rank, size


@contextmanager
def leaving_world() -> Iterator[None]:
    """Leave the process group that was joined inside; one that was there before stays."""
    before = dist.is_initialized()
    try:
        yield
    finally:
        if not before and dist.is_initialized():
            dist.destroy_process_group()


class _GatherRows(torch.autograd.Function):
    """All ranks' rows in rank order; the gradient of a row is the sum of what every rank says about it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather_rows(x: Tensor, world: World) -> Tensor:
    """[R, d] on each rank -> [R·size, d] on all, with gradient."""
    if world.size == 1:
        return x
    gathered: Tensor = _GatherRows.apply(x)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients(params: Iterable[nn.Parameter], world: World) -> None:
    """Add up the gradients of all ranks in one message."""
    if world.size == 1:
        return
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    offset = 0
    for grad in grads:
        grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
        offset += grad.numel()


def check_ranks_agree(fingerprint: str, world: World) -> None:
    """Every rank must have read the same data by the same settings: their batches would not fit together."""
    if world.size == 1:
        return
    prints = [""] * world.size
    dist.all_gather_object(prints, fingerprint)
    if len(set(prints)) > 1:
        message = f"the {world.size} ranks read different data or settings, expected the same on each"
        raise DataError(f"{message} — compare recipes, and what data.on_error=skip left out on each machine")


def barrier(world: World) -> None:
    """Wait for everyone."""
    if world.size > 1:
        dist.barrier()
