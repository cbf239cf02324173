"""What a person sees while the demo runs: a bar for each method on a terminal, elsewhere a plain line an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from vacsr.demo.training import Progress as MethodProgress
from vacsr.progress import Bars


class DemoProgress(Bars):
    """One display on stderr for the whole demo."""

    def __init__(self, methods: Sequence[str]) -> None:
        super().__init__(keep=True)
        self.tasks = {name: self.bar.add_task(name, total=None, start=False, note="") for name in methods}

    def listen(self, name: str, progress: MethodProgress) -> None:
        """A method has come further."""
        task = self.tasks[name]
        self.bar.start_task(task)
        self.bar.update(task, completed=progress.step, total=progress.steps)
        if progress.rate is None:
            return
        rsum = "" if progress.dev_rsum is None else f"dev RSUM {progress.dev_rsum:.1f}"
        self.bar.update(task, note=rsum)
        if self.bar.disable:
            shown = f", {rsum}" if rsum else ""
            self.say(f"{name}: epoch {progress.epoch}/{progress.epochs}{shown}, {progress.rate:.1f} steps/s")
