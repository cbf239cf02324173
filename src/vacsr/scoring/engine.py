"""Which implementation scores a method: the kernel on a GPU, the folded torch path elsewhere, in the arithmetic asked
for or in the fastest."""

from __future__ import annotations

from typing import Literal

import torch

from vacsr.errors import NotFoldable, UsageError
from vacsr.methods.base import Method
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.cpu import fastest_dtype
from vacsr.scoring.folded import BlockScorer

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
    if device.type == "cuda" and chosen != torch.float32:
        from vacsr.scoring.kernel import KernelScorer
        from vacsr.scoring.kernel import choose_scorer as kernel_or_torch

        return KernelScorer(method, dtype=chosen) if chosen == _FP8 else kernel_or_torch(method, dtype=chosen)
    return BlockScorer(method, dtype=chosen)


def resolve_dtype(method: Method, *, device: torch.device, dtype: Precision) -> torch.dtype:
    """What ``auto`` means: bfloat16 on a GPU, the measured fastest on a CPU, float32 where nothing folds."""
    if dtype != "auto":
        return dtype
    if not isinstance(method, Vacsr):
        return torch.float32
    try:
        folded = method.adapter.fold()
    except NotFoldable:
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" else fastest_dtype(folded)
