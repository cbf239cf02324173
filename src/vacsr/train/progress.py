"""What a person sees while a command works: on a terminal bars with the time left, elsewhere only lines that stay."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from typing import Self


class Bars:
    """Bars on stderr between ``with`` and its end. Each has a name, a share done and the time left.

    ``timed`` adds the time gone by and a note behind every bar; ``keep`` leaves the bars on the screen at the end.
    """

    def __init__(self, *, show: bool = True, timed: bool = False, keep: bool = False) -> None:
        self.console = Console(stderr=True, quiet=not show)
        bar = BarColumn(bar_width=30 if timed else 40)
        columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}"), bar, MofNCompleteColumn()]
        if timed:
            note = TextColumn("{task.fields[note]}")
            columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), note]
        else:
            columns.append(TimeRemainingColumn())
        hidden = not (show and sys.stderr.isatty())
        self.bar = Progress(*columns, console=self.console, transient=not keep, disable=hidden)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class PhotoProgress(Bars):
    """A bar over photos, called with how many of how many are done."""

    def __init__(self, label: str, *, show: bool) -> None:
        super().__init__(show=show)
        self.task = self.bar.add_task(label, total=None)

    def named(self, label: str) -> PhotoProgress:
        """Go on under another name."""
        self.bar.update(self.task, description=label, completed=0, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)


class TrainProgress(Bars):
    """A bar over steps with the newest loss terms behind it; silent when asked."""

    def __init__(self, label: str, *, total: int, done: int, show: bool) -> None:
        super().__init__(show=show, timed=True)
        self.show, self.label = show, label
        self.task = self.bar.add_task(label, total=total, completed=done, note="")

    def advance(self) -> None:
        """One step done."""
        self.bar.advance(self.task)

    def terms(self, values: Mapping[str, float]) -> None:
        """Show the newest figures behind the bar."""
        self.bar.update(self.task, note=" ".join(f"{name} {value:.3g}" for name, value in values.items()))

    def say(self, line: str) -> None:
        """A line that stays, under the run's name."""
        super().say(f"{self.label}: {line}")
