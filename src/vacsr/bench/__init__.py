"""`vacsr bench`: several ways to the same result, timed in turn in one run, as a table, JSON and a plot.

The scripts of benchmarks/ use the same stopwatch, ways and result.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vacsr.evaluate.report import markdown_table

Cell = str | float | None
Step = Callable[[], object]
Log = Callable[[str], None]


class Prepared(NamedTuple):
    """A way that is ready to be timed."""

    run: Step
    cells: Mapping[str, Any] | None = None  # numbers of its row that are known already
    operations: float | None = None
    warm_up: Step | None = None  # a short call of the same kind, if a whole one takes too long


class Way(NamedTuple):
    """One way to a result: the cells that name its row, and how to prepare it when its turn comes."""

    cells: Mapping[str, Any]
    prepare: Callable[[], Prepared]


def measure(
    ways: Iterable[Way], *, device: torch.device, log: Log = lambda _: None, rounds: int = 9, budget: float = 4.0,
    statistic: Callable[[Sequence[float]], float] = min,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per way: prepare and call each once, then time all in turn. One that fails has a ``problem`` instead.

    Rounds are interleaved, so that a slow spell of the machine affects all ways. The first call of a round warms the
    caches and is timed only if the way is slow; a way stops taking part when it has used ``budget`` seconds. The row's
    ``seconds`` are those of the fastest round, since other load only ever adds time, or another ``statistic``.
    """
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Prepared, list[float]]] = []
    for way in ways:
        log(f"{', '.join(map(str, way.cells.values()))}: first call")
        rows.append(dict(way.cells))
        try:
            ready = way.prepare()
            (ready.warm_up or ready.run)()
            rows[-1] |= ready.cells or {}
            running.append((rows[-1], ready, []))
        except Exception as error:  # one way must not end the run
            rows[-1]["problem"] = describe_error(error)
    log("all of them in turn")
    for row, ready, times in running * rounds:
        if "problem" in row or sum(times) > budget:
            continue
        try:
            took = seconds(ready.run, device=device)
            times.append(seconds(ready.run, device=device) if took < budget / rounds else took)
        except Exception as error:
            row["problem"] = describe_error(error)
    for row, ready, times in running:
        if "problem" not in row:
            row |= {"seconds": statistic(times), "median": statistics.median(times), "rounds": len(times)}
            row |= {} if ready.operations is None else {"tflops": ready.operations / row["seconds"] / 1e12}
    return rows


def seconds_per_step(step: Step, *, device: torch.device, steps: int, groups: int = 1) -> float:
    """The mean over steps that run back to back; the median of several such groups."""
    each = max(1, steps // groups)
    return statistics.median(seconds(step, device=device, calls=each) for _ in range(groups)) / each


def seconds(work: Step, *, device: torch.device, calls: int = 1) -> float:
    """Of all calls together, waiting for the GPU before the first and after the last."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return time.perf_counter() - started


def describe_device(device: torch.device) -> str:
    """The hardware and software that numbers depend on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    count = torch.get_num_threads()
    return f"CPU, {count} thread{'' if count == 1 else 's'}, torch {torch.__version__}"


def describe_error(error: Exception) -> str:
    """For a cell of a table: out of memory, or the first line of the message.

    >>> describe_error(RuntimeError("DefaultCPUAllocator: can't allocate memory")), describe_error(ValueError("a | b"))
    ('out of memory', 'a / b')
    """
    message = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in message:
        return "out of memory"
    return message.splitlines()[0].replace("|", "/")[:200]


@contextmanager
def svg_drawing(inches: tuple[float, float]) -> Iterator[tuple[Any, io.StringIO]]:
    """A figure, and where its SVG is in the end: the same bytes for the same drawing, text as text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9}):
        figure, out = Figure(figsize=inches, layout="constrained"), io.StringIO()
        yield figure, out
        figure.savefig(out, format="svg", metadata={"Date": None})


@dataclass(frozen=True)
class BenchResult:
    """Numbers of several ways, measured in one run."""

    bench: str
    where: str  # GPU or CPU, threads, torch
    settings: Mapping[str, Any]  # sizes of the problem
    rows: Sequence[Mapping[str, Cell]]  # one per way; `way` names it, `problem` says why it has no numbers
    columns: Mapping[str, str]  # keys that the table shows, with their headings
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything but how it is shown, as JSON holds it."""
        known = {"bench": self.bench, "where": self.where, "settings": dict(self.settings)}
        return {"schema": 1, **known, "rows": [dict(row) for row in self.rows], "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A table, the settings under it, and notes. A way without numbers says why beside its name."""
        rules = ["---:" if any(isinstance(row.get(key), float) for row in self.rows) else "---" for key in self.columns]
        rows = []
        for row in self.rows:
            shown = {**row, "way": f"{row['way']} ({row['problem']})"} if row.get("problem") else row
            rows.append([_number(shown.get(key)) for key in self.columns])
        table = markdown_table(list(self.columns.values()), rows, align=rules)
        return "\n".join([table, "", self._settings(), *self.notes])

    def to_svg(self) -> str:
        """The seconds of each way on a logarithmic axis. One that failed says why; one without a time is left out."""
        from vacsr.pages.plots import palette

        rows = [row for row in self.rows if row.get("problem") or row.get("seconds")]
        with svg_drawing((8, 1.8 + 0.3 * len(rows))) as (figure, done):
            figure.suptitle(self.bench)
            axes = figure.subplots()
            axes.set(xscale="log", xlabel="seconds", ylim=(max(len(rows), 1) - 0.5, -0.5))
            axes.set_yticks(range(len(rows)), [str(row.get("bar", row["way"])) for row in rows])
            axes.grid(axis="x", alpha=0.3)
            axes.margins(x=0.25)
            for position, row in enumerate(rows):
                if value := row.get("seconds"):
                    axes.plot(value, position, "o", color=palette()["vacsr"])
                    axes.annotate(f"  {_number(value)}", (value, position), va="center")
                else:
                    axes.text(0.02, position, str(row["problem"]), va="center", transform=axes.get_yaxis_transform())
            figure.supxlabel(self._settings(), fontsize=8)
        return done.getvalue()

    def _settings(self) -> str:
        return f"{', '.join(f'{name} {_number(value)}' for name, value in self.settings.items())}; {self.where}."


def _number(value: Any) -> str:
    """Three digits of a float, a dash for None, the rest as it is.

    >>> _number(0.0123456), _number(1234.5), _number(5000), _number("a"), _number(1.0), _number(None)
    ('0.0123', '1,234', '5,000', 'a', '1', '–')
    """
    if isinstance(value, int | float):
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)
