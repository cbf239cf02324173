"""Ctrl-C as a request: the step in hand is finished and saved before the run stops. A second Ctrl-C stops at once."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """``asked`` becomes True at the first SIGINT or SIGTERM; outside the main thread nothing is caught."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not (number == signal.SIGTERM and multiprocessing.parent_process() is not None):
            raise KeyboardInterrupt
        # A worker may be told twice of one wish, by its parent and by who ends all processes. It can still be killed.
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
