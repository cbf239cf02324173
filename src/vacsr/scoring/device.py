"""Where models run."""

from __future__ import annotations

import torch

from vacsr.errors import EnvironmentProblem, UsageError


def choose_device(name: str | torch.device) -> torch.device:
    """``auto`` takes CUDA where present; asking for CUDA without one is an error that says so."""
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"no device '{name}' — use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not one vacsr runs on — use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("this torch sees no CUDA GPU — use device=cpu, or see: vacsr doctor")
    return device
