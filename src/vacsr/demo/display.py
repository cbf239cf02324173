"""What a person sees while the demo runs: a line for each method on a terminal, elsewhere a plain line an epoch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vacsr.demo.training import Progress as MethodProgress


class DemoProgress:
    """One display on stderr for the whole demo."""

    def __init__(self, methods: Sequence[str]) -> None:
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not sys.stderr.isatty(),
        )
        self.tasks = {name: self.bar.add_task(name, total=None, start=False, note="") for name in methods}

    def __enter__(self) -> DemoProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, soft_wrap=True)

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
