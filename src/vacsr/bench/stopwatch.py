"""The one stopwatch: seconds and memory of a piece of work, on a CPU or a GPU, alone or in turn with others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile

Step = Callable[[], object]
MIB, GIB = 2**20, 2**30
_ERROR_LENGTH = 200


class Timing(NamedTuple):
    """Seconds of one piece of work in each round, or why it failed."""

    times: tuple[float, ...]
    error: str | None = None

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.times)


def seconds(work: Step, *, device: torch.device) -> float:
    """Of one call, waiting for the GPU before and after it."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def seconds_per_step(step: Step, *, device: torch.device, steps: int, groups: int = 1) -> float:
    """The mean over steps that run back to back; the median of several such groups."""

    def run() -> None:
        for _ in range(each):
            step()

    each = max(1, steps // groups)
    return statistics.median(seconds(run, device=device) for _ in range(groups)) / each


def time_in_turn(
    ways: Mapping[str, Step], *, device: torch.device, rounds: int = 9, budget: float = 4.0
) -> dict[str, Timing]:
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


class Prepared(NamedTuple):
    """A way that is ready to be timed."""

    run: Step
    cells: Mapping[str, Any] | None = None
    """Numbers of its row that are known already."""
    operations: float | None = None
    warm_up: Step | None = None
    """A short call of the same kind, if a whole one takes too long."""


class Way(NamedTuple):
    """One way to a result: the cells that name its row, and how to prepare it when its turn comes."""

    cells: dict[str, Any]
    prepare: Callable[[], Prepared]


def measure(
    ways: Iterable[Way], *, device: torch.device, log: Callable[[str], None], rounds: int = 9, budget: float = 4.0,
    statistic: Callable[[Sequence[float]], float] = min,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per way: prepare and call each once, then time all in turn. One that fails has a ``problem`` instead.

    ``seconds`` is the fastest round, since other load on the machine only ever adds time, or another statistic.
    """
    rows: list[dict[str, Any]] = []
    prepared: dict[str, Prepared] = {}
    for way in ways:
        log(f"{', '.join(map(str, way.cells.values()))}: first call")
        rows.append(dict(way.cells))
        try:
            ready = way.prepare()
            (ready.warm_up or ready.run)()
            rows[-1] |= ready.cells or {}
            prepared[str(len(rows) - 1)] = ready
        except Exception as error:  # one way must not end the run
            rows[-1]["problem"] = describe_error(error)
    log("all of them in turn")
    steps = {number: ready.run for number, ready in prepared.items()}
    for number, timing in time_in_turn(steps, device=device, rounds=rounds, budget=budget).items():
        row, operations = rows[int(number)], prepared[number].operations
        if timing.error is not None:
            row["problem"] = timing.error
            continue
        row |= {"seconds": statistic(timing.times), "median": timing.median, "rounds": len(timing.times)}
        if operations is not None:
            row["tflops"] = operations / row["seconds"] / 1e12
    return rows


def peak_mib(work: Step, *, device: torch.device) -> float:
    """The most that a call allocates beyond what was held before it, as torch's allocator counts it."""
    if device.type != "cuda":
        with profile(profile_memory=True, use_kineto=False) as profiler:
            work()
        changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        return _largest_rise([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]) / MIB
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def _largest_rise(changes: list[int]) -> int:
    """The largest rise of a running sum above its lowest point so far.

    >>> _largest_rise([-5, 3, 4, -2])
    7
    """
    live = low = top = 0
    for change in changes:
        live += change
        low = min(low, live)
        top = max(top, live - low)
    return top


def process_bytes(field: str) -> int | None:
    """`VmRSS`, the memory of this process, or `VmHWM`, its peak; None where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak of the device, or of this process on a CPU, start from what is held now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_device(device: torch.device) -> str:
    """The hardware and software that numbers depend on.

    >>> describe_device(torch.device("cpu")).startswith("CPU, ")
    True
    """
    count = torch.get_num_threads()
    threads = f"CPU, {count} thread{'' if count == 1 else 's'}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return f"{name}, torch {torch.__version__}"


def describe_error(error: Exception) -> str:
    """For a cell of a table: out of memory, or the first line of the message.

    >>> describe_error(RuntimeError("DefaultCPUAllocator: can't allocate memory")), describe_error(ValueError("a | b"))
    ('out of memory', 'a / b')
    """
    message = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in message:
        return "out of memory"
    return message.splitlines()[0].replace("|", "/")[:_ERROR_LENGTH]
