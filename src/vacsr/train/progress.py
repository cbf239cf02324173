"""What a person sees while training: on a terminal a bar with time left and loss terms, elsewhere a line an epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class PhotoProgress:
    """A bar over photos on stderr, called with how many of how many are done."""

    def __init__(self, label: str, *, show: bool) -> None:
        console = Console(stderr=True, quiet=not show)
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not (show and sys.stderr.isatty()))
        self.task = self.bar.add_task(label, total=None)

    def __enter__(self) -> PhotoProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def named(self, label: str) -> PhotoProgress:
        """Go on under another name."""
        self.bar.update(self.task, description=label, completed=0, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)


class TrainProgress:
    """Progress on stderr; silent when asked."""

    def __init__(self, label: str, *, total: int, done: int, show: bool) -> None:
        self.console = Console(stderr=True, quiet=not show)
        self.show, self.label = show, label
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[terms]}"),
            console=self.console,
            transient=True,
            disable=not (show and sys.stderr.isatty()),
        )
        self.task = self.bar.add_task(label, total=total, completed=done, terms="")

    def __enter__(self) -> TrainProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self) -> None:
        """One step done."""
        self.bar.advance(self.task)

    def terms(self, values: Mapping[str, float]) -> None:
        """Show the newest figures behind the bar."""
        text = " ".join(f"{name} {value:.3g}" for name, value in values.items())
        self.bar.update(self.task, terms=text)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(f"{self.label}: {line}", highlight=False, soft_wrap=True)
