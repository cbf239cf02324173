"""What several benchmarks share: CUDA graphs, and the rates that a GPU reaches in the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from vacsr.adapter import VariationalAdapter
from vacsr.bench import Step, time_in_turn
from vacsr.train.step import matmul_precision

_EDGE = 8192


def need_gpu(subject: str, *, available: bool | None = None) -> torch.device:
    """The GPU; without one the script ends with exit code 3, which `make bench` accepts."""
    if not (torch.cuda.is_available() if available is None else available):
        print(f"{subject} needs a CUDA GPU; there is none here", file=sys.stderr)
        raise SystemExit(3)
    return torch.device("cuda")


def captured(step: Step) -> Callable[[], None]:
    """The same as a CUDA graph. The graph does not keep its inputs alive; the step, which is kept, does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_step: Step = step) -> None:
        graph.replay()

    return replay


def median_seconds(work: Step, *, rounds: int = 9) -> float:
    """Of warm calls on the GPU."""
    (timing,) = time_in_turn({"work": work}, device=torch.device("cuda"), rounds=rounds).values()
    if timing.error is not None:
        raise RuntimeError(timing.error)
    return timing.median


def adapter_flops(adapter: VariationalAdapter, pairs: int) -> float:
    """Of all matrix products of a training step: forward, and twice that backward."""
    return 3 * 2.0 * pairs * sum(p.numel() for p in adapter.parameters() if p.ndim == 2)


def latent_bytes(adapter: VariationalAdapter, pairs: int, itemsize: int) -> float:
    """What the step between heads and decoder must read and write: 2·K·D and z forward; the same and 2·K·D back."""
    heads, z = 2 * adapter.components * adapter.latent, adapter.latent
    return float(pairs * itemsize * (3 * heads + 2 * z))


def copy_rate() -> float:
    """Bytes per second read and written by a copy of 1 GiB."""
    source = torch.zeros(2**28, device="cuda")
    out = torch.empty_like(source)
    return 2.0 * source.nbytes / median_seconds(lambda: out.copy_(source))


def product_rate(precision: str) -> float:
    """FLOP/s of one product of 8192 × 8192 matrices."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(_EDGE, _EDGE, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    with matmul_precision(precision):
        return 2.0 * _EDGE**3 / median_seconds(lambda: torch.mm(a, b, out=out))
