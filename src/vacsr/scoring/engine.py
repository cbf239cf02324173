"""Which implementation scores a method: with the kernel on a GPU that runs it, in plain torch elsewhere.

float32, the default, is float32 everywhere; on a GPU the kernel then only finds what the best may be. In the other
precisions it computes the scores themselves.
"""

from __future__ import annotations

from typing import Literal

import torch

from vacsr.errors import NotFoldable, UsageError
from vacsr.methods.base import Method
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.cpu import fastest_dtype
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel_scorer import KernelScorer, finest_half, kernel_scorer

Precision = torch.dtype | Literal["auto"]
"""Of the large products: ``torch.float32``, ``torch.bfloat16``, ``torch.int8`` on a CPU, or ``"auto"``."""
_FP8 = torch.float8_e4m3fn
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.int8),
    "cuda": (torch.float32, torch.bfloat16, torch.float16, _FP8),
}


def choose_scorer(method: Method, *, device: torch.device, dtype: Precision = torch.float32) -> BlockScorer:
    """The fastest implementation that there is for a method, a device and an arithmetic."""
    chosen = resolve_dtype(method, device=device, dtype=dtype)
    offered = DTYPES.get(device.type, DTYPES["cpu"][:2])
    if chosen not in offered:
        known = ", ".join(str(name) for name in offered)
        raise UsageError(f"no scoring in {chosen} on {device.type} — use 'auto' or one of {known}")
    if device.type == "cuda":
        if chosen == _FP8:
            return KernelScorer(method, dtype=chosen)  # there is no other way: it says what is missing
        return kernel_scorer(method, dtype=chosen) or BlockScorer(method, dtype=chosen)
    return BlockScorer(method, dtype=chosen)


def resolve_dtype(method: Method, *, device: torch.device, dtype: Precision) -> torch.dtype:
    """What ``auto`` means: float16 on a GPU (bfloat16 where it would overflow), the measured fastest on a CPU, float32
    where nothing folds."""
    if dtype != "auto":
        return dtype
    if not isinstance(method, Vacsr):
        return torch.float32
    try:
        folded = method.adapter.fold()
    except NotFoldable:
        return torch.float32
    return finest_half(folded) if device.type == "cuda" else fastest_dtype(folded)
