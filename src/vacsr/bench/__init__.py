"""`vacsr bench`: several ways to the same result, timed in turn in one run, as a table, JSON and a plot.

The scripts of benchmarks/ use the same stopwatch.
"""

from __future__ import annotations

import io
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch

What = Literal["scoring", "training", "metrics"]
Size = Literal["small", "coco"]
Cell = str | float | None
Step = Callable[[], object]
Log = Callable[[str], None]


def run_bench(what: What, *, device: torch.device, size: Size | None = None, log: Log = lambda _: None) -> BenchResult:
    """Run one benchmark. The default size is ``coco`` on a GPU, ``small`` elsewhere and always for metrics.

    ``log`` receives the name of each way before it is timed.
    """
    large = device.type == "cuda" and what != "metrics"
    module = import_module(f"vacsr.bench.{what}")
    result: BenchResult = module.run(module.SIZES[size or ("coco" if large else "small")], device, log)
    return result


class Prepared(NamedTuple):
    """A way that is ready to be timed."""

    run: Step
    cells: Mapping[str, Any] | None = None  # numbers of its row that are known already
    operations: float | None = None
    warm_up: Step | None = None  # a short call of the same kind, if a whole one takes too long


class Way(NamedTuple):
    """One way to a result: the cells that name its row, and how to prepare it when its turn comes."""

    cells: dict[str, Any]
    prepare: Callable[[], Prepared]


def measure(
    ways: Iterable[Way], *, device: torch.device, log: Log, rounds: int = 9, budget: float = 4.0,
    statistic: Callable[[Sequence[float]], float] = min,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per way: prepare and call each once, then time all in turn. One that fails has a ``problem`` instead.

    ``seconds`` is the fastest round, since other load on the machine only ever adds time, or another statistic.
    """
    rows: list[dict[str, Any]] = []
    prepared: dict[int, Prepared] = {}
    for number, way in enumerate(ways):
        log(f"{', '.join(map(str, way.cells.values()))}: first call")
        rows.append(dict(way.cells))
        try:
            ready = way.prepare()
            (ready.warm_up or ready.run)()
            rows[number] |= ready.cells or {}
            prepared[number] = ready
        except Exception as error:  # one way must not end the run
            rows[number]["problem"] = describe_error(error)
    log("all of them in turn")
    steps = {number: ready.run for number, ready in prepared.items()}
    for number, timing in time_in_turn(steps, device=device, rounds=rounds, budget=budget).items():
        row, operations = rows[number], prepared[number].operations
        if timing.error is not None:
            row["problem"] = timing.error
            continue
        row |= {"seconds": statistic(timing.times), "median": timing.median, "rounds": len(timing.times)}
        if operations is not None:
            row["tflops"] = operations / row["seconds"] / 1e12
    return rows


class Timing(NamedTuple):
    """Seconds of one piece of work in each round, or why it failed."""

    times: tuple[float, ...]
    error: str | None = None

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.times)


def time_in_turn(
    ways: Mapping[Any, Step], *, device: torch.device, rounds: int = 9, budget: float = 4.0
) -> dict[Any, Timing]:
    """Seconds of each way, interleaved: a slow spell of the machine then affects all of them.

    The first call of a round warms the caches and is timed only if the way is slow. A way stops taking part when it
    has used ``budget`` seconds; one that fails keeps its error, and the others go on.
    """
    timings = {name: Timing(()) for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            times, error = timings[name]
            if error is not None or sum(times) > budget:
                continue
            try:
                took = seconds(work, device=device)
                took = seconds(work, device=device) if took < budget / rounds else took
                timings[name] = Timing((*times, took))
            except Exception as failure:  # one way must not end the run
                timings[name] = Timing((), describe_error(failure))
    return timings


def seconds_per_step(step: Step, *, device: torch.device, steps: int, groups: int = 1) -> float:
    """The mean over steps that run back to back; the median of several such groups."""

    def run() -> None:
        for _ in range(each):
            step()

    each = max(1, steps // groups)
    return statistics.median(seconds(run, device=device) for _ in range(groups)) / each


def seconds(work: Step, *, device: torch.device) -> float:
    """Of one call, waiting for the GPU before and after it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    started = time.perf_counter()
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


@dataclass(frozen=True)
class BenchResult:
    """Numbers of several ways, measured in one run."""

    bench: str
    where: str  # GPU or CPU, threads, torch
    settings: Mapping[str, Any]  # sizes of the problem
    rows: Sequence[Mapping[str, Cell]]  # one per way; `way` names it, `problem` says why it has no numbers
    columns: Mapping[str, str]  # keys that the table shows, with their headings
    plotted: Sequence[str]  # keys that the plot shows, one panel each
    notes: Sequence[str] = ()
    label: str = "way"  # the key that names a row of the plot

    def to_json(self) -> dict[str, Any]:
        """Everything but how it is shown."""
        known = {"bench": self.bench, "where": self.where, "settings": dict(self.settings)}
        return {"schema": 1, **known, "rows": [dict(row) for row in self.rows], "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A table, the settings under it, and notes. A way without numbers says why beside its name."""
        rules = ["---:" if any(isinstance(row.get(key), float) for row in self.rows) else "---" for key in self.columns]
        lines = [list(self.columns.values()), rules]
        for row in self.rows:
            shown = {**row, "way": f"{row['way']} ({row['problem']})"} if row.get("problem") else row
            lines.append([_number(shown.get(key)) for key in self.columns])
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", self._settings(), *self.notes])

    def to_svg(self) -> str:
        """The plotted columns on logarithmic axes. A way that failed says why; one without any value is left out."""
        import matplotlib
        from matplotlib.figure import Figure

        def positive(row: Mapping[str, Cell], key: str) -> bool:
            value = row.get(key)
            return isinstance(value, float) and value > 0

        rows = [row for row in self.rows if row.get("problem") or any(positive(row, key) for key in self.plotted)]
        names = [textwrap.shorten(str(row[self.label]), 60, placeholder=" …") for row in rows]
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9}):
            figure = Figure(figsize=(4 + 4 * len(self.plotted), 1.8 + 0.3 * len(rows)), layout="constrained")
            figure.suptitle(self.bench)
            panels = figure.subplots(1, len(self.plotted), squeeze=False, sharey=True)[0]
            for axes, key in zip(panels, self.plotted, strict=True):
                axes.set(xscale="log", xlabel=self.columns[key], ylim=(max(len(rows), 1) - 0.5, -0.5))
                axes.set_yticks(range(len(rows)), names)
                axes.grid(axis="x", alpha=0.3)
                axes.margins(x=0.25)
                for position, row in enumerate(rows):
                    if positive(row, key):
                        axes.plot(row[key], position, "o", color="#3a3fb5")
                        axes.annotate(f"  {_number(row[key])}", (row[key], position), va="center")
                    else:
                        text = str(row.get("problem") or "–")
                        axes.text(0.02, position, text, va="center", transform=axes.get_yaxis_transform())
            figure.supxlabel("\n".join(textwrap.wrap(self._settings(), 60 * (1 + len(self.plotted)))), fontsize=8)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()

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
