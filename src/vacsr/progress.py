"""Progress on stderr: bars with the time left on a terminal, otherwise only the lines that stay."""

import sys
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """Bars on stderr while the context is open: name, count, elapsed time, time left and a note."""

    def __init__(self, *, show: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not show)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=self.console, transient=True, disable=not (show and sys.stderr.isatty()),
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def steps(self, label: str, *, total: int) -> Callable[[str], None]:
        """A bar over steps. Call what it returns with the name of each step as it starts; with no bar it prints it."""
        names: list[str] = []
        task = self.bar.add_task(label, total=total, note="")

        def start(name: str) -> None:
            self.bar.update(task, completed=len(names), note=name)
            names.append(name)
            if self.bar.disable:
                self.say(f"{label}: step {len(names)} of {total}, {name}")

        return start


class PhotoProgress(Bars):
    """A bar over photos; call it with the number done and the total."""

    def __init__(self, label: str, *, show: bool) -> None:
        super().__init__(show=show)
        self._label, self._counts = label, dict[str, str]()
        self.task = self.bar.add_task(label, total=None, note="")

    def named(self, label: str) -> Self:
        """Start again from 0 under another name."""
        self._label = label
        self.bar.update(self.task, description=label, completed=0, total=None)
        return self

    @property
    def done(self) -> str:
        """What was done so far, under every name; empty if nothing was."""
        return " and ".join(self._counts.values())

    def __call__(self, done: int, total: int) -> None:
        self._counts[self._label] = f"{done:,} of {total:,} {self._label}"
        self.bar.update(self.task, completed=done, total=total)
