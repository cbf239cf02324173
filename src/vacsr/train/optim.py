"""Optimisers with learning rates per group, AdamP among them, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """The scheduler: what the learning rate is multiplied with at an optimiser step.

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


class AdamP(Optimizer):
    """AdamP (Heo et al. 2021) that never waits for the device, so that a CUDA graph can hold it.

    Scale-invariant weights only grow under Adam, which shrinks the effective step. Where the gradient is nearly
    orthogonal to a weight, AdamP takes the weight for scale-invariant: the update u loses its part along the weight,
    and weight decay is softened. With c = 1 − betaᵗ, p <- p − lr·(u/c₁ + decay·p) and u = m / (√(v/c₂) + eps).

    ``lr`` is a number or a 0-d tensor, also per group. ``capturable`` keeps the step counters on the device.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = AdamP([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> round(weight[0, 0].item(), 4)
    0.9
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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; those with the same settings together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets: dict[_Settings, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    settings = _Settings(param.device, param.dtype, *(group[name] for name in _Settings._fields[2:]))
                    buckets.setdefault(settings, []).append((param, group))
        for settings, members in buckets.items():
            if settings.device.type == "cuda" and not settings.capturable and torch.cuda.is_current_stream_capturing():
                raise UsageError("a CUDA graph needs its counters on the device — use AdamP(..., capturable=True)")
            self._update(members, settings)
        return loss

    def _update(self, members: list[tuple[Tensor, dict[str, Any]]], settings: _Settings) -> None:
        params = [param for param, _ in members]
        grads = [param.grad for param in params if param.grad is not None]
        states = [self._state(param, settings.capturable) for param in params]
        steps, first, second = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        beta1, beta2 = settings.betas
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(second)
        torch._foreach_div_(updates, [c**0.5 for c in _bias_corrections(steps, beta2, settings.capturable)])
        torch._foreach_add_(updates, settings.eps)
        updates = torch._foreach_div(first, updates)
        softened = _project(params, grads, updates, settings)
        for (param, group), factor in zip(members, softened, strict=True):
            if group["weight_decay"]:
                param.mul_(1.0 - group["lr"] * group["weight_decay"] * factor)
        corrections = _bias_corrections(steps, beta1, settings.capturable)
        torch._foreach_mul_(updates, [group["lr"] / c for (_, group), c in zip(members, corrections, strict=True)])
        torch._foreach_sub_(params, updates)

    def _state(self, param: Tensor, capturable: bool) -> dict[str, Tensor]:
        """Moments, and a step counter: beside the weights where a graph counts, on the host where Python does."""
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if capturable else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state


class _Settings(NamedTuple):
    """What parameters must share to be updated together."""

    device: torch.device
    dtype: torch.dtype
    betas: tuple[float, float]
    eps: float
    delta: float
    wd_ratio: float
    capturable: bool


def _bias_corrections(steps: Sequence[Tensor], beta: float, capturable: bool) -> list[Any]:
    """1 − betaᵗ for each counter: numbers, or 0-d tensors without the cancellation that float32 suffers at small t."""
    if not capturable:
        return [1.0 - beta ** float(step) for step in steps]
    return [-torch.expm1(step * (math.log(beta) if beta else -math.inf)) for step in steps]


def _project(
    params: Sequence[Tensor], grads: Sequence[Tensor], updates: Sequence[Tensor], settings: _Settings
) -> list[float | Tensor]:
    """Remove from updates, in place, their part along scale-invariant weights; returns each parameter's decay factor.

    A matrix is tested by its rows first, then as a whole, whose sums are sums over its rows. Statistics of rows are
    lists of [R] for all matrices, so that most of the arithmetic is one launch for all of them.
    """
    factors: list[float | Tensor] = [1.0] * len(params)
    matrices = [index for index, param in enumerate(params) if param.dim() > 1]
    if not matrices:
        return factors
    w, g, u = ([tensors[index].flatten(1) for index in matrices] for tensors in (params, grads, updates))
    dots = [torch.linalg.vecdot(x, y) for x, y in zip(g, w, strict=True)]
    parts = [torch.linalg.vecdot(x, y) for x, y in zip(u, w, strict=True)]
    g_norms, w_norms = ([torch.linalg.vector_norm(x, dim=1) for x in tensors] for tensors in (g, w))
    whole = [torch.stack([x.sum() for x in rows]) for rows in (dots, parts)]
    whole += [torch.stack(torch._foreach_norm(rows)) for rows in (g_norms, w_norms)]
    row_cosines = torch._foreach_max(_cosines(dots, g_norms, w_norms, eps=settings.eps))
    torch._foreach_mul_(row_cosines, [math.sqrt(x.shape[1]) for x in w])
    whole_cosines = list(_cosines([whole[0]], [whole[2]], [whole[3]], eps=settings.eps)[0].unbind())
    torch._foreach_mul_(whole_cosines, [math.sqrt(x.numel()) for x in w])
    by_rows, by_whole = (torch.stack(cosines) < settings.delta for cosines in (row_cosines, whole_cosines))
    row_shares = torch._foreach_add(w_norms, settings.eps)
    row_shares = torch._foreach_div(parts, torch._foreach_mul(row_shares, row_shares))
    whole_shares = torch.where(by_whole, whole[1] / (whole[3] + settings.eps).square(), 0.0)
    softened = torch.where(by_rows | by_whole, settings.wd_ratio, 1.0).to(w[0].dtype)
    for number, index in enumerate(matrices):
        share = torch.where(by_rows[number], row_shares[number], whole_shares[number])
        updates[index].addcmul_(share.reshape(-1, *[1] * (params[index].dim() - 1)), params[index], value=-1.0)
        factors[index] = softened[number]
    return factors


def _cosines(dots: list[Tensor], *norms: list[Tensor], eps: float) -> list[Tensor]:
    """|⟨g, w⟩| / (|g|·|w|), for lists of tensors."""
    left, right = (torch._foreach_clamp_min(rows, eps) for rows in norms)
    return list(torch._foreach_div(torch._foreach_abs(dots), list(torch._foreach_mul(left, right))))
