"""Optimisers with learning rates per group, AdamP among them, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vacsr.config import TrainConfig
from vacsr.methods.base import ParamGroup


def build_optimizer(
    groups: Sequence[ParamGroup], name: str, *, lr: float, weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999), momentum: float = 0.0, capturable: bool = False, compiled: bool = False,
) -> Optimizer:  # fmt: skip
    """``adamw``, ``adamp`` or ``sgd`` over the groups; each keeps its ``lr_scale``.

    ``capturable`` is what a CUDA graph needs: the rates are tensors, so that a captured step sees later changes.
    ``compiled`` leaves AdamP's arithmetic to torch.compile.
    """
    device = groups[0].params[0].device
    tensors = capturable or name == "adamp"
    options: list[dict[str, Any]] = [
        {
            "params": group.params,
            "name": group.name,
            "lr_scale": group.lr_scale,
            "weight_decay": weight_decay if group.decay else 0.0,
            "lr": torch.tensor(lr * group.lr_scale, device=device) if tensors else lr * group.lr_scale,
        }
        for group in groups
    ]
    if name == "sgd":
        return torch.optim.SGD(options, lr=lr, momentum=momentum)
    if name == "adamp":
        return AdamP(options, lr=lr, betas=betas, compiled=compiled)
    return torch.optim.AdamW(options, lr=lr, betas=betas, capturable=capturable, fused=device.type == "cuda")


def set_learning_rate(optimizer: Optimizer, base: float) -> None:
    """Give every group base × its scale; where the rate has not changed, this costs nothing."""
    if optimizer.defaults.get("base_lr") == base:
        return
    optimizer.defaults["base_lr"] = base
    for group in optimizer.param_groups:
        value = base * group["lr_scale"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def lr_factor(step: int, *, steps_per_epoch: int, config: TrainConfig) -> float:
    """The scheduler: what the learning rate is multiplied with at an optimiser step."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return warm
    if config.schedule == "step":
        return warm * (config.decay if step // steps_per_epoch >= round(config.decay_at * config.epochs) else 1.0)
    total = max(1, config.epochs * steps_per_epoch - config.warmup_steps)
    done = min(max(0, step - config.warmup_steps) / total, 1.0)
    return warm * 0.5 * (1.0 + math.cos(math.pi * done))


_NUMBERS = 1 << 25  # stacked at once by AdamP
_WORTH_COMPILING = 1 << 18


class AdamP(Optimizer):
    """AdamP (Heo et al. 2021) that never waits for the device, so that a CUDA graph can hold it.

    Scale-invariant weights only grow under Adam, which shrinks the effective step. Where the gradient is nearly
    orthogonal to a weight, AdamP takes the weight for scale-invariant: the update u loses its part along the weight,
    and weight decay is softened. With c = 1 − betaᵗ, p <- p − lr·(u/c₁ + decay·p) and u = m / (√(v/c₂) + eps).

    ``lr`` is a number or a 0-d tensor on the device, which a captured step reads; groups may differ in it and in
    ``weight_decay``. ``compiled`` hands the arithmetic on large weights to torch.compile: 2% of a CLIP step.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, delta: float = 0.1, wd_ratio: float = 0.1, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.betas, self.settings = betas, {"eps": eps, "delta": delta, "wd_ratio": wd_ratio}
        self.compiled = torch.compile(_change, dynamic=True) if compiled else None
        # capturable: a state that is loaded keeps its step counters beside the weights.
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "capturable": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Those of one shape are stacked, as the blocks of a tower are."""
        members = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not members:
            return
        members.sort(key=_stack_of)
        params, grads = [param for param, _ in members], [param.grad for param, _ in members]
        for param in params:
            if not self.state[param]:
                moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                self.state[param] = {"step": torch.zeros((), device=param.device), **moments}
        steps, first, second = (
            [self.state[param][name] for param in params] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, grads, 1 - self.betas[0])
        torch._foreach_mul_(second, self.betas[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - self.betas[1])
        t = torch.stack(steps).double()
        rates = [lr.to(t) if isinstance(lr := group["lr"], Tensor) else t.new_full((), lr) for _, group in members]
        scales = torch.stack([torch.stack(rates), *(1.0 - torch.pow(beta, t) for beta in self.betas)])
        scales = scales.to(params[0].dtype)[:, :, None, None]  # [3, n, 1, 1]
        for (shape, weight_decay), rows in groupby(range(len(members)), lambda row: _stack_of(members[row])):
            every, most = list(rows), max(1, _NUMBERS // max(1, shape.numel()))
            for part in (slice(start, min(start + most, every[-1] + 1)) for start in every[::most]):
                stacks = [_stacked(tensors[part]) for tensors in (params, grads, first, second)]
                change = self._change(*stacks, scales[:, part], project=len(shape) > 1, weight_decay=weight_decay)
                torch._foreach_sub_(params[part], [x.view(shape) for x in change.unbind()])

    def _change(self, w: Tensor, *tensors: Tensor, project: bool, weight_decay: float) -> Tensor:
        """Compiled where that pays. If it fails, the moments have moved already, so the step ends without it."""
        options: dict[str, Any] = {"project": project, "weight_decay": weight_decay, **self.settings}
        if self.compiled is not None and w.numel() >= _WORTH_COMPILING:
            try:
                return self.compiled(w, *tensors, **options)
            except torch._dynamo.exc.TorchDynamoException as error:
                message = f"torch.compile failed on AdamP ({first_line(error)}); it continues uncompiled"
                warnings.warn(message, stacklevel=2)
                self.compiled = None
        return _change(w, *tensors, **options)


def _stack_of(member: tuple[Tensor, dict[str, Any]]) -> tuple[torch.Size, float]:
    """What a parameter and its group must share with others to be updated together with them."""
    return member[0].shape, member[1]["weight_decay"]


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Equal shapes [R, ...] as [n, R, C], vectors as [n, 1, C]; a single one is not copied."""
    whole = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return whole.reshape(len(tensors), tensors[0].shape[0] if tensors[0].ndim > 1 else 1, -1)


def _change(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, scales: Tensor,
    *, project: bool, eps: float, weight_decay: float, delta: float, wd_ratio: float,
) -> Tensor:  # fmt: skip
    """What to subtract from the weights. Weights, gradients, moments [n, R, C], scales [3, n, 1, 1] -> [n, R, C]"""
    lr, c1, c2 = scales.unbind()
    u = m / v.sqrt().add_(eps * c2.sqrt())  # √c₂ of it is in the step size: fewer passes over the weights
    size, pull = lr * c2.sqrt() / c1, lr * weight_decay
    if project:
        along, invariant = _projection(w, g, u, eps=eps, delta=delta)
        pull = torch.where(invariant, pull * wd_ratio, pull) - size * along
    return (w * pull).addcmul_(u, size)


def _projection(w: Tensor, g: Tensor, u: Tensor, *, eps: float, delta: float) -> tuple[Tensor, Tensor]:
    """How much of its weight each update holds, where the weight is scale-invariant, and which weights are.

    A matrix is tested by its rows first, then as a whole. [n, R, C] -> [n, R, 1], [n, 1, 1]
    """

    def test(dot: Tensor, part: Tensor, g_norm: Tensor, w_norm: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
        cosine = (dot.abs() / (g_norm.clamp_min(eps) * w_norm.clamp_min(eps))).amax(1, keepdim=True)
        return cosine < delta / math.sqrt(size), part / (w_norm + eps).square()

    products = [(x * w).sum(2, keepdim=True) for x in (g, u)]
    norms = [torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in (g, w)]
    by_row, row_share = test(*products, *norms, size=w.shape[2])
    products = [x.sum(1, keepdim=True) for x in products]
    norms = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in norms]
    by_layer, layer_share = test(*products, *norms, size=w.shape[1] * w.shape[2])
    return torch.where(by_row, row_share, torch.where(by_layer, layer_share, 0.0)), by_row | by_layer


def first_line(error: Exception) -> str:
    """Of an error's message; the compiler's are pages long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
