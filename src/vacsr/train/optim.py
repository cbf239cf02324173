"""Optimisers with learning rates per group, AdamP among them, and the learning-rate schedule as a pure function."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
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


_STACKED = 1 << 25  # numbers that AdamP stacks at once
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
        self.large_change: Callable[..., Tensor] = torch.compile(_change, dynamic=True) if compiled else _change
        # capturable: a state that is loaded keeps its step counters beside the weights.
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "capturable": True})

    def uncompile(self) -> None:
        """Go on without the compiler."""
        self.large_change = _change

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Those of one shape are stacked, as the blocks of a tower are."""
        members = [
            (p.shape, group["weight_decay"], p, group["lr"]) for group in self.param_groups for p in group["params"]
        ]
        members = sorted((member for member in members if member[2].grad is not None), key=itemgetter(0, 1))
        params, rates = [member[2] for member in members], [member[3] for member in members]
        for p in params:
            if not self.state[p]:
                moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        grads = [p.grad for p in params]
        steps, first, second = ([self.state[p][name] for p in params] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, grads, 1 - self.betas[0])
        torch._foreach_mul_(second, self.betas[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - self.betas[1])
        t = torch.stack(steps).double()
        lr = torch.stack([rate.to(t) if isinstance(rate, Tensor) else t.new_full((), rate) for rate in rates])
        scales = torch.stack([lr, *(1.0 - torch.pow(beta, t) for beta in self.betas)])
        scales = scales.to(params[0].dtype)[:, :, None, None]  # [3, n, 1, 1]
        for (shape, decay), equal in groupby(range(len(members)), lambda row: members[row][:2]):
            rows, most = list(equal), max(1, _STACKED // max(1, shape.numel()))
            for part in (slice(start, min(start + most, rows[-1] + 1)) for start in rows[::most]):
                stacks = [_stacked(tensors[part]) for tensors in (params, grads, first, second)]
                change: Callable[..., Tensor] = _change if stacks[0].numel() < _WORTH_COMPILING else self.large_change
                update = change(*stacks, scales[:, part], project=len(shape) > 1, weight_decay=decay, **self.settings)
                torch._foreach_sub_(params[part], [x.view(shape) for x in update.unbind()])


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Equal shapes [R, ...] as [n, R, C], vectors as [n, 1, C]; a single one is not copied."""
    whole = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return whole.reshape(len(tensors), tensors[0].shape[0] if tensors[0].ndim > 1 else 1, -1)


def _change(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, scales: Tensor,
    *, project: bool, eps: float, weight_decay: float, delta: float, wd_ratio: float,
) -> Tensor:  # fmt: skip
    """What to subtract from the weights. Weights, gradients, moments [n, R, C], scales [3, n, 1, 1] -> [n, R, C]

    A matrix is tested for scale invariance by its rows first, then as a whole.
    """
    lr, c1, c2 = scales.unbind()
    u = m / v.sqrt().add_(eps * c2.sqrt())  # √c₂ of it is in the step size: fewer passes over the weights
    size, pull = lr * c2.sqrt() / c1, lr * weight_decay
    if project:
        products = [(x * w).sum(2, keepdim=True) for x in (g, u)]
        norms = [torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in (g, w)]
        by_row, row_share = _invariant(*products, *norms, limit=delta / math.sqrt(w.shape[2]), eps=eps)
        products = [x.sum(1, keepdim=True) for x in products]
        norms = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in norms]
        limit = delta / math.sqrt(w.shape[1] * w.shape[2])
        by_layer, layer_share = _invariant(*products, *norms, limit=limit, eps=eps)
        along = torch.where(by_row, row_share, torch.where(by_layer, layer_share, 0.0))
        pull = torch.where(by_row | by_layer, pull * wd_ratio, pull) - size * along
    return (w * pull).addcmul_(u, size)


def _invariant(
    gw: Tensor, uw: Tensor, g_norm: Tensor, w_norm: Tensor, *, limit: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Which weights are scale-invariant, and how much of its weight each update holds. -> [n, 1, 1], [n, R or 1, 1]"""
    cosine = (gw.abs() / (g_norm.clamp_min(eps) * w_norm.clamp_min(eps))).amax(1, keepdim=True)
    return cosine < limit, uw / (w_norm + eps).square()
