"""What a person sees while an index is being filled."""

from __future__ import annotations

import time

from vacsr.progress import Bars
from vacsr.search.filling import Filled

_LINE_S = 30.0  # between two lines where there is no terminal for a bar


class FillProgress(Bars):
    """A bar with images or texts per second behind it; without a terminal, a line now and then."""

    def __init__(self, *, total: int, kind: str = "images") -> None:
        super().__init__()
        self.kind = kind
        self.task = self.bar.add_task(kind, total=total, note="")
        self.started = self.said = time.monotonic()

    def committed(self, done: Filled) -> None:
        """After a batch is stored."""
        now = time.monotonic()
        rate = f"{done.embedded / max(now - self.started, 1e-9):,.0f} {self.kind}/s"
        self.bar.update(self.task, completed=done.embedded + done.skipped, note=rate)
        if self.bar.disable and now - self.said >= _LINE_S:
            self.said = now
            self.say(f"{done.embedded + done.skipped:,} of {done.of:,} {self.kind}, {rate}")
