"""What operators made of Triton kernels share: where they run, and how torch is told of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from vacsr.errors import EnvironmentProblem


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available(device: torch.device | str) -> bool:
    """Can the kernels run on tensors of this device? Interpreted (TRITON_INTERPRET=1) they run anywhere, slowly.

    >>> available("meta")
    False
    """
    kind = torch.device(device).type
    if importlib.util.find_spec("triton") is None or kind not in ("cpu", "cuda"):
        return False
    return kind == "cuda" or interpreted()


def interpreted() -> bool:
    """Is Triton's interpreter asked for?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


def need_kernels(device: torch.device, *, what: str, otherwise: str) -> None:
    """Refuse a device on which the kernels cannot run, before they are imported."""
    if not available(device):
        raise EnvironmentProblem(
            f"the {what} kernels need Triton and a CUDA device, not {device} — run: pip install triton, or {otherwise}"
        )


def current(device: torch.device) -> AbstractContextManager[object]:
    """Triton starts kernels on the current GPU, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Operator(NamedTuple):
    """One operator: what runs, what only tells shapes, and its schema, so that no annotation has to be understood."""

    run: Callable[..., Any]
    fake: Callable[..., Any]
    schema: str


def register(
    name: str, forward: Operator, *, backward: Operator, keep: Callable[..., None], gradient: Callable[..., Any]
) -> None:
    """Make `torch.ops.vacsr.NAME` and `NAME_backward`; the gradient is an operator too, so a compiler leaves it whole.

    ``keep`` saves what ``gradient`` needs, which calls the second operator.
    """
    made = _define(name, forward)
    made.register_autograd(gradient, setup_context=keep)
    _define(f"{name}_backward", backward)


def _define(name: str, operator: Operator) -> Any:
    made = torch.library.custom_op(f"vacsr::{name}", operator.run, mutates_args=(), schema=operator.schema)
    made.register_fake(operator.fake)
    return made
