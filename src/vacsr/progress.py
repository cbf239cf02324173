"""Progress on stderr: bars with the time left on a terminal, otherwise only the lines that stay."""

from __future__ import annotations

import sys
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
    """Bars on stderr while the context is open. Each has a name, a count and the time left.

    ``timed`` adds the elapsed time and a note behind every bar; ``keep`` leaves the bars on the screen at the end.
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
        """Print a line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class PhotoProgress(Bars):
    """A bar over photos; call it with the number done and the total."""

    def __init__(self, label: str, *, show: bool) -> None:
        super().__init__(show=show)
        self.task = self.bar.add_task(label, total=None)

    def named(self, label: str) -> PhotoProgress:
        """Start again from 0 under another name."""
        self.bar.update(self.task, description=label, completed=0, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)
