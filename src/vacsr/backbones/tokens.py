"""What a tower gives for one batch: a vector per token, and which of them are real."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """Token vectors of B items, L places each."""

    values: Tensor
    """[B, L, D]"""
    mask: Tensor
    """[B, L] bool, True where the token is real; the real ones need not lie together."""
    summary: Tensor
    """[B] int64, the place of the class or end token, which speaks for the whole."""
    spread: Tensor | None = None
    """[B, L, D] the same tokens after the branch that variances are made from, where the tower has one."""
