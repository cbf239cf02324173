"""Optimisers with learning rates per group, and the schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from vacsr.config import TrainConfig
from vacsr.methods.base import ParamGroup
from vacsr.train.adamp import AdamP


def build_optimizer(groups: Sequence[ParamGroup], config: TrainConfig, *, capturable: bool = False) -> Optimizer:
    """AdamW or AdamP over the groups; each keeps its ``lr_scale``. ``capturable`` is what a CUDA graph needs."""
    options: list[dict[str, Any]] = [
        {
            "params": group.params,
            "name": group.name,
            "lr_scale": group.lr_scale,
            "weight_decay": config.weight_decay if group.decay else 0.0,
            "lr": _rate(config.lr * group.lr_scale, group.params[0].device, capturable),
        }
        for group in groups
    ]
    cuda = groups[0].params[0].device.type == "cuda"
    if config.optimizer == "adamp":
        compiled = config.compile is True or (config.compile == "auto" and cuda)
        return AdamP(options, lr=config.lr, betas=config.betas, capturable=capturable, compiled=compiled)
    return torch.optim.AdamW(options, lr=config.lr, betas=config.betas, capturable=capturable, fused=cuda)


def _rate(lr: float, device: torch.device, capturable: bool) -> float | torch.Tensor:
    """A tensor where a captured step must see later changes."""
    return torch.tensor(lr, device=device) if capturable else lr


def lr_factor(step: int, *, steps_per_epoch: int, config: TrainConfig) -> float:
    """What the learning rate is multiplied with at an optimiser step.

    >>> config = TrainConfig(epochs=20, schedule="step", decay_at=0.6)
    >>> [lr_factor(epoch * 10, steps_per_epoch=10, config=config) for epoch in (0, 11, 12)]
    [1.0, 1.0, 0.1]
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return warm
    if config.schedule == "step":
        return warm * (config.decay if step // steps_per_epoch >= round(config.decay_at * config.epochs) else 1.0)
    total = max(1, config.epochs * steps_per_epoch - config.warmup_steps)
    done = min(max(0, step - config.warmup_steps) / total, 1.0)
    return warm * 0.5 * (1.0 + math.cos(math.pi * done))


def set_learning_rate(optimizer: Optimizer, base: float) -> None:
    """Give every group base × its own scale; rates that stay as they are cost nothing."""
    if optimizer.defaults.get("base_lr") == base:
        return
    optimizer.defaults["base_lr"] = base
    for group in optimizer.param_groups:
        value = base * group["lr_scale"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
