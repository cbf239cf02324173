"""Numbers of things, as they are asked for."""

from __future__ import annotations

import operator

from vacsr.errors import UsageError


def counted(value: int, name: str, *, ask: str) -> int:
    """A whole number from 1 on, or an error that says what to ask for."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{name} is {value!r}, expected a whole number from 1 on — {ask}")
    return number
