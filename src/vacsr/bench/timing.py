"""How long, and how much memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile

_BUDGET_S = 4.0  # for the rounds of one way; the first always runs
_ROUNDS = 9
_MIB = 2**20
_SAID = 200  # letters of what went wrong


class Timed(NamedTuple):
    """Of one way."""

    seconds: float
    """Of the fastest round: what else a machine does only ever adds."""
    median: float
    rounds: int


class InTurn(NamedTuple):
    """Of all ways."""

    found: dict[str, Timed]
    problems: dict[str, str]
    """Why a way has no time."""


def timed_in_turn(ways: Mapping[str, Callable[[], object]], *, device: torch.device) -> InTurn:
    """One round of each after the other, so that a slow spell of the machine meets all of them.

    All are warm. A quick call is timed right after one of the same kind that is not: caches hold what it
    left there. A way takes part in up to nine rounds, until it has used four seconds; one that fails is left out.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    problems: dict[str, str] = {}
    for _ in range(_ROUNDS):
        for name, work in ways.items():
            if name in problems or sum(times[name]) > _BUDGET_S:
                continue
            try:
                took = once(work, device=device)
                times[name].append(once(work, device=device) if took < _BUDGET_S / _ROUNDS else took)
            except Exception as error:  # one way must not end the run
                problems[name] = what_failed(error)
    known = {name: each for name, each in times.items() if each and name not in problems}
    return InTurn(
        {name: Timed(min(each), statistics.median(each), len(each)) for name, each in known.items()}, problems
    )


def once(work: Callable[[], object], *, device: torch.device) -> float:
    """Seconds of a call, waiting for the GPU before and after."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def peak_mib(work: Callable[[], object], *, device: torch.device) -> float:
    """The most that a call holds beyond what was there before it, as torch's allocator counts it."""
    if device.type != "cuda":
        with profile(profile_memory=True, use_kineto=False) as seen:
            work()
        changes = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
        return _highest([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]) / _MIB
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    _wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / _MIB


def _highest(changes: list[int]) -> int:
    """The largest rise of a running sum above its lowest point so far.

    >>> _highest([-5, 3, 4, -2])
    7
    """
    live = low = top = 0
    for change in changes:
        live += change
        low = min(low, live)
        top = max(top, live - low)
    return top


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def what_failed(error: Exception) -> str:
    """For a cell of a table: memory that is full, or the first line of what went wrong.

    >>> what_failed(RuntimeError("DefaultCPUAllocator: can't allocate memory")), what_failed(ValueError("a | b"))
    ('out of memory', 'a / b')
    """
    said = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in said:
        return "out of memory"
    return said.splitlines()[0].replace("|", "/")[:_SAID]
