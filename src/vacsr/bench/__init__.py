"""What `vacsr bench` runs: ways to do the same thing, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from vacsr.bench.metrics import bench_metrics
from vacsr.bench.result import BenchResult
from vacsr.bench.scoring import bench_scoring
from vacsr.bench.training import bench_training

__all__ = ["BenchResult", "Size", "What", "run_bench"]

What = Literal["scoring", "training", "metrics"]
Size = Literal["small", "coco"]
_BENCHES: dict[What, Callable[[Size, torch.device, Callable[[str], None]], BenchResult]] = {
    "scoring": bench_scoring,
    "training": bench_training,
    "metrics": bench_metrics,
}


def run_bench(
    what: What, *, device: torch.device, size: Size | None = None, say: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """One benchmark. Without a size it is ``coco`` on a GPU and ``small`` elsewhere, and always for metrics.

    ``say`` is told what is being timed.
    """
    full = device.type == "cuda" and what != "metrics"
    return _BENCHES[what](size or ("coco" if full else "small"), device, say)
