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
    """torch.compile for one shape at a time, told to keep matrix products for the backward pass and little else.

    All other numbers of a pair (draws, variances, KL) follow from these within the kernel that needs them. Left to
    itself the compiler keeps five times as much of a tile in half precision. What a hand-written kernel gave is kept
    too where torch has a word for that: to run it again would cost more than to read it.
    """
    compiled = torch.compile(function, dynamic=False)
    wishes = {"aggressive_recomputation": True, "is_non_builtin_to_include": True}
    known = {name: wish for name, wish in wishes.items() if hasattr(torch._functorch.config, name)}

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch._functorch.config.patch(known):
            return compiled(*args, **kwargs)

    return call
