"""What is worked out once and kept: a training asks for the same classes in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The last value, for as long as it is asked for by the same key. One is enough: tests take class lists in turn.

    >>> lengths = Kept[int]()
    >>> lengths.of("cat", lambda: 3), lengths.of("cat", lambda: 4), lengths.of("night heron", lambda: 11)
    (3, 3, 11)
    """

    def __init__(self) -> None:
        self._last: tuple[object, Value] | None = None

    def of(self, key: object, make: Callable[[], Value]) -> Value:
        """What ``make`` gave when this key was new: without gradient, but fit for one that is taken later."""
        if self._last is None or self._last[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._last = key, make()
        return self._last[1]
