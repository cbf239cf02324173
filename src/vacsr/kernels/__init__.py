"""Triton kernels. Import a module of this package only where it runs: everything else works without Triton."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on any device, slowly; it must be asked for before Triton is imported."""


def available(device: torch.device) -> bool:
    """Can the kernels run on tensors of this device?"""
    return TRITON and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))


def current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches kernels on the current GPU, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
