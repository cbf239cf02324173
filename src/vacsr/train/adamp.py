"""AdamP (Heo et al. 2021) in few launches, without asking the device a question, so that a CUDA graph can hold it.

Scale-invariant weights only grow under Adam, which shrinks the effective step. AdamP looks at the gradient: where it
is nearly orthogonal to the weight, the weight is taken for scale-invariant, the update loses its part along the
weight, and weight decay is softened. Written as one rule with u = Adam's update, s = step size, k = pull:

    p <- p - s · (u + k·p),   k = decay - <p, u> / |p|²  where it fires,   k = decay  elsewhere

Moments are updated by `torch._foreach_*` over all parameters; everything with rows is stacked by shape, since the
blocks of a tower (and of two towers) are equal: a bucket costs the launches of one parameter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vacsr.errors import UsageError

_ON_CPU, _ON_GPU = 2**18, 2**25  # numbers stacked at once


_VECTORS = torch.Size()
"""Stands for all shapes without rows."""
_WORTH_COMPILING = 1 << 18


class _Rule(NamedTuple):
    """What parameters must share to be updated together."""

    device: torch.device
    dtype: torch.dtype
    betas: tuple[float, float]
    eps: float
    delta: float
    wd_ratio: float
    capturable: bool
    compiled: bool


class _Entry(NamedTuple):
    """One parameter with what its step needs."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    lr: float | Tensor
    weight_decay: float


class _Scales(NamedTuple):
    """Numbers per parameter, each [n, 1, 1]: bias corrections are folded in, so that no pass over weights does them."""

    step: Tensor
    """lr · √c₂ / c₁, where c = 1 - betaᵗ."""
    eps: Tensor
    """eps · √c₂."""
    decay: Tensor
    """weight decay · c₁ / √c₂: times ``step`` it is lr · weight decay."""

    def part(self, start: int, count: int) -> _Scales:
        return _Scales(*(column[start : start + count] for column in self))


class AdamP(Optimizer):
    """Adam with projected updates and decoupled weight decay; parameters without a gradient are left alone.

    ``lr`` is a number or a 0-d tensor, also per group; a captured step sees later changes of a tensor on the
    parameters' device. ``capturable`` keeps the step counters on that device; ``compiled`` hands the arithmetic to
    torch.compile, which pays on a GPU.

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
        compiled: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "capturable": capturable,
            "compiled": compiled,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; half precision is refused, because small updates vanish in it."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"AdamP updates float32 weights, not {param.dtype} — keep the weights in float32")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Counters may come from another device, or, from the `adamp` package, as plain numbers."""
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                if "step" in (entries := self.state.get(param, {})):
                    counter = _counter(param, group["capturable"])
                    entries["step"] = counter.copy_(torch.as_tensor(entries["step"]))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        together: dict[_Rule, list[_Entry]] = {}
        for rule, entry in self._entries():
            together.setdefault(rule, []).append(entry)
        for rule, entries in together.items():
            _update(entries, rule)
        return loss

    def _entries(self) -> Iterator[tuple[_Rule, _Entry]]:
        for group in self.param_groups:
            rest = (tuple(group["betas"]), *(group[name] for name in _Rule._fields[3:]))
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise UsageError("AdamP was given a sparse gradient — make the embedding with sparse=False")
                state = self.state[param]
                if not state:
                    state["step"] = _counter(param, group["capturable"])
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                entry = _Entry(param, param.grad, state, group["lr"], group["weight_decay"])
                yield _Rule(param.device, param.dtype, *rest), entry


def _counter(param: Tensor, capturable: bool) -> Tensor:
    """A 0-d step counter: beside the weights where a graph counts, on the host where python does."""
    return torch.zeros((), dtype=torch.float32, device=param.device if capturable else "cpu")


def _update(entries: Sequence[_Entry], rule: _Rule) -> None:
    """One step for all parameters of a rule: moments as lists, the rest by buckets of equal shape."""
    if rule.device.type == "cuda" and not rule.capturable and torch.cuda.is_current_stream_capturing():
        raise UsageError("a CUDA graph cannot hold counters on the host — make it with AdamP(..., capturable=True)")
    buckets: dict[torch.Size, list[_Entry]] = {}
    for entry in entries:
        buckets.setdefault(entry.param.shape if entry.param.dim() > 1 else _VECTORS, []).append(entry)
    ordered = [entry for bucket in buckets.values() for entry in bucket]
    grads, first = [e.grad for e in ordered], [e.state["exp_avg"] for e in ordered]
    second, counters = [e.state["exp_avg_sq"] for e in ordered], [e.state["step"] for e in ordered]
    torch._foreach_add_(counters, 1)
    torch._foreach_lerp_(first, grads, 1 - rule.betas[0])
    torch._foreach_mul_(second, rule.betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - rule.betas[1])
    scales, start = _scales(ordered, rule), 0
    for shape, bucket in buckets.items():
        for part in [bucket] if shape == _VECTORS else _parts(bucket):
            update = _update_vectors if shape == _VECTORS else _update_matrices
            update(part, rule, scales.part(start, len(part)))
            start += len(part)


def _parts(bucket: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """A bucket in handfuls: a GPU wants few launches, a CPU memory that is in its cache and need not be asked for."""
    param = bucket[0].param
    handful = max(1, (_ON_CPU if param.device.type == "cpu" else _ON_GPU) // max(1, param.numel()))
    return (bucket[start : start + handful] for start in range(0, len(bucket), handful))


def _update_vectors(bucket: Sequence[_Entry], rule: _Rule, scales: _Scales) -> None:
    """Vectors and scalars of any length end to end: nothing is projected, so all take one set of launches."""
    counts = tuple(e.param.numel() for e in bucket)
    owner = _owners(counts, rule.device)
    each = _Scales(*(column.flatten()[owner] for column in scales))
    kept = ([e.param for e in bucket], *([e.state[name] for e in bucket] for name in ("exp_avg", "exp_avg_sq")))
    weight, first, second = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in kept)
    change = _change(weight, None, first, second, each, rule)
    parts = zip(torch.split(change, list(counts)), kept[0], strict=True)
    torch._foreach_add_(kept[0], [part.view_as(param) for part, param in parts])


@lru_cache(maxsize=16)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which parameter each number belongs to. Kept: while a graph is captured nothing may come from the host."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)


def _update_matrices(bucket: Sequence[_Entry], rule: _Rule, scales: _Scales) -> None:
    """p <- p - step · (u + pull · p) for parameters of one shape."""
    params = [e.param for e in bucket]
    weight, grad = _rows(params), _rows([e.grad for e in bucket])
    first, second = (_rows([e.state[name] for e in bucket]) for name in ("exp_avg", "exp_avg_sq"))
    work = _compiled_change() if rule.compiled and weight.numel() >= _WORTH_COMPILING else _change
    change = work(weight, grad, first, second, scales, rule)
    torch._foreach_add_(params, [u.view_as(p) for u, p in zip(change.unbind(), params, strict=True)])


def _change(weight: Tensor, grad: Tensor | None, first: Tensor, second: Tensor, scales: _Scales, rule: _Rule) -> Tensor:
    """What is added to the weights; ``grad`` None leaves out the projection. All of one shape, such as [n, R, C]."""
    update = first / (second.sqrt() + scales.eps)
    pull = scales.decay
    if grad is not None:
        pull = _projected_pull(weight, grad, update=update, decay=pull, rule=rule)
    return (update + weight * pull) * -scales.step


@cache
def _compiled_change() -> Callable[..., Tensor]:
    """A few passes over the weights instead of two dozen; one compilation serves all shapes of a kind.

    Where the compiler gives up it is done uncompiled: the moments have moved already, so the step must end.
    """
    works = [torch.compile(_change, dynamic=True)]

    def change(*args: Any) -> Tensor:
        try:
            return works[0](*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"torch.compile gave up on AdamP ({first}); it goes on uncompiled", stacklevel=2)
            works[0] = _change
            return _change(*args)

    return change


def _projected_pull(weight: Tensor, grad: Tensor, *, update: Tensor, decay: Tensor, rule: _Rule) -> Tensor:
    """What of the weight goes into its update: [n, R, C] three times and decay [n, 1, 1] -> [n, R, 1].

    Rows (channels) are tested first, then the whole (layer), whose sums are sums over rows.
    """
    along = (grad * weight).sum(-1, keepdim=True)
    push = (update * weight).sum(-1, keepdim=True)
    lengths = [torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (grad, weight)]
    by_row = _fires(along, *lengths, size=weight.shape[-1], rule=rule)
    row_part = push / (lengths[1] + rule.eps).square()
    along, push = along.sum(1, keepdim=True), push.sum(1, keepdim=True)
    lengths = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in lengths]
    by_layer = _fires(along, *lengths, size=weight[0].numel(), rule=rule)
    layer_part = push / (lengths[1] + rule.eps).square()
    softened = torch.where(by_row | by_layer, decay * rule.wd_ratio, decay)
    return softened - torch.where(by_row, row_part, torch.where(by_layer, layer_part, 0.0))


def _fires(along: Tensor, grad_length: Tensor, weight_length: Tensor, *, size: int, rule: _Rule) -> Tensor:
    """Is the largest |cosine| of a parameter below delta/√size? [n, R, 1] -> [n, 1, 1]"""
    cosine = along.abs() / (grad_length.clamp_min(rule.eps) * weight_length.clamp_min(rule.eps))
    return cosine.amax(1, keepdim=True) < rule.delta / math.sqrt(size)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Equal shapes [R, ...] as [n, R, C]; a single one is not copied: read only."""
    stacked = torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return stacked.reshape(len(tensors), tensors[0].shape[0], -1)


def _scales(entries: Sequence[_Entry], rule: _Rule) -> _Scales:
    counters = [e.state["step"] for e in entries]
    steps = torch.stack(counters) if rule.capturable else _send(torch.stack(counters), rule.device)
    first, second = (_bias_correction(steps, beta) for beta in rule.betas)
    root = second.sqrt()
    lr = _column([e.lr for e in entries], rule)
    decay = _column([e.weight_decay for e in entries], rule)
    columns = (lr * root / first, rule.eps * root, decay * first / root)
    return _Scales(*(column.to(rule.dtype)[:, None, None] for column in columns))


def _bias_correction(steps: Tensor, beta: float) -> Tensor:
    """1 - betaᵗ without the cancellation that float32 suffers at small t: [n] -> [n]"""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


def _column(values: Sequence[float | Tensor], rule: _Rule) -> Tensor:
    """One number per parameter: [n]. Filled on the device where a graph may be captured, sent over otherwise."""
    if not rule.capturable and not any(isinstance(value, Tensor) for value in values):
        return _send(torch.tensor(values, dtype=torch.float32), rule.device)
    made = {
        value: torch.full((), value, dtype=torch.float32, device=rule.device)
        for value in {value for value in values if not isinstance(value, Tensor)}
    }
    return torch.stack([v.to(rule.device, torch.float32) if isinstance(v, Tensor) else made[v] for v in values])


def _send(host: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
