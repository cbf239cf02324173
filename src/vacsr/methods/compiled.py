"""Compiling a loss over pairs so that it keeps little of each pair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch._functorch.config

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compile_pairs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """torch.compile for one shape at a time, told to keep matrix products for the backward pass and nothing else.

    All other numbers of a pair (draws, variances, KL) follow from these within the kernel that needs them. Left to
    itself the compiler keeps five times as much of a tile in half precision.
    """
    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch._functorch.config.patch(aggressive_recomputation=True):
            return compiled(*args, **kwargs)

    return call
