"""How fast large matrix products run here, in isolation and back to back: what a share of the machine is a share of.

One product after a pause meets a cool processor with high clocks; many in a row meet its limit of power. Only the
latter is a fair ceiling for work that takes as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from vacsr.bench.timing import once

EDGE = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices, by kind of device."""
_ALONE, _PAUSE_S = 7, 0.05
_FP8 = torch.float8_e4m3fn


class Products(NamedTuple):
    """Square products that do as much work as something else."""

    one: Callable[[], object]
    times: int
    """How many."""
    operations: float
    """Of all of them."""

    def run(self) -> None:
        """All, back to back."""
        for _ in range(self.times):
            self.one()


def square_products(edge: int, dtype: torch.dtype, *, device: torch.device, operations: float) -> Products:
    """[edge, edge] × [edge, edge], so many that they make up about so many operations, one at least."""
    each = 2.0 * edge**3
    count = max(1, round(operations / each))
    return Products(_product(edge, dtype, device=device), count, count * each)


def _product(edge: int, dtype: torch.dtype, *, device: torch.device) -> Callable[[], object]:
    """Of normal numbers: zeros would draw less power and run faster."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(edge, edge, device=device, generator=generator) for _ in range(2))
    if dtype == _FP8:
        one = torch.ones((), device=device)
        first, second = left.to(dtype), right.to(dtype).T
        return lambda: torch._scaled_mm(first, second, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    a, b = left.to(dtype), right.to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def alone_tflops(found: Products, *, device: torch.device) -> float:
    """The best rate of single products, each after a pause."""
    found.one()
    took = []
    for _ in range(_ALONE):
        time.sleep(_PAUSE_S)
        took.append(_on_gpu(found.one) if device.type == "cuda" else once(found.one, device=device))
    return found.operations / found.times / min(took) / 1e12


def _on_gpu(work: Callable[[], object]) -> float:
    """Seconds by the GPU's own clock: the launch would count for a hundredth of so short a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
