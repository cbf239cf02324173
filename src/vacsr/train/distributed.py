"""Several processes as one: each has its rows of the batch, sees every caption and adds up the gradients."""

import atexit
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vacsr.errors import DataError, UsageError
from vacsr.model import choose_device

warnings.filterwarnings("ignore", message="torch.distributed.nn.functional.all_gather", category=FutureWarning)


@dataclass(frozen=True)
class World:
    """This process's rank among all."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Writes files and shows progress."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank has."""
        if batch % self.size:
            raise UsageError(f"a batch of {batch} does not divide over {self.size} ranks — set train.batch_size")
        share = batch // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def take_device(name: str) -> torch.device:
    """The device of a run. A numbered GPU becomes CUDA's current one, where streams and graphs are made."""
    device = choose_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def is_first_rank() -> bool:
    """Does this process write the files? Known before it has joined the others."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return ranks() == 1 or int(os.environ.get("RANK", "0")) == 0


def ranks() -> int:
    """How many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_world(device: torch.device) -> World:
    """The process group of torchrun (nccl on CUDA, gloo otherwise), joined once per process, or a world of one."""
    if not dist.is_initialized():
        if ranks() == 1:
            return World()
        if device.type == "cuda" and device.index is None:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # one GPU per rank
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return World(dist.get_rank(), dist.get_world_size())


def gather_rows(x: Tensor, world: World) -> Tensor:
    """[R, d] on each rank -> [R·size, d] on all, in rank order; the gradient of a row is the sum over all ranks.

    A rank holds all captions, and its own images, instead of passing blocks of captions around: 65,536 vectors of 1,024
    numbers take 256 MiB in float32, and their gradient as much, where one row of their pairs takes 1.25 GiB in
    bfloat16. Hard negatives need whole rows, and blocks that pass by would have to be scored twice. NCCL gathers and
    scatters in a ring by itself.
    """
    if world.size == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x))  # type: ignore[no-untyped-call]


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients(params: Iterable[nn.Parameter], world: World) -> None:
    """Add up the gradients of all ranks in one message."""
    grads = [p.grad for p in params if p.grad is not None]
    if world.size == 1 or not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def check_ranks_agree(description: Mapping[str, Any], world: World) -> None:
    """Refuse ranks that read different data or settings: their batches would not fit together."""
    if world.size == 1:
        return
    descriptions: list[Mapping[str, Any]] = [{}] * world.size
    dist.all_gather_object(descriptions, dict(description))
    if any(other != description for other in descriptions):
        message = f"the {world.size} ranks read different data or settings, expected the same on each"
        raise DataError(f"{message} — compare recipes, and what data.on_error=skip left out on each machine")


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()
