"""Triton kernels as operators of torch. Import a module of this package only where it runs: Triton is optional.

They are ``torch.library.custom_op``, not ``triton_op``: torch.compile would trace through a triton_op, which neither
Triton's interpreter nor Hopper's TMA descriptors, which need a tensor's address, can follow. Opaque operators run
eagerly, under torch.compile, in CUDA graphs and in the interpreter (TRITON_INTERPRET=1). Triton launches on the current
GPU, whichever the tensors are on, hence ``torch.cuda.device_of``.
"""

from __future__ import annotations

import importlib.util
import os

import torch

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on any device, slowly; it must be asked for before Triton is imported."""


def available(device: torch.device) -> bool:
    """Can the kernels run on tensors of this device?"""
    return TRITON and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))


def has_gluon() -> bool:
    """Can Triton compile :mod:`vacsr.kernels.hopper`? Gluon is experimental: only versions that we have tried count."""
    if not TRITON:
        return False
    import triton

    return (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 7)
