"""Optimisers with learning rates per group, AdamP among them, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vacsr.config import TrainConfig
from vacsr.errors import UsageError
from vacsr.methods.base import ParamGroup


def build_optimizer(
    groups: Sequence[ParamGroup],
    name: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float = 0.0,
    capturable: bool = False,
) -> Optimizer:
    """``adamw``, ``adamp`` or ``sgd`` over the groups; each keeps its ``lr_scale``.

    ``capturable`` is what a CUDA graph needs: the rates are tensors, so that a captured step sees later changes.
    """
    device = groups[0].params[0].device
    options: list[dict[str, Any]] = [
        {
            "params": group.params,
            "name": group.name,
            "lr_scale": group.lr_scale,
            "weight_decay": weight_decay if group.decay else 0.0,
            "lr": torch.tensor(lr * group.lr_scale, device=device) if capturable else lr * group.lr_scale,
        }
        for group in groups
    ]
    if name == "sgd":
        return torch.optim.SGD(options, lr=lr, momentum=momentum)
    if name == "adamp":
        return AdamP(options, lr=lr, betas=betas, capturable=capturable)
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


class AdamP(Optimizer):
    """AdamP (Heo et al. 2021) that never waits for the device, so that a CUDA graph can hold it.

    Scale-invariant weights only grow under Adam, which shrinks the effective step. Where the gradient is nearly
    orthogonal to a weight, AdamP takes the weight for scale-invariant: the update u loses its part along the weight,
    and weight decay is softened. With c = 1 − betaᵗ, p <- p − lr·(u/c₁ + decay·p) and u = m / (√(v/c₂) + eps).

    ``lr`` is a number or a 0-d tensor, also per group. ``capturable`` keeps the step counters on the device.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        capturable: bool = False,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, {**adam, "delta": delta, "wd_ratio": wd_ratio})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; half precision is refused, because small updates vanish in it."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"AdamP updates float32 weights, not {param.dtype} — keep the weights in float32")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Those of one shape are stacked, as the blocks of a tower are."""
        stacks: dict[_Stack, list[tuple[Tensor, float | Tensor]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    settings = (group[name] for name in _Stack._fields[3:])
                    stack = _Stack(param.device, param.dtype, param.shape, *settings)
                    stacks.setdefault(stack, []).append((param, group["lr"]))
        for stack, members in stacks.items():
            if stack.device.type == "cuda" and not stack.capturable and torch.cuda.is_current_stream_capturing():
                raise UsageError("a CUDA graph needs its counters on the device — use AdamP(..., capturable=True)")
            most = max(1, _NUMBERS // max(1, stack.shape.numel()))
            for start in range(0, len(members), most):
                self._update(members[start : start + most], stack)

    def _update(self, members: list[tuple[Tensor, float | Tensor]], stack: _Stack) -> None:
        params = [param for param, _ in members]
        grads = [param.grad for param in params if param.grad is not None]
        states = [self._state(param, stack.capturable) for param in params]
        steps, first, second = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, grads, 1 - stack.betas[0])
        torch._foreach_mul_(second, stack.betas[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - stack.betas[1])
        lr, c1, c2 = _scales([lr for _, lr in members], steps, stack)
        w, g, m, v = (_stacked(tensors, stack) for tensors in (params, grads, first, second))
        u = m / v.sqrt().add_(stack.eps * c2.sqrt())  # √c₂ of it is in the step size: fewer passes over the weights
        size, pull = lr * c2.sqrt() / c1, lr * stack.weight_decay
        if len(stack.shape) > 1:
            along, softened = _projection(w, g, u, stack)
            pull = pull * softened - size * along
        change = (w * pull).addcmul_(u, size)
        torch._foreach_sub_(params, [x.view_as(param) for x, param in zip(change.unbind(), params, strict=True)])

    def _state(self, param: Tensor, capturable: bool) -> dict[str, Tensor]:
        """Moments, and a step counter: beside the weights where a graph counts, on the host where Python does."""
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if capturable else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state


class _Stack(NamedTuple):
    """What parameters must share to be updated together."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    delta: float
    wd_ratio: float
    capturable: bool


def _stacked(tensors: list[Tensor], stack: _Stack) -> Tensor:
    """Equal shapes [R, ...] as [n, R, C], vectors as [n, 1, C]; a single one is not copied."""
    whole = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return whole.reshape(len(tensors), stack.shape[0] if len(stack.shape) > 1 else 1, -1)


def _scales(rates: Sequence[float | Tensor], steps: Sequence[Tensor], stack: _Stack) -> Tensor:
    """Learning rate, 1 − beta₁ᵗ and 1 − beta₂ᵗ of each parameter, without waiting for the device. -> [3, n, 1, 1]"""
    if stack.capturable:
        full = [torch.full((), lr, device=stack.device) if isinstance(lr, float) else lr for lr in rates]
        t = torch.stack(list(steps)).to(stack.dtype)
        logs = [math.log(beta) if beta else -math.inf for beta in stack.betas]
        scales = torch.stack([torch.stack(full).to(t), *(-torch.expm1(t * log) for log in logs)])
    else:
        corrections = [[1.0 - beta ** float(step) for step in steps] for beta in stack.betas]
        scales = torch.tensor([[float(lr) for lr in rates], *corrections], dtype=stack.dtype)
        if stack.device.type == "cuda":
            scales = scales.pin_memory().to(stack.device, non_blocking=True)
    return scales[:, :, None, None]


def _projection(w: Tensor, g: Tensor, u: Tensor, stack: _Stack) -> tuple[Tensor, Tensor]:
    """How much of its weight each update holds, where the weight is scale-invariant, and the factor of weight decay.

    A matrix is tested by its rows first, then as a whole. [n, R, C] -> [n, R, 1], [n, 1, 1]
    """
    dot, part = (g * w).sum(2, keepdim=True), (u * w).sum(2, keepdim=True)
    g_norm, w_norm = (torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in (g, w))
    by_row, row_share = _invariance(dot, part, g_norm, w_norm, size=w.shape[2], stack=stack)
    dot, part = dot.sum(1, keepdim=True), part.sum(1, keepdim=True)
    g_norm, w_norm = (torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (g_norm, w_norm))
    by_layer, layer_share = _invariance(dot, part, g_norm, w_norm, size=w[0].numel(), stack=stack)
    softened = torch.where(by_row | by_layer, stack.wd_ratio, 1.0).to(w.dtype)
    return torch.where(by_row, row_share, torch.where(by_layer, layer_share, 0.0)), softened


def _invariance(
    dot: Tensor, part: Tensor, g_norm: Tensor, w_norm: Tensor, *, size: int, stack: _Stack
) -> tuple[Tensor, Tensor]:
    """Is the largest |cos(g, w)| below delta/√size? And ⟨u, w⟩/|w|². [n, R, 1] each -> [n, 1, 1] bool, [n, R, 1]"""
    cosine = dot.abs() / (g_norm.clamp_min(stack.eps) * w_norm.clamp_min(stack.eps))
    return cosine.amax(1, keepdim=True) < stack.delta / math.sqrt(size), part / (w_norm + stack.eps).square()
