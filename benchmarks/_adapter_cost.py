"""What the adapter must cost at least: its matrix products at the rate of a large one, and what fused kernels move."""

from __future__ import annotations

import statistics
import time

import torch

from vacsr.adapter import VariationalAdapter
from vacsr.train.precision import matmul_precision

_SIZE, _ROUNDS = 8192, 9


def adapter_flops(adapter: VariationalAdapter, pairs: int) -> float:
    """Of all matrix products of a training step: forward, and twice that backward."""
    return 3 * 2.0 * pairs * sum(p.numel() for p in adapter.parameters() if p.ndim == 2)


def latent_bytes(adapter: VariationalAdapter, pairs: int, itemsize: int) -> float:
    """What lies between heads and decoder must read and write: 2·K·D and z forward; the same and 2·K·D back."""
    heads, z = 2 * adapter.components * adapter.latent, adapter.latent
    return float(pairs * itemsize * (3 * heads + 2 * z))


def copy_rate() -> float:
    """Bytes/s read and written by a copy of 1 GiB: the median of single ones, warm."""
    source, times = torch.zeros(2**28, device="cuda"), []
    out = torch.empty_like(source)
    for _ in range(_ROUNDS + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        out.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2.0 * source.nbytes / statistics.median(times[3:])


def product_rate(precision: str) -> float:
    """FLOP/s of one product of 8192 × 8192 matrices: the median of single ones, warm."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=dtype) for _ in range(2))
    out, times = torch.empty_like(a), []
    with matmul_precision(precision):
        for _ in range(_ROUNDS + 3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return 2.0 * _SIZE**3 / statistics.median(times[3:])
